"""One policy's way through a trace, on the clock of a cost model.

It asks the policy what `pipeline/engine/engine.py` asks, in the same order, and executes the answers on three
resources that work at the same time:

- the device: of each layer what is not its routed experts (`other`), then its resident tiles, then those it
  fetches as they land;
- the link: tile after tile, see `cache.py`;
- the host: one layer's share after the other; a Work arrives a round trip after it was sent, and that of a
  layer that was decided ahead is sent a layer earlier.

A layer ends when its device and host shares are there. Embedding and head cost nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import FloatArray, IntArray, Phase
from pipeline.errors import PlanError, TraceError
from pipeline.policies.calibration import Calibration
from pipeline.policies.costs import Costs
from pipeline.policies.prefetch_meter import PrefetchMeter
from pipeline.policies.view import Ahead, Plan, Policy, Routing, Signals, View
from pipeline.replay.cache import SimulatedCache
from pipeline.replay.outcome import Outcome, PhaseOutcome
from pipeline.replay.recorded_router import RecordedRouter
from pipeline.traces.header import Header
from pipeline.traces.steps import LayerTrace, TracedStep

Scalar = TypeVar("Scalar", bound=np.generic)


class Replay:
    """A policy, its cache and the clock. `calibration` as an engine would have it, without the gate for the
    next token's first layer where the trace has no logits of it; `popularity` [L, E] as an engine would have
    counted before."""

    def __init__(
        self,
        header: Header,
        policy: Policy,
        costs: Costs,
        capacity: int,
        *,
        calibration: Calibration | None = None,
        popularity: NDArray[np.int64] | None = None,
    ) -> None:
        """`capacity`: tiles. Raises PolicyError where the policy lacks what it needs."""
        shape = header.shape
        self._header = header
        self._policy = policy
        self._costs = costs.for_tiles(shape.tiles)
        self._capacity = capacity if policy.uses_device else 0
        self._calibration = calibration
        self._router = RecordedRouter(header.router)
        self._popularity = np.zeros((shape.layers, shape.experts), np.int64)
        if popularity is not None:
            self._popularity += popularity
        self._prefetch = PrefetchMeter()
        self._rested = 0  # steps of decode in which prefetching rested
        self._step = 0
        self._phases: dict[Phase, PhaseOutcome] = {
            "prefill": PhaseOutcome(shape.layers),
            "decode": PhaseOutcome(shape.layers),
        }
        self._counters = self._phases["decode"]
        self._seconds: dict[int, tuple[float, float, float]] = {}  # by rows: see _tile
        self.cache = SimulatedCache(shape, self._capacity, self._costs.link)
        self.cache.counters = self._counters
        self.now = 0.0  # seconds
        self._host_free = 0.0
        self._ahead: tuple[Ahead, float] | None = None  # the next layer, and when the host has its share
        view = self._view("decode", ())
        placement = policy.placement(view)
        self.cache.place(placement)
        self._notes = list(policy.notes(view))

    def run(self, steps: Iterable[TracedStep]) -> Outcome:
        """Replay them all. Raises PlanError for answers that break a policy's contract."""
        for step in steps:
            self.step(step)
        return self.outcome

    @property
    def outcome(self) -> Outcome:
        """So far."""
        prefill, decode = self._phases["prefill"], self._phases["decode"]
        notes = list(self._notes)
        if self._rested:
            notes.append(
                f"{self._policy.name}: prefetching rested in {self._rested} of {decode.steps} decode steps,"
                " because too little of what it brought was of use"
            )
        return Outcome(prefill, decode, self._policy.exact, notes)

    def step(self, step: TracedStep) -> None:
        """One step of the engine."""
        rows = len(step.sequences)
        counters = self._counters = self.cache.counters = self._phases[step.phase]
        began = self.now
        self.cache.update(self.now)
        view = self._view(step.phase, step.sequences)
        self._ahead = None
        for index, layer in enumerate(step.layers):
            self._layer(index, layer, rows, view)
        self._step += 1
        counters.steps += 1
        counters.rows += rows
        counters.seconds += self.now - began
        if step.phase == "decode":
            self._rested += not self._prefetch.on
            self._prefetch.step(counters.predicted, counters.useful)

    def _layer(self, layer: int, traced: LayerTrace, rows: int, view: View) -> None:
        policy, cache, counters = self._policy, self.cache, self._counters
        tiles = view.shape.tiles
        decided, self._ahead = self._ahead, None
        probes = policy.probes(layer, view)
        other = self._tile(rows)[2]
        counters.device_busy += other
        now = self.now + other
        cache.take_in(now)

        logits = None
        if decided is None and traced.logits is not None:
            logits = traced.logits.astype(np.float32)
        self._router.layer(logits, traced.said)
        signals = Signals(logits, {target: self._probe(layer, traced, target) for target in probes})
        if decided is None:
            gated = policy.gate(layer, signals, view)
            plan = policy.plan(layer, gated.routing, view)
        else:
            gated = decided[0].gated
            plan = Plan(decided[0].cut)
        stale = decided is not None and decided[0].early

        active = workload(gated.routing, view.shape.experts)
        resident = cache.residency[layer]
        counters.active[layer] += len(active)
        counters.hits[layer] += [int(resident[e]) for e, _ in active].count(tiles)  # before the plan
        cache.retarget(plan.targets)
        cut = checked(plan.cut, active, tiles, policy)
        counters.fidelity.book(gated, plan.cut, tiles, stale)
        popularity = self._popularity[layer]
        for expert, count in active:
            popularity[expert] += count

        host_done = decided[1] if decided and stale else self._submit(active, cut, tiles, now)
        self._begin_next(layer, signals, view, now)
        if (wanted := policy.predict(layer, signals, gated, view)) and policy.uses_device:
            cache.retarget(wanted, predicted=True)
            cache.update(now)
        device_done = self._compute(layer, active, cut, now)
        counters.wait_host += max(0.0, host_done - device_done)
        self.now = max(device_done, host_done)
        if policy.uses_device:
            cache.take_in(self.now)
            cache.retarget(policy.after(layer, gated.routing, view))
            cache.update(self.now)

    def _submit(self, active: list[tuple[int, int]], cut: list[int], tiles: int, now: float) -> float:
        """Send the host its share; when it has computed that."""
        seconds, count = 0.0, 0
        for (_, rows), p in zip(active, cut, strict=True):
            if p < tiles:
                seconds += self._tile(rows)[0] * (tiles - p)
                count += tiles - p
        if not count:
            return 0.0
        self._host_free = max(self._host_free, now + self._costs.round_trip) + seconds
        self._counters.host_busy += seconds
        self._counters.host_tiles += count
        return self._host_free

    def _begin_next(self, layer: int, signals: Signals, view: View, now: float) -> None:
        ahead = self._policy.ahead(layer, signals, view)
        if ahead is None:
            return
        done = 0.0
        if ahead.early:
            tiles = view.shape.tiles
            active = workload(ahead.gated.routing, view.shape.experts)
            done = self._submit(active, checked(ahead.cut, active, tiles, self._policy), tiles, now)
        self._ahead = (ahead, done)

    def _compute(self, layer: int, active: list[tuple[int, int]], cut: list[int], now: float) -> float:
        """The device's share; when it is done."""
        cache, counters = self.cache, self._counters
        seconds: dict[int, float] = {}
        missing = []
        busy = 0.0
        resident = cache.residency[layer]
        for (expert, rows), p in zip(active, cut, strict=True):
            if not p:
                continue
            counters.device_tiles += p
            here = min(p, int(resident[expert]))
            tile = seconds[expert] = self._tile(rows)[1]
            if here:
                busy += tile * here
                cache.used((layer, expert))
            if here < p:
                missing.append((expert, here, p))
        at = now + busy
        if missing:
            for expert, landing in cache.demand(layer, missing, now):
                if landing > at:
                    counters.wait_link += landing - at
                    at = landing
                at += seconds[expert]
                busy += seconds[expert]
        counters.device_busy += busy
        return at

    def _probe(self, layer: int, traced: LayerTrace, target: int) -> FloatArray:
        """What the trace has of a later layer's router, or of the gate for the next token's first layer."""
        last = layer == self._header.shape.layers - 1
        found = None
        if last and target == 0:
            found = traced.first
        elif layer < target <= layer + len(traced.predictions):
            found = traced.predictions[target - layer - 1]
        if found is None:
            raise TraceError(
                f"policy {self._policy.name} asks at layer {layer} for a prediction of layer {target}, which"
                f" is not in the trace: it has {self._header.depth} layers ahead"
            )
        return found.astype(np.float32)

    def _tile(self, rows: int) -> tuple[float, float, float]:
        """Seconds of a tile on the host, of one on the device, of a layer's other work; at so many rows."""
        known = self._seconds.get(rows)
        if known is None:
            costs = self._costs
            known = self._seconds[rows] = (
                float(costs.host_seconds(rows, 1)),
                float(costs.device_seconds(rows, 1)),
                float(costs.other_seconds(rows)),
            )
        return known

    def _view(self, phase: Phase, sequences: tuple[int, ...]) -> View:
        return View(
            shape=self._header.shape,
            phase=phase,
            capacity=self._capacity,
            residency=_read_only(self.cache.residency),
            target=_read_only(self.cache.target),
            popularity=_read_only(self._popularity),
            step=self._step,
            costs=self._costs if self._policy.needs_costs else None,
            router=self._router,
            calibration=self._calibration,
            sequences=sequences,
            prefetching=self._prefetch.on,
        )


def workload(routing: Routing, experts: int) -> list[tuple[int, int]]:
    """The active experts in ascending order, each with the rows that use it."""
    if len(routing.experts) == 1:
        row = zip(routing.experts[0].tolist(), routing.weights[0].tolist(), strict=True)
        return sorted([(expert, 1) for expert, weight in row if weight != 0])
    counts = routing.workload(experts).tolist()
    return [(expert, count) for expert, count in enumerate(counts) if count]


def checked(cut: IntArray, active: list[tuple[int, int]], tiles: int, policy: Policy) -> list[int]:
    """The active experts' cuts. Raises PlanError."""
    cuts = [int(cut[expert]) for expert, _ in active]
    if cuts and not 0 <= min(cuts) <= max(cuts) <= tiles:
        raise PlanError(f"a cut of policy {policy.name} is outside 0..{tiles}")
    if not policy.uses_device and any(cuts):
        raise PlanError(f"policy {policy.name} gave work to a device without a slab")
    return cuts


def _read_only(array: NDArray[Scalar]) -> NDArray[Scalar]:
    view = array.view()
    view.flags.writeable = False
    return view
