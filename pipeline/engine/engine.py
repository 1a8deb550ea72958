"""One step through the model: the heart of the project (DESIGN.md section 5).

The engine executes plans and decides nothing: what is resident and who computes what comes from the
policy, as arrays. It knows no requests, no clients and no text. Used by one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.arrays import FloatArray, IntArray, Phase
from pipeline.backbone.backbone import Backbone
from pipeline.backbone.batch import StepInput, logit_rows
from pipeline.counters import Counters, PhaseCounters, StepClock
from pipeline.device import Device, SlabMemory
from pipeline.engine.observer import Observer, Seen
from pipeline.engine.probing import Probing, wanted_probes
from pipeline.errors import PlanError, PolicyError, ShardFailed
from pipeline.experts.device_share import run_on_device
from pipeline.experts.host_pool import HostPool, Ticket
from pipeline.experts.shares import Missing, Split, split_layer
from pipeline.experts.tile_mover import TileMover
from pipeline.policies.calibration import Calibration
from pipeline.policies.costs import Costs
from pipeline.policies.prefetch_meter import PrefetchMeter
from pipeline.policies.view import Ahead, ModelShape, Plan, Policy, Signals, Target, View
from shm.layout import StoreLayout

log = logging.getLogger(__name__)

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True)
class DeviceMemory:
    """What an engine has that can keep experts on its device."""

    mover: TileMover
    slab: SlabMemory


@dataclass(frozen=True)
class _Early:
    """The next layer as it was decided a layer ago; `ticket`: the host has begun with its share."""

    ahead: Ahead
    ticket: Ticket | None


class Engine:
    """The model on one device with its workers, under one policy at a time."""

    def __init__(
        self,
        backbone: Backbone,
        layout: StoreLayout,
        device: Device,
        pool: HostPool,
        memory: DeviceMemory | None,
    ) -> None:
        """`memory` None: no slab yet; only policies with `uses_device` False can be set before there is."""
        s = layout.shape
        self.backbone = backbone
        self.layout = layout
        self.device = device
        self.pool = pool
        self.memory = memory
        self.shape = ModelShape(s.layers, s.experts, s.tiles, backbone.spec.top_k)
        self.counters = Counters(layout.tile_bytes, s.layers)
        self.observers: list[Observer] = []
        self.prefetch = PrefetchMeter()
        self.policy: Policy
        self.kernel = device.expert_kernel(layout)
        self._popularity = np.zeros((s.layers, s.experts), np.int64)
        self._nothing: IntArray = np.zeros((s.layers, s.experts), np.int32)
        self._costs: Costs | None = None
        self._calibration: Calibration | None = None
        self._probing = Probing(backbone, device.torch_device, None)
        self._ahead: _Early | None = None  # within a step: the next layer, where it is decided already
        self._step = 0

    def set_policy(
        self, policy: Policy, costs: Costs | None, calibration: Calibration | None = None
    ) -> tuple[str, ...]:
        """Use a policy from the next step on: its placement is resident when this returns, unless there is
        no prefetcher. Returns its notes. Raises PolicyError where it needs a slab and there is none, or lacks
        something else; the policy before is then kept."""
        if policy.uses_device and self.memory is None:
            raise PolicyError(f"policy {policy.name} keeps experts on the device, and has no room there")
        before = self._costs, self._calibration, self._step
        self._costs, self._calibration, self._step = costs, calibration, 0
        view = self._view("decode")
        try:
            placement = policy.placement(view)
        except PolicyError:
            self._costs, self._calibration, self._step = before
            raise
        counted = self.counters.phases["decode"]
        self.policy = policy
        self.prefetch = PrefetchMeter(counted.predicted_tiles, counted.useful_tiles)
        self._probing = Probing(self.backbone, self.device.torch_device, calibration)
        if self.memory is not None:
            every = np.ndindex(placement.shape)
            self.memory.mover.retarget(Target(i, e, int(placement[i, e])) for i, e in every)
            if not self.memory.mover.wait_idle():
                return *policy.notes(view), "the prefetcher is away: experts are placed when it is back"
        return policy.notes(view)

    @property
    def has_first_gate(self) -> bool:
        """Whether the next token's first layer can be probed at the last."""
        return self._probing.has_first_gate

    def forget_trials(self) -> None:
        """Start counting anew: what ran so far were trials, not requests."""
        self.counters = Counters(self.layout.tile_bytes, self.shape.layers)
        self._popularity[:] = 0

    def keep_up(self) -> None:
        """Take in who has come and who has died, whether the next layer needs them or not."""
        self.pool.update(0)
        if self.memory is not None:
            self.memory.mover.poll_prefetcher()

    @torch.inference_mode()
    def step(self, pieces: Sequence[StepInput], phase: Phase) -> list[FloatArray]:
        """Run the tokens of `pieces` through the model. Returns the wanted logits of each, float32 [n,
        vocabulary], and leaves the KV of the sequences advanced. Raises ShardFailed where the workers cannot
        compute the step: the sequences are then as they were."""
        model, device = self.backbone, self.device
        counters = self.counters.phases[phase]
        if self.memory is not None:
            self.memory.mover.counters = counters
        self.keep_up()
        clock = StepClock(counters)
        sequences = tuple(piece.span.kv.id for piece in pieces for _ in piece.span.tokens)
        view = self._view(phase, sequences)
        for observer in self.observers:
            observer.begin(phase, sequences)
        batch = model.batch([p.span for p in pieces])
        device.prepare(model.largest_product(batch.rows))
        h = model.embed(batch)
        self._ahead = None
        try:
            for layer in range(self.shape.layers):
                clock.layer = layer
                h = model.attention(layer, h, batch)
                h = self._experts(layer, h, view, counters, clock)
        except ShardFailed:
            if self._ahead is not None and self._ahead.ticket is not None:
                self.pool.abandon(self._ahead.ticket)
            raise
        clock.layer = self.shape.layers
        h = model.finish(h, batch)
        for piece in batch.spans:
            piece.kv.advance(len(piece.tokens))
        self._step += 1
        counters.steps += 1
        counters.rows += batch.rows
        if phase == "decode" and self.prefetch.step(counters.predicted_tiles, counters.useful_tiles):
            log.info(self.prefetch.says)
        answers = self._head(h, pieces)
        clock.mark("head")
        for observer in self.observers:
            observer.end()
        return answers

    def _experts(
        self, layer: int, h: Tensor, view: View, counters: PhaseCounters, clock: StepClock
    ) -> Tensor:
        """h + experts(norm(h)) of one layer, float32 [R, H]."""
        model, device, policy, pool = self.backbone, self.device, self.policy, self.pool
        early, self._ahead = self._ahead, None
        x = model.moe_input(layer, h)
        probes = wanted_probes(layer, policy, self.observers, view)
        logits = [] if early is not None else [model.router(layer, x)]
        logits += [self._probing.logits(target, x) for target in probes]
        clock.mark("attention")

        x_host, *read = device.to_host(x, *logits)
        clock.mark("read")

        if self.memory is not None:
            self.memory.mover.collect_landings()  # so that the plan sees what has landed meanwhile
        signals = Signals(None if early is not None else read.pop(0), dict(zip(probes, read, strict=True)))
        gated = policy.gate(layer, signals, view) if early is None else early.ahead.gated
        plan = policy.plan(layer, gated.routing, view) if early is None else Plan(early.ahead.cut)
        ticket = None if early is None else early.ticket
        seen = Seen(layer, x_host, signals, gated, plan.cut, self._residency[layer], ticket is not None)
        split = self._divide(seen, plan, counters)
        clock.mark("plan")

        # On the workers' own cores nothing is gained by computing beside them.
        y = model.shared_experts(layer, x) if device.on_host else None
        clock.mark("shared")

        if ticket is None:
            ticket = pool.submit(layer, split.host, x_host, view.phase)
        self._ahead = self._begin_next(layer, signals, x_host, view)
        clock.mark("submit")

        if (coming := policy.predict(layer, signals, gated, view)) and self.memory is not None:
            self.memory.mover.retarget(coming, predicted=True)
            self.memory.mover.fetch_missing()  # the layer is divided by what was resident then
        clock.mark("plan")

        if not device.on_host:
            y = model.shared_experts(layer, x)
            clock.mark("shared")

        left: list[Missing] = []
        if self.memory is not None and split.device:
            slab, mover = self.memory.slab, self.memory.mover
            routed, left = run_on_device(self.kernel, slab, mover, layer, split.device, x, counters, clock)
            y = _sum(y, routed)

        tickets = [(split.host, ticket)]
        if left:  # the prefetcher is gone: what it was to bring is the workers' now
            late = split.handed_over(left)
            tickets.append((late, pool.submit(layer, late, x_host, view.phase)))
        for share, ticket in tickets:
            if ticket.shards:
                partial = device.from_host(pool.result(ticket))
                clock.mark("wait")
                y = _sum(y, partial)
            counters.host_tiles += share.total
            counters.host_busy += ticket.busy
        if self.memory is not None:
            self.memory.mover.retarget(policy.after(layer, gated.routing, view))
            self.memory.mover.update()
        clock.mark("combine")
        return h if y is None else h + y

    def _divide(self, seen: Seen, plan: Plan, counters: PhaseCounters) -> Split:
        """Apply the plan's targets, and divide the layer's work by its cuts."""
        layer, tiles = seen.layer, self.shape.tiles
        if self.memory is None and plan.cut.any():
            raise PlanError(f"policy {self.policy.name} gave work to a device without a slab")
        for observer in self.observers:
            observer.layer(seen)
        whole = seen.resident == tiles  # before the plan itself brings any
        if self.memory is not None:
            self.memory.mover.retarget(plan.targets)
        split = split_layer(seen.gated.routing, plan.cut, self._residency[layer], tiles)
        active = split.workload > 0
        self._popularity[layer] += split.workload
        counters.active[layer] += np.count_nonzero(active)
        counters.hits[layer] += np.count_nonzero(active & whole)
        counters.fidelity.book(seen.gated, plan.cut, tiles, seen.stale)
        return split

    def _begin_next(self, layer: int, signals: Signals, x: FloatArray, view: View) -> _Early | None:
        """Where the policy decides the next layer now, have the host begin with its share, from this x."""
        ahead = self.policy.ahead(layer, signals, view)
        if ahead is None:
            return None
        ticket = None
        if ahead.early:
            tiles = self.shape.tiles
            share = split_layer(ahead.gated.routing, ahead.cut, self._residency[layer + 1], tiles).host
            ticket = self.pool.submit(layer + 1, share, x.copy(), view.phase)  # x is gone when its layer ends
        return _Early(ahead, ticket)

    def _head(self, h: Tensor, pieces: Sequence[StepInput]) -> list[FloatArray]:
        """The wanted logits of each piece; rows nobody wants do not go through the head."""
        wanted, counts = logit_rows(pieces)
        if not wanted:
            return [np.empty((0, self.backbone.spec.vocabulary), np.float32) for _ in pieces]
        rows = h if len(wanted) == len(h) else h[torch.tensor(wanted, device=h.device)]
        (logits,) = self.device.to_host(self.backbone.head(rows))
        return np.split(logits, np.cumsum(counts)[:-1])

    def _view(self, phase: Phase, sequences: tuple[int, ...] = ()) -> View:
        cache = None if self.memory is None else self.memory.mover.cache
        return View(
            shape=self.shape,
            phase=phase,
            capacity=0 if cache is None else cache.capacity,
            residency=_read_only(self._residency),
            target=_read_only(self._residency if cache is None else cache.target),
            popularity=_read_only(self._popularity),
            step=self._step,
            costs=self._costs,
            router=self.backbone.spec.router,
            calibration=self._calibration,
            sequences=sequences,
            prefetching=self.prefetch.on,
        )

    @property
    def _residency(self) -> IntArray:
        return self._nothing if self.memory is None else self.memory.mover.cache.residency


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """a + b, in a's place; None is nothing."""
    if a is None or b is None:
        return b if a is None else a
    return a.add_(b)


def _read_only(array: NDArray[Scalar]) -> NDArray[Scalar]:
    view = array.view()
    view.flags.writeable = False
    return view
