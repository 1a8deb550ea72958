"""HybriMoE's impact-driven prediction: of the experts that the next layers will probably use, those whose
residency saves most of a layer's simulated time."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from pipeline.policies.balance import ActiveCosts, LayerSeconds, in_queue, two_ended
from pipeline.policies.costs import Costs
from pipeline.policies.options import PAUSE, Whole
from pipeline.policies.parts import ApplyGate, Expert, Prediction
from pipeline.policies.predictions import DEPTH
from pipeline.policies.view import Active, Signals, View

WIDE = 16  # active experts from which a layer's simulations are not kept
MOST_KNOWN = 4096  # simulations that are kept
CANDIDATES = 16  # numbers of rows that are tried, the highest: a prompt has more, and each costs a simulation


class Impact(Prediction):
    """HybriMoE's impact-driven prefetching. The routers of the next `depth` layers are applied to this
    layer's x. For each predicted expert that no target keeps, its layer is simulated as
    `assignment=two-ended` divides it, with the expert missing and with it resident; the `prefetch` experts
    that save most are fetched, one after the other, each with the earlier ones taken as resident. An expert
    that saves nothing is not fetched."""

    name: ClassVar[str] = "impact"
    help: ClassVar[str] = "HybriMoE's: of the next layers' experts those that shorten a layer most"
    options = (
        DEPTH,
        Whole(name="prefetch", help="experts predicted after each layer", default=1, low=1, high=64),
        PAUSE,
    )
    needs_costs = True

    def __init__(self, *, depth: int, prefetch: int, pause: str = PAUSE.default) -> None:
        super().__init__(pause=pause)
        self._depth = depth
        self._prefetch = prefetch
        self._seconds = LayerSeconds()
        self._simulated = _Simulations()

    def reserve(self, view: View) -> int:
        # those of the layer that is computed, and of as many later ones as this looks ahead
        return self._prefetch * (1 + self._depth)

    def probes(self, layer: int, view: View) -> tuple[int, ...]:
        return tuple(range(layer + 1, min(layer + 1 + self._depth, view.shape.layers)))

    def experts(self, layer: int, signals: Signals, view: View, apply_gate: ApplyGate) -> list[Expert]:
        assert view.router is not None
        self._simulated.use(view.costs)
        ahead = []
        for later in self.probes(layer, view):
            if later in signals.probes:
                active = apply_gate(later, view.router(signals.probes[later])).active
                # what a target keeps will have landed by then
                missing = (view.shape.tiles - view.target[later][active.indices]).tolist()
                if any(missing):
                    ahead.append(self._layer(later, active, missing, view))
        chosen: list[Expert] = []
        for _ in range(self._prefetch):
            best = max(ahead, key=lambda one: one.gain, default=None)  # of equal ones the next layer
            if best is None or best.gain <= 0:
                break
            chosen.append(best.fetch())
        return chosen

    def _layer(self, layer: int, active: Active, missing: list[int], view: View) -> _Known | _Simulated:
        """A later layer. Where one expert is fetched, and each has a row, it follows from what is missing:
        few such layers differ."""
        alike = self._prefetch == 1 and len(active.rows) == len(missing)
        key = tuple(sorted(missing)) if alike else ()
        known = self._simulated.best.get(key) if alike else None
        if known is None:
            costs = self._seconds.of(active, view.target[layer], view)
            simulated = _Simulated(layer, active.experts.tolist(), costs, self._simulated)
            if not alike:
                return simulated
            known = self._simulated.best[key] = simulated.gain, missing[simulated.best]
        gain, lacks = known
        return _Known(gain, (layer, int(active.experts[missing.index(lacks)])))


class _Simulations:
    """The seconds of two-ended layers by the rows and the missing tiles of their experts: few differ."""

    def __init__(self) -> None:
        self._costs: Costs | None = None
        self._known: dict[tuple[tuple[int, int], ...], float] = {}
        # by the missing tiles of experts with a row each: the gain, and the missing tiles of the best one
        self.best: dict[tuple[int, ...], tuple[float, int]] = {}

    def use(self, costs: Costs | None) -> None:
        """Simulate with these from now on."""
        if self._costs is not costs or len(self._known) > MOST_KNOWN:
            self._costs = costs
            self._known.clear()
            self.best.clear()

    def seconds(self, costs: ActiveCosts, resident: int = -1) -> float:
        """`resident`: the place of an expert that is taken as resident beside those that are."""
        missing, link = costs.missing, costs.link
        if resident >= 0:
            missing, link = missing.copy(), link.copy()
            missing[resident], link[resident] = 0, 0.0
        key = tuple(sorted(zip(costs.rows, missing, strict=True)))
        seconds = self._known.get(key)
        if seconds is None:
            seconds = self._known[key] = two_ended(link, *costs.for_queue[1:]).seconds
        return seconds

    def wide(self, costs: ActiveCosts, resident: Sequence[int]) -> list[float]:
        """The same of a prompt's layer, of which none is met again: as it is, and with each of these experts
        resident. The queue is sorted once."""
        link, rest = costs.link.copy(), costs.for_queue[1:]
        queue = in_queue(link, costs.rows)
        seconds = [two_ended(link, *rest, queue).seconds]
        for index in resident:
            kept, link[index] = link[index], 0.0
            moved = [other for other in queue if other != index]
            insort(moved, index, key=lambda one: (link[one], -costs.rows[one]))
            seconds.append(two_ended(link, *rest, moved).seconds)
            link[index] = kept
        return seconds


class _Known(NamedTuple):
    """What would be found of a later layer, from one that was alike."""

    gain: float
    expert: Expert

    def fetch(self) -> Expert:
        """The best expert, the only one that is fetched."""
        return self.expert


@dataclass
class _Simulated:
    """A later layer, its predicted experts, and the one of them that saves most when it is resident."""

    layer: int
    experts: list[int]
    costs: ActiveCosts
    simulations: _Simulations

    def __post_init__(self) -> None:
        rows, missing = self.costs.rows, self.costs.missing
        # experts of equal costs save as much: the first one of each stands for all, which is one for a token
        absent = {(rows[i], missing[i]): i for i in reversed(range(len(rows))) if missing[i]}
        tried = sorted(absent, reverse=True)[:CANDIDATES]
        self.gain, self.best = 0.0, 0
        if not tried:
            return
        places = [absent[key] for key in tried]
        if len(rows) > WIDE:
            before, *after = self.simulations.wide(self.costs, places)
        else:
            before = self.simulations.seconds(self.costs)
            after = [self.simulations.seconds(self.costs, place) for place in places]
        for place, seconds in zip(places, after, strict=True):
            if before - seconds > self.gain:
                self.gain, self.best = before - seconds, place

    def fetch(self) -> Expert:
        """The best expert, which is taken as resident from now on."""
        index = self.best
        self.costs.link[index], self.costs.missing[index] = 0.0, 0
        self.__post_init__()
        return self.layer, self.experts[index]
