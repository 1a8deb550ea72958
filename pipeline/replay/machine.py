"""Replays a trace under one policy, on the clock of a cost model.

The engine's `PolicyDriver` calls the policy, its mover and expert cache carry out what it decides, and
three resources work at the same time:

- the device: of each layer all but its routed experts (`other`), then, where it computes any tile, the start
  of its share (`launch`), its resident tiles, and fetched tiles as they land;
- the link, see `link.py`; there are slots for everything that moves;
- the host: one layer's share after the other; a Work arrives a round trip after it was sent, and that of a
  layer that was decided early is sent one layer earlier.

A layer ends when its device and host shares are computed. Embedding and head cost nothing here.

Where masks leave channels out, a tile on the host or the device takes the share of its time that is the share
of its bytes which are read, as if each row's channels were drawn independently of the others'. Which channels
these are is in no trace: of each tile they are the first ones, and a prediction names as many, of which RIGHT
are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import nan
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import FloatArray, IntArray
from pipeline.config import BACKGROUND_ORDERS
from pipeline.counters import Counters, Part, PhaseCounters, difference, pause_note
from pipeline.engine.driver import LayerDecision, PolicyDriver
from pipeline.errors import PlanError, TraceError
from pipeline.experts.cache import ExpertCache
from pipeline.experts.mover import Landed, Mover, Wanted
from pipeline.memory.needs import STAGING_TILES
from pipeline.policies.calibration import Calibration
from pipeline.policies.costs import Costs
from pipeline.policies.view import Active, Ahead, Layer, Policy, Router, Routing, Signals, Target, View
from pipeline.replay.link import ClockedLink
from pipeline.replay.steps import inputs_of
from pipeline.traces.trace import Header, TracedStep
from shm.mask import DENSE, Mask

if TYPE_CHECKING:
    from torch import Tensor

CHANNELS = 256  # of a tile, where channels are left out: so fine are the shares
RIGHT = 0.74  # of predicted channels, kept at a sparsity of 0.8
# By sparsity, as measured with `floe` on the embedded model; where nothing is left out, all are kept.
RIGHTS = ((0.0, 1.0), (0.5, 0.80), (0.8, RIGHT), (0.9, 0.69))


def right_at(sparsity: float) -> float:
    """Returns the share of predicted channels that their layer keeps: between two measured ones by their
    distances."""
    given, right = np.array(RIGHTS).T
    return float(np.interp(sparsity, given, right))


class Outcome(NamedTuple):
    """One policy's replay. The counters are an engine's: `attention` is a layer's other work, `device` its
    experts, `link` and `wait` what the device waited for."""

    counters: Counters
    exact: bool
    notes: list[str]
    measured: dict[str, Any]  # as a snapshot of the counters: of the measured steps
    warmed: dict[str, Any] | None  # of those before them
    copied: int  # experts that the device has whole at the end

    @property
    def prefill(self) -> PhaseCounters:
        return self.counters.phases["prefill"]

    @property
    def decode(self) -> PhaseCounters:
        return self.counters.phases["decode"]


class Replay:
    """A policy, its expert cache and the clock: a `LayerExecutor`. Its handle of an early host share is the
    time at which the share is done."""

    def __init__(
        self,
        header: Header,
        policy: Policy,
        costs: Costs,
        capacity: int,
        *,
        calibration: Calibration | None = None,
        popularity: NDArray[np.int64] | None = None,
        last_steps: Mapping[int, int] | None = None,
        right: float | None = None,
        begin: int = 0,
    ) -> None:
        """`capacity`: tiles. `begin`: steps that warm it, before those that are measured. `last_steps`: the
        number of each sequence's last step, with which it ends; without it, sequences end with each step.
        `calibration`: as in an engine, but without the gate for the
        next token's first layer where the trace has no logits of it. `popularity` [L, E]: the counts of
        earlier requests. `right`: of the predicted channels, kept; None: as `right_at`. Raises PolicyError
        where the policy lacks an input."""
        self._shape = shape = header.shape
        self._header = header
        self._policy = policy
        self._costs = costs.for_tiles(shape.tiles)
        self._last_steps = last_steps or {}
        self._live: set[int] = set()  # sequences that have begun and not ended
        self._logits: FloatArray | None = None  # of this layer's own router
        self._choices: dict[int, Routing] = {}  # of the logits of this layer's probes, by identity
        self._all = Counters(header.tile_bytes, shape.layers, header.tile_bytes / CHANNELS)
        self._counters = self._all.phases["decode"]
        self._host_free = 0.0
        self._sparsity = 0.0 if policy.sparsity.dense else policy.sparsity.share(calibration)
        self._right = right_at(self._sparsity) if right is None else right
        self._left = begin  # steps before those that are measured
        self._warmed: dict[str, Any] | None = None
        self._up = header.up_bytes / (header.up_bytes + header.tile_bytes)  # of the bytes that are read
        self._named = False  # channels were predicted
        capacity = capacity if policy.uses_device else 0
        staging = (shape.experts + BACKGROUND_ORDERS) * shape.tiles if policy.uses_device else 0
        sizes = shape.layers, shape.experts, shape.tiles
        self.cache = ExpertCache(*sizes, capacity, capacity + staging, fence=lambda: None)
        self._link = ClockedLink(self.cache.slots, self._costs.link, self._costs.fetch, CHANNELS)
        self.mover = Mover(self.cache, self._link, self._link, each=False, channels=CHANNELS)
        counted = np.zeros((shape.layers, shape.experts), np.int64)
        view = View(
            shape=shape,
            phase="decode",
            capacity=capacity,
            residency=self.cache.residency,
            target=self.cache.target,
            popularity=counted if popularity is None else counted + popularity,
            step=0,
            costs=self._costs if policy.needs_costs else None,
            router=_Recorded(self, header.router),
            calibration=calibration,
            staging=STAGING_TILES if policy.uses_device else 0,
            up=header.up,
            up_share=self._up,
        )
        self._driver = PolicyDriver[float](policy, view)
        self._place(self._driver.placement)
        self._notes = list(self._driver.notes)

    def _place(self, target: IntArray) -> None:
        """Make a placement resident before the clock runs. Raises PlanError."""
        every = zip(*target.nonzero(), target[target.nonzero()], strict=True)
        self.mover.retarget(Target(int(layer), int(expert), int(tiles)) for layer, expert, tiles in every)
        while self.cache.below_target:
            self.mover.update()
            self._link.settle()
            self.mover.collect_landings()

    def run(self, steps: Iterable[TracedStep]) -> Outcome:
        """Replay all steps. Raises PlanError for decisions that break a policy's contract."""
        for step in steps:
            self.step(step)
        return self.outcome

    @property
    def outcome(self) -> Outcome:
        """The result of the steps so far."""
        notes, decode = list(self._notes), self._all.phases["decode"]
        if paused := pause_note(decode.paused_steps, decode.steps):
            notes.append(f"{self._policy.name}: {paused}")
        if self._named:
            taken = f"{self._right:.0%} are taken to be kept by their layer"
            notes.append(f"{self._policy.name}: of the channels that a prediction names, {taken}")
        every = self._all.snapshot()
        measured = difference(every, self._warmed) if self._warmed else every
        copied = int(np.count_nonzero(self.cache.residency == self._shape.tiles))
        return Outcome(self._all, self._policy.exact, notes, measured, self._warmed, copied)

    @property
    def now(self) -> float:
        """Seconds since the first step began."""
        return self._link.now

    def step(self, step: TracedStep) -> None:
        """Replay one step of the engine."""
        driver, moved = self._driver, self._link.busy
        counters = self._counters = self.mover.counters = self._all.phases[step.phase]
        self.mover.forget()
        self.mover.update()
        self._live.update(step.sequences)
        driver.begin_step(step.phase, step.sequences, self._live)
        self._live -= {s for s in step.sequences if self._last_steps.get(s, step.number) <= step.number}
        counters.paused_steps += not driver.view.prefetching
        self._inputs = inputs_of(step, self._header.router)
        self._other = self._costs.other_at[len(step.sequences)]
        for index, layer in enumerate(step.layers):
            self._traced, self._layer = layer, index
            driver.layer(index, self)
        counters.steps += 1
        counters.rows += len(step.sequences)
        counters.link_busy += self._link.busy - moved
        driver.end_step(counters.predicted_tiles, counters.useful_tiles)
        if self._last_steps and not self._live:
            self.end(driver.rest())
        self._left -= 1
        if not self._left:
            self._warmed = self._all.snapshot()

    # --- a layer, in the driver's order --------------------------------------------------------------------

    def read_before(self, layer: int, probes: Sequence[int]) -> Signals:
        """No trace has a router on a layer's residual stream: what it says to the layer before's input stands
        for that, which lacks what that layer's experts added."""
        found = {target: self._inputs.ahead(layer - 1, target - layer + 1) for target in probes if layer}
        self._choices = {id(ahead[0]): ahead[1] for ahead in found.values() if ahead}
        return Signals(None, {target: ahead[0] for target, ahead in found.items() if ahead})

    def read(self, layer: int, probes: Sequence[int], own: bool) -> Signals:
        self._spend("attention", self._other)
        self.mover.collect_landings()
        self._logits = logits = self._inputs.own[layer] if own else None
        probed = {}
        self._choices.clear()
        for target in probes:
            if target > layer and (ahead := self._inputs.ahead(layer, target - layer)) is not None:
                probed[target], self._choices[id(ahead[0])] = ahead
            else:
                probed[target] = self._first_gate(layer, target)
        return tuple.__new__(Signals, (logits, probed))  # in half the time

    def begin(self, decision: LayerDecision[float]) -> None:
        layer, counters, tiles = decision.layer, self._counters, self._shape.tiles
        active = decision.gated.routing.active
        counters.book_hits(layer, decision.resident[active.indices].tolist(), tiles)
        counters.fidelity.book(decision.gated, decision.cut, tiles, decision.stale)
        self.mover.retarget(decision.targets)
        cuts, rows = self._checked(decision.cut, active), active.counts.tolist()
        begun, mask = decision.begun, decision.mask
        self._host_done = self._submit(rows, cuts, mask) if begun is None else begun
        if mask is not DENSE:
            counters.fidelity.left = nan  # the sizes of u are in no trace
        self._begin_device(layer, active.experts.tolist(), rows, cuts, mask)

    def begin_early(self, layer: int, ahead: Ahead, mask: Mask) -> float:
        active = ahead.gated.routing.active
        return self._submit(active.counts.tolist(), self._checked(ahead.cut, active), mask)

    def prefetch(self, targets: Sequence[Target], no_room: int) -> None:
        self._counters.wanted_experts += no_room
        self.mover.retarget(targets, predicted=True)
        self.mover.fetch_missing()

    def prefetch_channels(self, layer: int, routing: Routing, mask: Mask) -> None:
        if mask is DENSE:
            return
        active, tiles, ups, named = routing.active, self._shape.tiles, 0.0, []
        for expert, row in zip(active.experts.tolist(), active.counts.tolist(), strict=True):
            if (target := int(self.cache.target[layer, expert])) < tiles:
                ups += self._costs.device_at[row] * (tiles - target) * self._up
                named.append((expert, self._channels(row, target, tiles, self._right)))
        self._spend("device", ups)
        for expert, channels in named:
            self.mover.predict(layer, expert, channels)
        self._named = True

    def compute(self, decision: LayerDecision[float]) -> None:
        """End the layer when both the device and the host are done."""
        link, fetched, waited, computed = self._link, 0, 0.0, 0.0
        self._spend("device", self._resident_seconds)
        at = self.now
        for one in chain.from_iterable(self._landing):
            if (landed := link.landed[one.slot]) > at:
                waited += landed - at
                at = landed
            seconds = self._of_tile[one.expert]
            at += seconds
            computed += seconds
            fetched += one.places is None
        self._counters.fetched_tiles += fetched
        self._spend("link", waited)
        self._spend("device", computed)
        self._spend("wait", max(0.0, self._host_done - self.now))

    def end(self, targets: Sequence[Target]) -> None:
        self.mover.retarget(targets)
        self.mover.update()

    # --- its parts -----------------------------------------------------------------------------------------

    def _spend(self, part: Part, seconds: float) -> None:
        """Let the clock run."""
        self._link.now += seconds
        self._counters.seconds[part][self._layer] += seconds

    def recorded(self, logits: FloatArray) -> Routing | None:
        """The routing of these logits, where they are the layer's own or a probe's: known already."""
        return self._traced.router_routing if logits is self._logits else self._choices.get(id(logits))

    def _checked(self, cut: IntArray, active: Active) -> list[int]:
        """Returns the active experts' cuts. Raises PlanError."""
        cuts: list[int] = cut[active.indices].tolist()
        tiles = self._shape.tiles
        if cuts and not 0 <= min(cuts) <= max(cuts) <= tiles:
            raise PlanError(f"a cut of policy {self._policy.name} is outside 0..{tiles}")
        if not self._policy.uses_device and any(cuts):
            raise PlanError(f"policy {self._policy.name} gave work to a device without a slab")
        return cuts

    def _submit(self, rows: list[int], cuts: list[int], mask: Mask) -> float:
        """Send the host its share: `rows` and `cuts` of each active expert. Returns the time at which the
        share is computed, 0 for an empty share."""
        tiles, seconds = self._shape.tiles, 0.0
        count = tiles * len(cuts) - sum(cuts)
        if not count:
            return 0.0
        for row, cut in zip(rows, cuts, strict=True):
            share = 1.0 if mask is DENSE else self._up + self._kept(row) * (1 - self._up)
            seconds += self._costs.host_at[row] * (tiles - cut) * share
        self._host_free = max(self._host_free, self.now + self._costs.round_trip) + seconds
        self._counters.host_busy += seconds
        self._counters.host_tiles += count
        return self._host_free

    def _begin_device(
        self, layer: int, experts: list[int], rows: list[int], cuts: list[int], mask: Mask
    ) -> None:
        """Demand what the device's share lacks. With a mask the device computes the heads of all tiles first,
        which say what that is, and a tile beyond its target comes as channels."""
        self._landing: Iterator[list[Landed]] = iter(())
        self._resident_seconds = 0.0
        self._of_tile: dict[int, float] = {}  # seconds on the device of a tile that lands, by expert
        if not any(cuts):
            return
        dense, wanted, resident, ups = mask is DENSE, [], 0.0, 0.0
        for expert, row, cut in zip(experts, rows, cuts, strict=True):
            if not cut:
                continue
            seconds, here = self._costs.device_at[row], min(cut, int(self.cache.residency[layer, expert]))
            whole = cut
            if not dense:
                ups += seconds * cut * self._up
                seconds *= self._kept(row) * (1 - self._up)
                whole = max(here, min(cut, int(self.cache.target[layer, expert])))
            if here:
                resident += seconds * here
                self._counters.resident_tiles += here
                self.mover.used(layer, expert, here)
            if here < cut:
                self._of_tile[expert] = seconds
            if here < whole:
                wanted.append(Wanted(expert, here, whole))
            if whole < cut:
                wanted.append(Wanted(expert, whole, cut, self._channels(row, whole, cut)))
        if not dense:
            self._spend("device", self._costs.launch + ups)
        self._landing = self.mover.demand(layer, wanted)
        self._resident_seconds = resident + (self._costs.launch if dense else 0.0)

    def _kept(self, rows: int) -> float:
        """Returns the share of the channels that some row keeps."""
        return float(1 - self._sparsity**rows)

    def _channels(self, rows: int, lo: int, hi: int, right: float = 1.0) -> IntArray:
        """Returns the channels of tiles [lo, hi) that some row keeps, or as many, of which `right` are."""
        kept = round(self._kept(rows) * CHANNELS)
        first = min(kept - round(right * kept), CHANNELS - kept)
        of_each, tiles = np.arange(first, first + kept), CHANNELS * np.arange(lo, hi)
        return np.add.outer(tiles, of_each).ravel().astype(np.int32)

    def _first_gate(self, layer: int, target: int) -> FloatArray:
        """Returns the recorded logits of the gate for the next token's first layer: what no router ahead
        has."""
        first = self._traced.first if layer == self._shape.layers - 1 and target == 0 else None
        if first is None:
            raise TraceError(
                f"policy {self._policy.name} asks at layer {layer} for a prediction of layer {target}, which"
                f" is not in the trace: it has {self._header.depth} layers ahead"
            )
        return first.astype(np.float32)


