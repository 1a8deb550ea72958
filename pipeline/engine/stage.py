"""Consecutive layers of the model on one device: their tiles in its memory, its costs, and a policy that
decides about these layers alone, so that it knows one capacity and one link. Most engines have one stage."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from pipeline.arrays import Counts, Phase
from pipeline.backbone.backbone import Backbone, EagerLayers
from pipeline.backbone.batch import TokenSpan
from pipeline.backbone.protocol import AnyBackbone, BackboneStep
from pipeline.backbone.stages import Stage, StagedLayers
from pipeline.backbone.step import OwnStep, StepLayers
from pipeline.config import GraphsName
from pipeline.counters import PhaseCounters
from pipeline.device.base import Device
from pipeline.engine.driver import LayerDecision, LayerExecutor, PolicyDriver
from pipeline.engine.graphs import StepGraphs
from pipeline.engine.observer import Probing
from pipeline.engine.timing import Corrections, Timing
from pipeline.errors import DiskFailed, PolicyError
from pipeline.experts.device_share import DeviceMemory
from pipeline.experts.pool import Ticket
from pipeline.policies.calibration import Calibration
from pipeline.policies.costs import Costs
from pipeline.policies.view import Ahead, ModelShape, Policy, Routing, Signals, Target, View
from shm.mask import Mask

log = logging.getLogger(__name__)


class Prepared(NamedTuple):
    """What a stage has for a policy, before it is in use."""

    driver: PolicyDriver[Ticket]
    timing: Timing
    probing: Probing
    corrections: Corrections | None


class EngineStage:
    """Layers on one device. Arrays of its memory are of all layers of the model; its policy's view has those
    of the stage, counted from 0."""

    driver: PolicyDriver[Ticket]  # set by `take`, like `timing`
    timing: Timing

    def __init__(self, backbone: AnyBackbone, layers: range, shape: ModelShape, graphs: GraphsName) -> None:
        """`backbone`: with these layers alone; `shape`: of the whole model."""
        self.backbone, self.layers, self._shape = backbone, layers, shape
        self.device: Device = backbone.device
        self.memory = DeviceMemory(shape, self.device)
        self.graphs = StepGraphs(backbone if isinstance(backbone, Backbone) else None, self.device, graphs)
        self.probing = Probing(backbone, self.device.torch_device, None)
        self.corrections: Corrections | None = None

    @property
    def tiles(self) -> int:
        """Tiles of all experts of its layers."""
        return len(self.layers) * self._shape.experts * self._shape.tiles

    def prepare(
        self,
        policy: Policy,
        popularity: Counts,
        counters: PhaseCounters,
        costs: Costs | None = None,
        calibration: Calibration | None = None,
        heat: Counts | None = None,
        up: str = "",
        up_share: float = 0.0,
        follow: bool = False,
    ) -> Prepared:
        """Make what a policy needs; arguments as of Engine.set_policy, arrays with all layers. Raises
        PolicyError."""
        memory, rows = self.memory, slice(self.layers.start, self.layers.stop)
        if policy.uses_device and memory.slab is None:
            raise PolicyError(f"policy {policy.name} keeps experts on the device, and the engine has no slab")
        if calibration is not None and len(self.layers) < self._shape.layers:
            calibration = calibration.of_layers(self.layers)
        corrections = self.corrections
        if costs is not None and (corrections is None or corrections.measured != costs):
            corrections = Corrections(costs)
        timing = Timing(memory, self.device, costs, corrections if follow else None)
        view = View(
            replace(self._shape, layers=len(self.layers)),
            *("decode", memory.capacity, memory.residency[rows], memory.target[rows], popularity[rows]),
            step=0,
            costs=timing.costs,
            router=self.backbone.router_math,
            calibration=calibration,
            staging=memory.staging,
            heat=None if heat is None else heat[rows],
            up=up,
            up_share=up_share,
            probing=self.can_probe,
        )
        driver: PolicyDriver[Ticket] = PolicyDriver(policy, view, *counters.prefetched)
        if any(policy.probes(layer, driver.view) for layer in range(len(self.layers))):
            self.backbone.check_probes(f"policy {policy.name}")
        if policy.probes_before(0, driver.view) and not isinstance(self.backbone, Backbone):
            raise PolicyError(
                f"policy {policy.name} predicts before a layer's attention, which modules of transformers do"
                f" not show: give --set {policy.name}.prediction=next-gate"
            )
        probing = Probing(self.backbone, self.device.torch_device, calibration)
        return Prepared(driver, timing, probing, corrections)

    def take(self, prepared: Prepared) -> None:
        """Use a policy from now on. Its placement is resident when this returns."""
        self.driver, self.timing, self.probing, self.corrections = prepared
        self.device.use()
        first = self.layers.start
        placed = self.driver.placement
        self.memory.mover.retarget(
            Target(first + layer, expert, tiles)
            for layer, row in enumerate(placed.tolist())
            for expert, tiles in enumerate(row)
        )
        try:
            self.memory.mover.wait_idle()
        except DiskFailed as e:
            log.warning(f"not all experts of the policy's placement are on the device: {e}")

    def rest(self) -> None:
        """Nothing is computed or moved: let the policy change what is resident, in the background."""
        self.device.use()
        first = self.layers.start
        self.memory.end_layer([Target(first + t.layer, *t[1:]) for t in self.driver.rest()])

    @property
    def can_probe(self) -> bool:
        """Routers can be applied to the input of an earlier layer."""
        try:
            self.backbone.check_probes("")
        except PolicyError:
            return False
        return True

    def poll(self) -> None:
        """Handle the prefetcher's messages, starts and exits."""
        self.device.use()
        self.memory.poll()


