"""Measures the costs of a tile on the host, on the device and on the link, and of a layer outside its
experts, in about two seconds.

Host and link read the same memory, and a device `cpu` computes on the host's cores. So each side is measured
while the other one works: the pool during fetches, and fetches and the device's tiles while the pool
computes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from pipeline.backbone.batch import TokenSpan
from pipeline.backbone.kv_cache import KVCache
from pipeline.backbone.protocol import BackboneStep, LayerCall
from pipeline.backbone.stages import StagedBackbone, devices_of
from pipeline.calibration import cost_cache
from pipeline.config import CoordinatorConfig
from pipeline.counters import PhaseCounters, StepClock
from pipeline.engine.engine import Engine
from pipeline.engine.stage import EngineStage
from pipeline.errors import PolicyError
from pipeline.experts.device_share import Slab
from pipeline.experts.division import Share, split_layer
from pipeline.experts.mover import Landed, Wanted
from pipeline.experts.pool import Ticket
from pipeline.policies.costs import Costs
from pipeline.policies.view import Routing
from shm.mask import DENSE

ROWS = (1, 4, 16, 64)
BUDGET = 2.0  # seconds in all
ROUND_TRIPS = 50
OTHER_LAYERS = 4  # layers at most that `other` times
LEAST = 3  # repeats of what is measured

log = logging.getLogger(__name__)


def costs_for(engine: Engine, coordinator: CoordinatorConfig, context: int, index: int = 0) -> Costs:
    """The costs that this engine's policies plan with on one of its devices: the file of --costs; else those
    that were measured before on the same machine with the same model and options; else measured now and kept.
    What runs corrects them. `context`: the longest sequence. Raises PolicyError without a slab to measure
    with, or for a file that cannot be used."""
    if coordinator.options.costs is not None:
        return Costs.load(coordinator.options.costs).for_tiles(engine.shape.tiles)
    setting = setting_of(engine, coordinator, index)
    if (known := cost_cache.find(coordinator.cache, setting)) is not None:
        log.debug("costs: as measured before, see %s", setting.name)
        return known.costs
    costs = measure_costs(engine, context, index)
    sizes = engine.shape.tiles, engine.layout.tile_bytes
    cost_cache.keep(
        coordinator.cache, cost_cache.Record(setting, str(coordinator.model), *sizes, time.time(), costs)
    )
    return costs


def setting_of(engine: Engine, coordinator: CoordinatorConfig, index: int = 0) -> cost_cache.Setting:
    """The setting that names the kept costs of one of this engine's devices."""
    config, device = coordinator.options, engine.stages[index].device
    library = device.library
    cpu, cores = cost_cache.processor()
    return cost_cache.Setting(
        cpu=cpu,
        cores=cores,
        device=device.name if device.on_host else device.describe(),
        store=coordinator.fingerprint,
        format=config.format,
        backbone=config.backbone_dtype,
        workers=coordinator.workers.cores,
        kernels="torch" if library is None else library.variant,
        emulation=replace(config, link_gbps=config.link_of(index)).emulation,
    )


def measure_costs(engine: Engine, context: int = ROWS[-1], index: int = 0) -> Costs:
    """Medians per tile, and per layer for the rest, on one of the devices. Raises PolicyError where the
    engine has no slab."""
    stage = engine.stages[index]
    if stage.memory.slab is None:
        raise PolicyError("measuring costs needs a slab for experts on the device: give --expert-cache")
    stage.device.use()
    share = BUDGET / (3 * len(ROWS) + 2)
    probe = _Probe(engine, stage, stage.memory.slab)
    probe.warm_up()
    host = tuple(probe.host(rows, share) for rows in ROWS)
    device = tuple(probe.device(rows, share) for rows in ROWS)
    link, fetch = probe.link(share)
    launch = probe.launch(device[0], share)
    return Costs(ROWS, host, device, link, probe.round_trip(), probe.other(context, share), launch, fetch)