@dataclass(frozen=True)
class DividedText:
    """Routing to replay, steps in order: those before `begin` warm every policy alike, the others are
    measured."""

    steps: Sequence[TracedStep]
    begin: int
    counts: NDArray[np.int64]  # [L, E] earlier uses, from which placements are made; none of measured steps
    words: str = ""
    rest: float | None = None  # seconds of a decode step that were measured and are not simulated
    calibration: Calibration | None = None  # for presets that need one; of recorded routing alone

    def replay(
        self, header: Header, policy: Policy, costs: Costs, capacity: int, right: float | None = None
    ) -> Outcome:
        """Replay it under a policy. Raises as `Replay`."""
        return Replay(
            *(header, policy, costs, capacity),
            calibration=self.calibration,
            popularity=self.counts,
            last_steps={sequence: step.number for step in self.steps for sequence in step.sequences},
            right=right,
            begin=self.begin,
        ).run(self.steps)


class _Recorded(Router):
    """The model's router. For a layer's own logits it returns the recorded routing: the logits are recorded
    as float16, and their rounding could exchange two experts that are nearly equal."""

    def __init__(self, replay: Replay, router: Router) -> None:
        self._replay, self._router = replay, router

    def __call__(self, logits: FloatArray, layer: Layer) -> Routing:
        return self._replay.recorded(logits) or self._router(logits, layer)

    def scores(self, logits: FloatArray, layer: Layer) -> FloatArray:
        return self._router.scores(logits, layer)

    def weights_of(self, logits: FloatArray, experts: IntArray, layer: Layer) -> FloatArray:
        return self._router.weights_of(logits, experts, layer)

    def differentiable(self, logits: Tensor, routing: Routing, layer: int) -> Tensor:
        return self._router.differentiable(logits, routing, layer)
