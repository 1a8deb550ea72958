"""The engine: steps through the model, under one policy at a time (docs/architecture.md, One step).

It executes plans and decides nothing: the policy decides, as arrays, which tiles are resident and which side
computes which tiles. The engine knows no requests, no clients and no text.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pipeline.arrays import Counts, FloatArray, Phase
from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.kv_cache import SequenceKV
from pipeline.backbone.protocol import AnyBackbone, BackboneStep, LayerCall
from pipeline.backbone.stages import StagedBackbone
from pipeline.config import GraphsName
from pipeline.counters import Counters, PhaseCounters, StepClock
from pipeline.device.base import Added, Device
from pipeline.engine.driver import LayerDecision, LayerExecutor
from pipeline.engine.observer import Observer, with_observers
from pipeline.engine.stage import EngineStage, Shifted, begin_step, copied
from pipeline.errors import DeviceFailed, DiskFailed, OutOfDeviceMemory, StepFailed
from pipeline.experts.device_share import DeviceWork
from pipeline.experts.disk_tier import DiskTier
from pipeline.experts.division import Split, split_layer
from pipeline.experts.pool import HostPool, Ticket
from pipeline.memory.needs import out_of_memory
from pipeline.policies.calibration import Calibration
from pipeline.policies.costs import Costs
from pipeline.policies.view import Ahead, ModelShape, Policy, Routing, Signals, Target
from shm.floe import FloeFormat
from shm.layout import StoreLayout
from shm.mask import DENSE, Mask, Tally
from workers.cuda import CudaError

log = logging.getLogger(__name__)


class Engine:
    """The model on its device, or on several, with its workers. Used by one thread."""

    def __init__(
        self,
        backbone: AnyBackbone,
        layout: StoreLayout,
        pool: HostPool,
        graphs: GraphsName = "off",
    ) -> None:
        """The engine has no slab: set the `memory` of each stage before a policy with `uses_device`.
        `graphs`: as in EngineConfig."""
        s = layout.shape
        self.backbone, self.layout = backbone, layout
        self.pool = pool
        layers = len(backbone.facts.moe_layers)  # the store may have one more, which drafts
        self.shape = ModelShape(layers, s.experts, s.tiles, backbone.facts.top_k)
        if isinstance(backbone, StagedBackbone):
            self.stages = [EngineStage(part, part.layers, self.shape, graphs) for part in backbone.parts]
        else:
            self.stages = [EngineStage(backbone, range(layers), self.shape, graphs)]
        self._channel_bytes = layout.tile_bytes // s.tile if layout.head_bytes else 0
        self.counters = Counters(layout.tile_bytes, layers, self._channel_bytes)
        self.observers: list[Observer] = []
        self.tier: DiskTier | None = None  # of a store of which only some experts are in memory
        self.tick: Callable[[], None] = lambda: None  # at each layer: progress that the supervisor watches
        self.up = layout.format.up.name if isinstance(layout.format, FloeFormat) else ""  # as in View
        self.up_share = layout.head_bytes / (layout.head_bytes + layout.tile_bytes)  # as in View
        # Outlasts policies; only some steps count.
        self.popularity = np.zeros((layers, s.experts), np.int64)
        self.only_waits = [True] * s.layers  # in the latest step: the host's share is all of a layer
        self.keeps_hidden = False  # `hidden` is wanted
        self.hidden: Tensor | None = None  # of the latest step's rows, as BackboneStep's

    @property
    def first(self) -> EngineStage:
        """The stage that steps begin with; most engines have no other."""
        return self.stages[0]

    @property
    def device(self) -> Device:
        """The device of the first stage, and the like of all."""
        return self.first.device

    @property
    def policy(self) -> Policy:
        """The policy of the first stage, and the like of all."""
        return self.first.driver.policy

    @property
    def kv_cache(self) -> str:
        """Return the format of the KV cache where it is an approximation; else nothing."""
        return "int8" if self.backbone.dtype == torch.int8 else ""

    @property
    def exact(self) -> bool:
        """Return whether answers are the model's in its formats."""
        return self.policy.exact and not self.kv_cache

    def set_policy(
        self,
        policy: Policy,
        costs: Costs | Sequence[Costs] | None,
        calibration: Calibration | None = None,
        *,
        heat: Counts | None = None,
        counted: bool = True,
        follow: bool = False,
    ) -> tuple[str, ...]:
        """Use a policy from the next step on, on each device one of the kind. Its placement is resident when
        this returns. `costs`: of all devices, or of each. Without `counted` its steps leave `popularity`
        unchanged; `heat`: as in View; `follow`: correct the costs by what runs. Returns its notes. Raises
        PolicyError where the policy needs a slab or anything else that the engine does not have; the previous
        policy is kept then."""
        popularity = self.popularity if counted else self.popularity.copy()
        others = [copy.deepcopy(policy) for _ in self.stages[1:]]
        priced = costs if isinstance(costs, Sequence) else [costs] * len(self.stages)
        counters = self.counters.phases["decode"]
        prepared = [
            stage.prepare(own, popularity, counters, price, calibration, heat, self.up, self.up_share, follow)
            for stage, own, price in zip(self.stages, [policy, *others], priced, strict=True)
        ]
        for stage, ready in zip(self.stages, prepared, strict=True):
            stage.take(ready)
        return tuple(dict.fromkeys(note for stage in self.stages for note in stage.driver.notes))

    def forget_trials(self) -> None:
        """Reset all counters: the steps so far were trials, not requests."""
        self.counters = Counters(self.layout.tile_bytes, self.shape.layers, self._channel_bytes)
        for stage in self.stages:
            stage.driver.forget_counts()

    def bring(self, layer: int, expert: int) -> None:
        """This process reads an expert's bytes next: wait until they are in memory. Raises DiskFailed."""
        self.tick()
        if self.tier is not None:
            self.tier.bring(layer, expert)

    def poll_children(self) -> None:
        """Handle messages, starts and exits of workers and prefetcher while no layer waits for them."""
        self.pool.update(0)
        for stage in self.stages:
            stage.poll()

    def step(self, inputs: Sequence[StepInput], phase: Phase, live: Iterable[int] = ()) -> list[FloatArray]:
        """Run the tokens of `inputs` through the model, and advance their KV by all but guesses. `live`: the
        sequences that have begun and not ended, without which those of `inputs` are taken to be all. Returns
        the wanted logits of each, float32 [n, vocabulary], or its choices (`answers`). Raises StepFailed; the
        sequences are then as they were. Raises CudaError where the device will compute no other step."""
        with self.guarded([item.span.kv for item in inputs]):
            return self._step(inputs, phase, live)

    @contextmanager
    def guarded(self, sequences: Sequence[SequenceKV]) -> Iterator[None]:
        """Turn what a device raises in a step of these sequences into the exceptions of `step`."""
        before = [(kv, kv.length, kv.capacity) for kv in sequences]
        try:
            yield
        except (torch.OutOfMemoryError, torch.AcceleratorError, CudaError) as e:
            for kv, length, capacity in before:
                kv.truncate(length)
                kv.grow(capacity)
            if isinstance(e, torch.OutOfMemoryError):
                self.device.free_cached()
                raise OutOfDeviceMemory(out_of_memory(e)) from e
            for stage in self.stages:
                stage.device.use()
                stage.device.check(e)
            raise DeviceFailed(f"the GPU could not compute it: {str(e).splitlines()[0]}") from e

    @torch.inference_mode()
    def _step(self, inputs: Sequence[StepInput], phase: Phase, live: Iterable[int]) -> list[FloatArray]:
        stages = self.stages
        counted = any(item.counted for item in inputs)
        counters = self.counters.phases[phase] if counted else PhaseCounters(self.shape.layers)
        observers = self.observers if counted else []
        spans = [item.span for item in inputs]
        sequences = self.begin_step(stages, spans, phase, tuple(live), counters, counted)
        clock = StepClock(counters, partial(copied, stages), again=self.pool.interruptible)
        for observer in observers:
            observer.begin(phase, sequences)
        step = begin_step(self.backbone, stages, spans, phase)
        self.run_layers(step, stages, phase, clock, observers)
        clock.layer = self.shape.layers
        self.tick()
        if self.tier is not None:
            self.tier.end_step(phase == "decode")
        counters.steps += 1
        counters.paused_steps += not self.first.driver.view.prefetching
        counters.rows += len(sequences) - sum(item.span.drafted for item in inputs)
        for stage in stages:
            if stage.driver.end_step(*counters.prefetched, stage.timing.end_step()):
                log.info(stage.driver.prefetch.status)
        answered = step.answers(inputs)
        self.hidden = step.hidden() if self.keeps_hidden else None
        for item in inputs:
            item.span.kv.advance(len(item.span.tokens) - item.span.drafted)
        clock.finish("head")
        for observer in observers:
            observer.end()
        return answered

    def begin_step(
        self,
        stages: Sequence[EngineStage],
        spans: Sequence[TokenSpan],
        phase: Phase,
        live: tuple[int, ...],
        counters: PhaseCounters,
        counted: bool,
    ) -> tuple[int, ...]:
        """Prepare these stages for a step of spans; returns the sequence of each row."""
        for stage in stages:
            stage.memory.count_in(counters)
        self.poll_children()
        sequences = tuple(span.kv.id for span in spans for _ in span.tokens)
        for stage in stages:
            stage.timing.begin_step(phase, stage.driver.priced)
            stage.driver.begin_step(phase, sequences, live, stage.timing.dense)
            stage.driver.counting = counted
            stage.device.prepare(stage.backbone.largest_product(len(sequences)))
        return sequences

    def run_layers(
        self,
        step: BackboneStep,
        stages: Sequence[EngineStage],
        phase: Phase,
        clock: StepClock,
        observers: list[Observer],
    ) -> None:
        """Compute a step's layers, each by its stage. Raises StepFailed, and what devices raise."""
        executors = {stage: TensorExecutor(self, stage, phase, clock, observers) for stage in stages}
        shifted = {stage: executor.shifted for stage, executor in executors.items()}
        stage_of = {layer: stage for stage in stages for layer in stage.layers}

        def experts(call: LayerCall) -> Tensor | None:
            clock.layer = call.layer
            self.tick()
            stage = stage_of[call.layer]
            executors[stage].call = call
            stage.driver.layer(call.layer - stage.layers.start, shifted[stage])
            return executors[stage].output

        try:
            step.run(experts)
        except (StepFailed, torch.OutOfMemoryError, torch.AcceleratorError, CudaError):
            for stage, executor in executors.items():
                executor.abandon(stage.driver.cancel_early())
            clock.fail()
            raise


