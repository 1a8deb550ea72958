"""The engine: steps through the model, under one policy at a time (docs/architecture.md, One step).

It executes plans and decides nothing: the policy decides, as arrays, which tiles are resident and which side
computes which tiles. The engine knows no requests, no clients and no text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from pipeline.arrays import FloatArray, Phase
from pipeline.backbone.backbone import Backbone
from pipeline.backbone.batch import StepInput
from pipeline.config import GraphsName
from pipeline.counters import Counters, StepClock
from pipeline.device import Device
from pipeline.engine.corrections import Corrections
from pipeline.engine.driver import PolicyDriver
from pipeline.engine.failures import restoring_sequences
from pipeline.engine.graphs import StepGraphs
from pipeline.engine.layers import EagerLayers
from pipeline.engine.observer import Observer, Probing
from pipeline.engine.tensor_executor import TensorExecutor
from pipeline.engine.timing import Timing
from pipeline.errors import PolicyError, StepFailed
from pipeline.experts.device_share import DeviceMemory
from pipeline.experts.pool import HostPool, Ticket
from pipeline.policies.calibration import Calibration
from pipeline.policies.costs import Costs
from pipeline.policies.view import ModelShape, Policy, Target, View
from shm.floe import FloeFormat
from shm.layout import StoreLayout

log = logging.getLogger(__name__)


class Engine:
    """The model on one device with its workers. Used by one thread."""

    driver: PolicyDriver[Ticket]  # set by `set_policy`, like `timing`
    timing: Timing

    def __init__(
        self,
        backbone: Backbone,
        layout: StoreLayout,
        device: Device,
        pool: HostPool,
        graphs: GraphsName = "off",
    ) -> None:
        """Without a slab: set `memory` before a policy with `uses_device`. `graphs`: as in
        EngineConfig."""
        s = layout.shape
        self.backbone, self.layout = backbone, layout
        self.device = device
        self.pool = pool
        self.shape = ModelShape(s.layers, s.experts, s.tiles, backbone.spec.top_k)
        self.memory = DeviceMemory(self.shape, device)
        self._channel_bytes = layout.tile_bytes // s.tile if layout.head_bytes else 0
        self.counters = Counters(layout.tile_bytes, s.layers, self._channel_bytes)
        self.observers: list[Observer] = []
        self.tick: Callable[[], None] = lambda: None  # at each layer: progress that the supervisor watches
        self.up = layout.format.up.name if isinstance(layout.format, FloeFormat) else ""  # as in View
        # Both outlast policies; of popularity, the rows routed to each expert, only some steps count.
        self.popularity = np.zeros((s.layers, s.experts), np.int64)
        self.corrections: Corrections | None = None
        self.probing = Probing(backbone, device.torch_device, None)
        self._only_waits = [True] * s.layers  # as in TensorExecutor
        self.graphs = StepGraphs(backbone, device, graphs)

    @property
    def policy(self) -> Policy:
        return self.driver.policy

    def set_policy(
        self,
        policy: Policy,
        costs: Costs | None,
        calibration: Calibration | None = None,
        *,
        counted: bool = True,
        follow: bool = False,
    ) -> tuple[str, ...]:
        """Use a policy from the next step on. Its placement is resident when this returns. Without `counted`
        its steps leave `popularity` unchanged. `follow`: correct the costs by what runs. Returns its notes.
        Raises PolicyError where the policy needs a slab or anything else that the engine does not have; the
        previous policy is kept then."""
        memory, decode = self.memory, self.counters.phases["decode"]
        if policy.uses_device and not memory.exists:
            raise PolicyError(f"policy {policy.name} keeps experts on the device, and the engine has no slab")
        if costs is not None and (self.corrections is None or self.corrections.measured != costs):
            self.corrections = Corrections(costs)
        timing = Timing(memory, self.device, costs, self.corrections if follow else None)
        view = View(
            shape=self.shape,
            phase="decode",
            capacity=memory.capacity,
            residency=memory.residency,
            target=memory.target,
            popularity=self.popularity if counted else self.popularity.copy(),
            step=0,
            costs=timing.costs,
            router=self.backbone.spec.router,
            calibration=calibration,
            staging=memory.staging,
            up=self.up,
        )
        self.driver = PolicyDriver(policy, view, *decode.prefetched)
        self.timing = timing
        self.probing = Probing(self.backbone, self.device.torch_device, calibration)
        placement = self.driver.placement
        memory.mover.retarget(Target(i, e, int(placement[i, e])) for i, e in np.ndindex(placement.shape))
        memory.mover.wait_idle()
        return self.driver.notes

    def forget_trials(self) -> None:
        """Reset all counters: the steps so far were trials, not requests."""
        self.counters = Counters(self.layout.tile_bytes, self.shape.layers, self._channel_bytes)
        self.driver.forget_counts()

    def poll_children(self) -> None:
        """Handle messages, starts and exits of workers and prefetcher while no layer waits for them."""
        self.pool.update(0)
        self.memory.poll()

    @restoring_sequences
    @torch.inference_mode()
    def step(self, inputs: Sequence[StepInput], phase: Phase, live: Iterable[int] = ()) -> list[FloatArray]:
        """Run the tokens of `inputs` through the model, and advance their KV. `live`: the sequences that have
        begun and not ended, without which those of `inputs` are taken to be all. Returns the wanted logits of
        each, float32 [n, vocabulary], or its choice (`answers`). Raises StepFailed; the sequences are then
        as they were."""
        backbone, driver = self.backbone, self.driver
        counters = self.counters.phases[phase]
        self.memory.count_in(counters)
        self.poll_children()
        clock = StepClock(counters, self.device, self.memory.copied)
        sequences = tuple(item.span.kv.id for item in inputs for _ in item.span.tokens)
        self.timing.begin_step(phase)
        driver.use_costs(self.timing.costs)
        driver.begin_step(phase, sequences, live)
        for observer in self.observers:
            observer.begin(phase, sequences)
        spans = [item.span for item in inputs]
        self.device.prepare(backbone.largest_product(len(sequences)))
        layers = self.graphs.layers(spans, self.probing) if phase == "decode" else None
        layers = layers or EagerLayers(backbone, self.device, self.probing, spans)
        executor = TensorExecutor(
            layers=layers,
            device=self.device,
            memory=self.memory,
            pool=self.pool,
            timing=self.timing,
            observers=self.observers,
            tiles=self.shape.tiles,
            phase=phase,
            counters=counters,
            clock=clock,
            h=layers.embed(),
            only_waits=self._only_waits,
        )
        try:
            for layer in range(self.shape.layers):
                clock.layer = layer
                self.tick()
                driver.layer(layer, executor)
        except (StepFailed, torch.OutOfMemoryError):
            executor.abandon(driver.cancel_early())
            raise
        clock.layer = self.shape.layers
        self.tick()
        counters.steps += 1
        counters.paused_steps += not driver.view.prefetching
        counters.rows += len(sequences)
        if driver.end_step(*counters.prefetched, self.timing.end_step()):
            log.info(driver.prefetch.status)
        found = layers.answers(executor.h, inputs)
        for span in spans:
            span.kv.advance(len(span.tokens))
        clock.finish("head")
        for observer in self.observers:
            observer.end()
        return found