def begin_step(
    backbone: AnyBackbone, stages: Sequence[EngineStage], spans: Sequence[TokenSpan], phase: Phase
) -> BackboneStep:
    """Begin a step through all stages; of single tokens by graphs, where a device makes them."""
    numbers = range(stages[-1].layers.stop)
    if len(stages) > 1:
        each = [Stage(s.device, s.layers, partial(_layers, s, spans, phase)) for s in stages]
        return OwnStep(StagedLayers(each), numbers)
    if (layers := _by_graphs(stages[0], spans, phase)) is not None:
        return OwnStep(layers, numbers)
    return backbone.step(spans, stages[0].probing.logits)


def _by_graphs(stage: EngineStage, spans: Sequence[TokenSpan], phase: Phase) -> StepLayers | None:
    return stage.graphs.layers(spans, stage.probing, stage.memory) if phase == "decode" else None


def _layers(stage: EngineStage, spans: Sequence[TokenSpan], phase: Phase) -> StepLayers:
    """A stage's part of a step."""
    assert isinstance(stage.backbone, Backbone)
    return _by_graphs(stage, spans, phase) or EagerLayers(stage.backbone, spans, stage.probing.logits)


def copied(stages: Sequence[EngineStage]) -> tuple[int, float]:
    """As DeviceMemory.copied, of all devices."""
    tiles, seconds = zip(*(stage.memory.copied() for stage in stages), strict=True)
    return sum(tiles), sum(seconds)


class Shifted:
    """A LayerExecutor for a policy that counts the layers of its stage from 0."""

    def __init__(self, inner: LayerExecutor[Ticket], first: int) -> None:
        """`inner`: counts the model's layers, of which the stage's begin at `first`."""
        self._inner, self._first = inner, first

    def _target(self, probe: int, by: int) -> int:
        """A probe's target in the other count: trained gates, 0 or below, are the stage's own."""
        return probe + by if probe > 0 else probe

    def _targets(self, targets: Sequence[Target]) -> tuple[Target, ...]:
        return tuple(Target(target.layer + self._first, *target[1:]) for target in targets)

    def _decision(self, of: LayerDecision[Ticket]) -> LayerDecision[Ticket]:
        return of._replace(layer=of.layer + self._first, targets=self._targets(of.targets))

    def _signals(self, found: Signals) -> Signals:
        shifted = {self._target(p, -self._first): logits for p, logits in found.probes.items()}
        return Signals(found.logits, shifted)

    def read_before(self, layer: int, probes: Sequence[int]) -> Signals:
        first = self._first
        return self._signals(self._inner.read_before(layer + first, [probe + first for probe in probes]))

    def read(self, layer: int, probes: Sequence[int], own: bool) -> Signals:
        first = self._first
        wanted = [self._target(probe, first) for probe in probes]
        return self._signals(self._inner.read(layer + first, wanted, own))

    def begin(self, decision: LayerDecision[Ticket]) -> None:
        self._inner.begin(self._decision(decision))

    def begin_early(self, layer: int, ahead: Ahead, mask: Mask) -> Ticket:
        return self._inner.begin_early(layer + self._first, ahead, mask)

    def prefetch(self, targets: Sequence[Target], no_room: int) -> None:
        self._inner.prefetch(self._targets(targets), no_room)

    def prefetch_channels(self, layer: int, routing: Routing, mask: Mask) -> None:
        self._inner.prefetch_channels(layer + self._first, routing, mask)

    def compute(self, decision: LayerDecision[Ticket]) -> None:
        self._inner.compute(self._decision(decision))

    def end(self, targets: Sequence[Target]) -> None:
        self._inner.end(self._targets(targets))