class TensorExecutor:
    """Carries out a policy's decisions on the expert layers of one stage in one step with tensors: a
    `LayerExecutor`."""

    call: LayerCall  # set before each layer
    output: Tensor | None  # of the latest layer's experts, float32 [R, H]

    def __init__(
        self, engine: Engine, stage: EngineStage, phase: Phase, clock: StepClock, observers: list[Observer]
    ) -> None:
        self.engine, self.phase, self.clock, self._observers = engine, phase, clock, observers
        self.counters, self.timing, self._layers = clock.counters, stage.timing, stage.layers
        self._first, self._router = stage.layers.start, stage.backbone.router_math
        self._device, self._memory, self._tiles = stage.device, stage.memory, engine.shape.tiles
        self._ticket: Ticket | None = None  # of the latest layer; as the following
        self._device_work: DeviceWork | None = None
        self._x_host: FloatArray
        self._split: Split
        self._outputs: list[Added]  # to be summed up
        self._parts: Sequence[FloatArray]  # the workers' partial sums, to be added behind these

    @property
    def shifted(self) -> LayerExecutor[Ticket]:
        """Return this executor for the stage's policy."""
        return Shifted(self, self._first) if self._first else self

    def read_before(self, layer: int, probes: Sequence[int]) -> Signals:
        logits = self.call.before(probes)
        self.clock.mark("read")
        return Signals(None, dict(zip(probes, logits, strict=True)))

    def read(self, layer: int, probes: Sequence[int], own: bool) -> Signals:
        """Compute the layer up to its experts. Copies x, the router's logits and the probes' to the host
        together."""
        wanted = with_observers(layer, probes, self._observers)
        if (tier := self.engine.tier) is not None and tier.predicts and self.phase == "decode":
            following = layer + 1
            wanted += [following] if following in self._layers and following not in wanted else []
        self.call.attend(own, wanted)
        self.clock.mark("attention")
        self._x_host, *read = self.call.read()
        self.clock.mark("read")
        if self.engine.only_waits[layer] and self.phase == "decode" and self._device.on_host:
            self.engine.pool.announce()  # this layer is probably planned as in the step before
        self._memory.mover.collect_landings()
        return Signals(read.pop(0) if own else None, dict(zip(wanted, read, strict=True)))

    def begin(self, decision: LayerDecision[Ticket]) -> None:
        layer = decision.layer
        for observer in self._observers:
            observer.layer(decision, self._x_host)
        active = decision.gated.routing.active.experts
        self.counters.book_hits(layer, decision.resident.take(active).tolist(), self._tiles)
        self._memory.mover.retarget(decision.targets)
        routing, mask = decision.gated.routing, decision.mask
        cuts = decision.cut, decision.resident, self._tiles
        self._split = split = split_layer(routing, *cuts, layer, mask)
        if (tier := self.engine.tier) is not None:
            here = np.minimum(split.lo, decision.resident).take(active) < self._tiles
            tier.need(layer, active[here], active[~here])
        self.counters.fidelity.book(decision.gated, decision.cut, self._tiles, decision.stale)
        self.clock.mark("plan")

        self._outputs, self._parts = [], ()
        timed = self.timing.times(layer)
        started = self._memory.start(layer, split.device, self.call.inputs, timed)
        if self._device.on_host:  # the device shares the workers' cores: computing beside them gains nothing
            self._compute_shared_experts()
        begun = decision.begun
        if begun is None:
            self.engine.only_waits[layer] = waits = not len(split.device.items)
            begun = self._submit(split, self._x_host, waits)
        self._ticket = begun
        if tier is not None:
            tier.beside = partial(self.engine.pool.begin_stored, begun)
        work = self._memory.begin(layer, split.device, self.call.x, mask, self.clock)
        self._device_work = work if started is None else work._replace(started=started)
        if tier is not None:
            logits = decision.signals.probes.get(layer + 1)
            tier.predict(None if logits is None else self._router(logits, layer + 1 - self._first))
        self.clock.mark("submit")

    def begin_early(self, layer: int, ahead: Ahead, mask: Mask) -> Ticket:
        gated, resident = ahead.gated, self._memory.residency[layer]
        split = split_layer(gated.routing, ahead.cut, resident, self._tiles, layer, mask)
        if self.engine.tier is not None:
            active = gated.routing.active.experts
            self.engine.tier.need_early(layer, active[split.lo.take(active) < self._tiles])
        # a copy: this layer's x is overwritten before the next layer's result is read
        ticket = self._submit(split, self._x_host.copy(), False)
        self.clock.mark("submit")
        return ticket

    def prefetch(self, targets: Sequence[Target], no_room: int) -> None:
        self.counters.wanted_experts += no_room
        self._memory.prefetch(targets)

    def prefetch_channels(self, layer: int, routing: Routing, mask: Mask) -> None:
        target = self._memory.target[layer]
        share = split_layer(routing, np.full_like(target, self._tiles), target, self._tiles).device
        self._memory.prefetch_channels(layer, share, self.call.x, mask)

    def compute(self, decision: LayerDecision[Ticket]) -> None:
        self.clock.mark("plan")
        split, work, ticket = self._split, self._device_work, self._ticket
        assert work is not None
        assert ticket is not None
        if not self._device.on_host:
            self._compute_shared_experts()
        routing = decision.gated.routing
        if (y := self.call.expert_bias(routing.experts, routing.weights)) is not None:
            self._outputs.append(y)
        if len(split.device.items):
            timed = self.timing.times(decision.layer)
            self._outputs.append(self._memory.compute(work, self.call.inputs, self.clock, timed))
            self.timing.device_began(split)
        if not ticket.empty:
            if ticket.held:
                ticket.begin_held()
                self.clock.mark("disk")
            self._parts = ticket.parts()
            self.timing.host_ends(split, ticket.busy, ticket.elsewhere)
            self.clock.mark("wait")
        self.counters.host_tiles += ticket.tiles
        self.counters.host_busy += ticket.busy
        if decision.mask != DENSE:
            tally = Tally.of([self._memory.tally(work), ticket.tally])
            self.counters.book_mask(decision.gated.routing.total_weight, tally)

    def end(self, targets: Sequence[Target]) -> None:
        self._memory.end_layer(targets)
        some = self._outputs or self._parts
        self.output = self.call.add(self._outputs, self._parts) if some else None
        if self._ticket is not None:
            self._ticket.release()
        self.clock.mark("combine")

    def abandon(self, early: Ticket | None) -> None:
        """The step fails: end what its layer has begun, and the next one's early share."""
        if self._device_work is not None:
            with suppress(DiskFailed):
                for _ in self._device_work.landing:
                    pass  # orders end, and slots become free
        if self.engine.tier is not None:
            self._device.wait(self._device.fence())  # copies have been made before their experts are evicted
        for ticket in filter(None, (early, self._ticket)):
            ticket.abandon()

    def _compute_shared_experts(self) -> None:
        if (y := self.call.shared()) is not None:
            self._outputs.append(y)
        self.clock.mark("shared")

    def _submit(self, split: Split, x: FloatArray, waits: bool) -> Ticket:
        self.timing.host_begins(split, waits)
        return self.engine.pool.submit(split, x, waits)