class _Probe:
    """Uses random activations and the model's real experts, a different one each time, as a step does."""

    def __init__(self, engine: Engine, stage: EngineStage, slab: Slab) -> None:
        self._engine, self._stage = engine, stage
        self._device, self._memory = stage.device, stage.memory
        self._slab = slab.memory
        layers = range(engine.shape.layers)
        if engine.tier is not None:  # nothing is read from disk while something is measured
            layers = stage.layers[:1]
            engine.tier.bring(layers.start, *range(engine.shape.experts))
        self._places = itertools.cycle(itertools.product(range(engine.shape.experts), layers))

    def warm_up(self) -> None:
        """Run each side once: first calls cost more."""
        self._submit(1).result()
        self._fetch()
        self.device(1, 0.0)

    def host(self, rows: int, seconds: float) -> float:
        """One tile at `rows` rows, all workers together, while tiles stream over the link."""
        tiles = self._engine.shape.tiles

        def once() -> float:
            ticket = self._submit(rows)
            self._fetch()
            ticket.result()
            return ticket.busy / tiles  # of the slowest worker; the wall time may be that of the fetch

        return _median(once, seconds)

    def device(self, rows: int, seconds: float) -> float:
        """One tile at `rows` rows from the slab, while the pool computes."""
        memory, slab, shape = self._memory, self._slab, self._engine.shape
        first = self._stage.layers.start
        x = self._activations(rows).to(self._device.torch_device)
        experts = min(-(-min(8, slab.slots) // shape.tiles), shape.experts)
        count = min(8, slab.slots, experts * shape.tiles)
        items = np.array([[expert, shape.tiles, shape.tiles] for expert in range(experts)], np.int32)
        numbers = np.tile(np.arange(rows, dtype=np.int32), experts)
        offsets = np.arange(experts + 1, dtype=np.int32) * rows
        share = Share(items, offsets, numbers, np.ones(len(numbers), np.float32))
        every = itertools.cycle(range(slab.slots))  # others each time, as in a step: a GPU's cache is large

        def once() -> float:
            ticket = self._submit(rows)
            clock = StepClock(PhaseCounters(shape.layers))
            masked = memory.begin(first, share, x, DENSE, clock).masked
            layer = memory.begin_sum(first, share, x, masked)
            slots = itertools.islice(every, count)
            tiles = [(at // shape.tiles, at % shape.tiles, slab.slot(slot)) for at, slot in enumerate(slots)]
            started = time.perf_counter()
            layer.add(tiles)
            self._device.total([layer.result()], (), x.shape)
            self._device.wait(self._device.fence())
            elapsed = time.perf_counter() - started
            ticket.result()
            return elapsed / count

        return _median(once, seconds)

    def launch(self, tile: float, seconds: float) -> float:
        """A layer's device share beside its tiles, of `tile` seconds each: one of each expert that a token
        uses, while the pool computes."""
        engine, memory = self._engine, self._memory
        count = min(engine.shape.top_k, self._slab.slots)
        experts = np.arange(count, dtype=np.int32)
        items = np.stack([experts, np.zeros_like(experts), np.ones_like(experts)], axis=1)
        share = Share(
            items, np.arange(count + 1, dtype=np.int32), np.zeros(count, np.int32), np.ones(count, np.float32)
        )
        nothing_missing = share._replace(items=items[:, [0, 2, 2]])
        clock = StepClock(counters := PhaseCounters(engine.shape.layers))
        x = self._activations(1).to(self._device.torch_device)
        memory.count_in(counters)  # until the next step
        every = itertools.cycle(range(self._slab.slots))  # whose bytes do not matter

        def once() -> float:
            ticket = self._submit(1)
            started = time.perf_counter()
            landing = iter([[Landed(expert, 0, next(every)) for expert in range(count)]])
            work = memory.begin(self._stage.layers.start, nothing_missing, x, DENSE, clock)
            y = memory.compute(work._replace(share=share, landing=landing), x, clock)
            self._device.total([y], (), x.shape)
            self._device.wait(self._device.fence())
            elapsed = time.perf_counter() - started
            ticket.result()
            return elapsed

        return max(0.0, _median(once, seconds) - count * tile)

    def link(self, seconds: float) -> tuple[float, float]:
        """Moving one tile while the pool computes, and the rest of a demand: for each of as many experts as a
        token uses."""
        shape = self._engine.shape
        count = min(shape.top_k, shape.experts)
        tiles: list[float] = []

        def once() -> float:
            ticket = self._submit(1)
            before = self._memory.copied()
            elapsed = self._fetch(count)
            ticket.result()
            moved, spent = (now - then for now, then in zip(self._memory.copied(), before, strict=True))
            tiles.append(spent / moved)
            return max(0.0, elapsed - spent) / count

        fetch = _median(once, seconds)
        return float(np.median(tiles)), fetch

    def round_trip(self) -> float:
        """An empty Work to every worker and back."""
        x = np.zeros((1, self._engine.layout.shape.hidden), np.float32)

        def once() -> float:
            started = time.perf_counter()
            self._engine.pool.submit_empty(x).result()
            return time.perf_counter() - started

        return float(np.median([once() for _ in range(ROUND_TRIPS)]))

    @torch.inference_mode()
    def other(self, context: int, seconds: float) -> tuple[float, ...]:
        """Seconds of a layer outside its routed experts at each of ROWS: attention, router, copy to the host,
        shared experts. The rows follow the other tokens of the longest chunk. A few layers are measured."""
        model = self._engine.backbone
        longest = min(ROWS[-1], context)
        # A separate cache, because requests may have filled the engine's.
        sequence = KVCache(model.facts, model.dtype, devices_of(model), longest).allocate(longest)
        by_rows = {}
        for rows in sorted({min(rows, longest) for rows in ROWS}, reverse=True):  # the longest fills it first
            sequence.truncate(0)
            sequence.grow(longest)
            sequence.advance(longest - rows)
            for stage in self._engine.stages:
                stage.device.prepare(model.largest_product(rows))
            by_rows[rows] = self._without_experts(TokenSpan(sequence, [0] * rows), seconds)
        return tuple(by_rows[min(rows, longest)] for rows in ROWS)

    def _without_experts(self, span: TokenSpan, seconds: float) -> float:
        """The median of the seconds of a layer without its routed experts, over steps that end early."""
        device = self._device
        numbers = self._stage.layers[:OTHER_LAYERS]
        layers = len(numbers)
        until, taken = time.perf_counter() + seconds, list[float]()
        while len(taken) < LEAST * layers or time.perf_counter() < until:
            ends = [time.perf_counter()]

            def no_experts(call: LayerCall) -> None:
                call.attend(True, ())
                call.read()
                call.shared()
                device.wait(device.fence())
                ends.append(time.perf_counter())  # noqa: B023 - called within this turn of the loop
                if call.layer == numbers[-1]:
                    raise _Enough

            with contextlib.suppress(_Enough):
                self._begin(span, numbers).run(no_experts)
            taken += np.diff(ends).tolist()
        return float(np.median(taken))

    def _begin(self, span: TokenSpan, layers: range) -> BackboneStep:
        """Begin a step of these layers, or of some more."""
        model = self._engine.backbone
        if isinstance(model, StagedBackbone):
            return model.step([span], model.router, layers)
        return model.step([span], model.router)

    def _submit(self, rows: int) -> Ticket:
        expert, layer = next(self._places)
        shape = self._engine.shape
        routing = Routing(np.full((rows, 1), expert, np.int32), np.ones((rows, 1), np.float32))
        none = np.zeros(shape.experts, np.int32)  # the device has no tile of it
        split = split_layer(routing, none, none, shape.tiles, layer)
        return self._engine.pool.submit(split, self._activations(rows).numpy())

    def _fetch(self, experts: int = 1) -> float:
        """Copy experts of one layer to the device, on demand; seconds."""
        expert, layer = next(self._places)
        shape, device = self._engine.shape, self._device
        wanted = [Wanted((expert + more) % shape.experts, 0, shape.tiles) for more in range(experts)]
        started = time.perf_counter()
        for _ in self._memory.mover.demand(layer, wanted):
            pass
        device.wait(device.fence())
        return time.perf_counter() - started

    def _activations(self, rows: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rows)
        return torch.randn(rows, self._engine.layout.shape.hidden, generator=generator)


class _Enough(Exception):
    """A step need not be computed further."""


def _median(once: Callable[[], float], seconds: float) -> float:
    """The median of repeated calls, for `seconds` and at least LEAST."""
    until = time.perf_counter() + seconds
    values = [once()]
    while len(values) < LEAST or time.perf_counter() < until:
        values.append(once())
    return float(np.median(values))
