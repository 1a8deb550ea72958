"""MoEpic's replacement: the leading tiles of the experts of the highest priority, and its configuration.

A layer's exposed latency is the part of its loading time that nothing hides: of what is predicted right, the
previous layer hides as much as it leaves time for. A cached expert lacks its last tiles, another one all of
them. The inner problem divides one layer's tiles: many experts with few tiles each, or few with many. The
outer one moves an expert's worth of tiles from layer to layer until no move shortens the sum.

Latencies are expected over the number of a token's experts that are cached. The mean number alone would not
do: as hit rates rise ever more slowly with the size of a cache, whole experts load the fewest tiles. Parts of
more experts make the tokens' loads more alike, so that they fit the time of the previous layer more often.

The paper's own inner problem is another one: the division with the most experts ready when their layer
begins. Both are offered (`objective`). While the engine is idle the configuration is found again, with the
hit rates that this cache's order of experts has had since: `Reconfiguration`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import comb, inf, log
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import IntArray
from pipeline.policies.options import Choice, Number, Option
from pipeline.policies.parts import STAY, Expert, Moves, Parts, Replacement, Room, evenly
from pipeline.policies.view import Active, View

Objective = Literal["latency", "ready"]  # what the inner problem minimises, or maximises

_NOISE = 1e-12  # seconds: a move that gains no more than rounding is none


class Division(NamedTuple):
    """A layer's cache: `experts` experts with `kept` leading tiles each, and its exposed latency, seconds."""

    kept: int
    experts: int
    seconds: float


@dataclass(frozen=True)
class LayerLoads:
    """The loading of one layer in a decode step. An expert has `tiles` tiles."""

    hits: Sequence[float]  # [E + 1]: share of the used experts that are cached, by how many the cache keeps
    used: int  # experts of a step, each cached or not by itself
    accuracy: float  # share of them that the prediction names
    window: float  # seconds that the previous layer leaves for loading
    tile: float  # seconds to move a tile
    fetch: float  # seconds of an order of tiles beside these
    tiles: int

    def _cases(self, experts: int) -> Iterator[tuple[int, float]]:
        """How many of a step's experts are cached, and how often, with so many in the cache."""
        hit, used = self.hits[experts], self.used
        for cached in range(used + 1):
            yield cached, comb(used, cached) * hit**cached * (1 - hit) ** (used - cached)

    def _bottom(self, kept: int) -> float:
        """Seconds to load the rest of a cached expert."""
        missing = self.tiles - kept
        return self.fetch + missing * self.tile if missing else 0.0

    def exposed(self, kept: int, experts: int) -> float:
        """Seconds of loading that are not hidden, with so many cached experts of `kept` tiles each."""
        bottom, whole = self._bottom(kept), self._bottom(0)
        seconds = 0.0
        for cached, share in self._cases(experts):
            load = cached * bottom + (self.used - cached) * whole
            seconds += share * (load - self.accuracy * min(load, self.window))
        return seconds

    def ready(self, kept: int, experts: int) -> float:
        """Experts that are whole when their layer begins (MoEpic, mechanism 3): those that lack nothing, and
        of the predicted ones as many as load in the window, the cached ones first."""
        bottom, whole = self._bottom(kept), self._bottom(0)
        count = 0.0
        for cached, share in self._cases(experts):
            here = cached if not bottom else 0
            loads = [bottom] * (cached - here) + [whole] * (self.used - cached)
            in_time = sum(end <= self.window + _NOISE for end in np.cumsum(loads).tolist())
            count += share * (here + self.accuracy * in_time)
        return count

    def division(self, budget: int, objective: Objective = "latency") -> Division:
        """The inner problem: the best division of `budget` tiles. Of equally good ones that with the least
        latency, then that with the most tiles of each expert."""
        most = len(self.hits) - 1
        divisions = []
        for kept in range(self.tiles, 0, -1):
            experts = min(most, budget // kept)
            divisions.append(Division(kept, experts, self.exposed(kept, experts)))

        def worse(division: Division) -> tuple[float, float]:
            ready = self.ready(*division[:2]) if objective == "ready" else 0.0
            return -round(ready, 9), division.seconds

        return min(divisions, key=worse)


def configured(layers: Sequence[LayerLoads], budget: int, objective: Objective = "latency") -> list[Division]:
    """The outer problem: each layer's division, for `budget` tiles in all. First the whole experts that fit
    are divided evenly. Then the layer with the highest exposed latency that gains by it gets an expert's
    worth of tiles from the layer that loses least, as long as the sum falls; in the end no such move between
    two layers shortens it."""
    worth = layers[0].tiles
    budgets = [count * worth for count in evenly(len(layers), budget // worth)]
    budgets[0] += budget % worth

    @cache
    def best(place: int, tiles: int) -> Division:
        return layers[place].division(tiles, objective)

    def seconds(place: int, more: int = 0) -> float:
        return best(place, budgets[place] + more).seconds

    def move() -> bool:
        losses = sorted(
            (seconds(place, -worth) - seconds(place), place)
            for place, tiles in enumerate(budgets)
            if tiles >= worth
        )
        for to in sorted(range(len(layers)), key=lambda place: -seconds(place)):
            gain = seconds(to) - seconds(to, worth)
            loss, source = next((pair for pair in losses if pair[1] != to), (gain, to))
            if gain - loss > _NOISE:
                budgets[source] -= worth
                budgets[to] += worth
                return True
        return False

    while move():
        pass
    return [best(place, tiles) for place, tiles in enumerate(budgets)]


RHO, OMEGA = 0.25, 128.0  # of LCP: in omega steps without use a priority falls to rho of it
RECENCY = -log(RHO) / OMEGA


def priority(rows: float, step: int) -> float:
    """The logarithm of the priority of an expert with so many rows so far, last used in this step; without
    rows, the lowest. LCP's mu * rho ** (nu / omega) has the same order: mu is the rows over the steps so far,
    nu the steps since the last use, and the present step is the same for all experts."""
    return log(rows) + RECENCY * step if rows else -inf


class Reconfiguration:
    """When a cache is configured anew, and the hit rates for that: of the cache whose order of experts it
    measures. A change needs PERIOD decode steps behind the last one, twice as many each time, and a gain of
    GAIN: so a cache that two texts pull to and fro changes ever less often."""

    PERIOD, LONGEST, GAIN = 256, 1 << 16, 0.05

    def __init__(self, layers: int, experts: int) -> None:
        self._uses: NDArray[np.int64] = np.zeros((layers, experts), np.int64)  # by place in the order
        self._least, self._steps = self.PERIOD, 0

    def used(self, layer: int, priorities: Sequence[float], experts: Sequence[int]) -> None:
        """A decode step uses these experts of a layer; the priorities are those before it."""
        places = np.argsort(np.argsort(-np.array(priorities), kind="stable"))
        self._uses[layer, places[experts]] += 1
        self._steps += layer == 0

    @property
    def due(self) -> bool:
        """Enough was measured."""
        return self._steps >= self._least

    def hits(self) -> list[list[float]]:
        """Hit rates by size of the cache, [L][E + 1]; what is measured later counts more."""
        self._steps = 0
        within = np.cumsum(self._uses, axis=1) / np.maximum(self._uses.sum(axis=1, keepdims=True), 1)
        self._uses //= 2
        rates: list[list[float]] = np.pad(within, ((0, 0), (1, 0))).tolist()
        return rates

    def pays(self, present: float, best: float) -> bool:
        """Whether to change, from an exposed latency to another; the next change is farther away."""
        if best >= (1 - self.GAIN) * present:
            return False
        self._least = min(2 * self._least, self.LONGEST)
        return True


class Split(Replacement):
    """MoEpic's cache. Of a cached expert the leading `theta` of its tiles stay resident, so that more experts
    are cached, and the others are fetched with each use. It keeps the experts of the highest priority: mu *
    rho ** (nu / omega) with mu their rows over the steps, nu the steps since their last use (least cache
    priority, LCP). A fetched expert enters where its priority is above the lowest one of those that the step
    does not use.

    By default theta and the number of cached experts are configured for each layer (`configured`), with
    the calibration's hit rates and the costs, and again where the engine is idle; with a given theta all
    layers have the same."""

    name: ClassVar[str] = "split"
    help: ClassVar[str] = "leading tiles of the experts of the highest priority"
    options: ClassVar[tuple[Option, ...]] = (
        Number(
            name="theta",
            help="share of a cached expert that stays resident, 1 for all; by default configured by layer",
            default=None,
            low=0,
            high=1,
            whole=False,
        ),
        Choice(
            name="objective",
            help="a layer's theta has the least exposed latency, or the most experts ready in time",
            default="latency",
            choices=("latency", "ready"),
        ),
        Choice(name="reconfigure", help="0: configured once", default="1", choices=("1", "0")),
    )
    fills: ClassVar[str] = "fetched"
    without: ClassVar[str] = "theta=0.3"
    _sizes: Sequence[int]  # experts of each layer

    def __init__(self, *, theta: float | None, objective: Objective, reconfigure: str) -> None:
        self._theta, self._objective = theta, objective
        self._reconfigures = theta is None and reconfigure == "1"
        self.needs_costs = self.needs_calibration = theta is None

    def join(self, parts: Parts) -> None:
        self._predictor, self._before = parts.prediction.predictor, parts.prediction.before

    def notes(self, view: View) -> tuple[str, ...]:
        if view.shape.tiles > 1 or self._theta == 1:
            return ()
        return (
            "an expert has a single tile, so none is kept in part (--tile, in channels, makes them smaller)",
        )

    def room(self, view: View, tiles: int) -> Room:
        shape = view.shape
        if self._theta is None:
            assert view.calibration is not None
            self._tiles = tiles
            self._divisions = configured(self._loads(view, view.calibration.hit_rates.tolist()), *self._goal)
            return _room(self._divisions)
        kept = [max(1, round(self._theta * shape.tiles))] * shape.layers
        sizes = [min(size, shape.experts) for size in evenly(shape.layers, tiles // kept[0])]
        return Room(sum(sizes), kept, sizes)

    @property
    def _goal(self) -> tuple[int, Objective]:
        return self._tiles, self._objective

    def rest(self, view: View) -> Room | None:
        """Configured anew (MoEpic, mechanism 3), where that shortens the layers by what was measured."""
        measured = self._measured
        if measured is None or not measured.due:
            return None
        loads = self._loads(view, measured.hits())
        divisions = configured(loads, *self._goal)
        present = [one.exposed(d.kept, d.experts) for one, d in zip(loads, self._divisions, strict=True)]
        if not measured.pays(sum(present), sum(division.seconds for division in divisions)):
            return None
        self._divisions, room = divisions, _room(divisions)
        self._sizes = room.sizes or ()
        for layer, priorities in enumerate(self._priorities):
            best = sorted(range(len(priorities)), key=lambda expert: (-priorities[expert], expert))
            self._held[layer] = set(best[: self._sizes[layer]])
        return room

    def held(self, layer: int) -> set[int]:
        """The cached experts of a layer."""
        return self._held[layer]

    def _loads(self, view: View, hits: list[list[float]]) -> list[LayerLoads]:
        """Loads of the layers in a decode step of one row, with these hit rates."""
        shape, costs, calibration = view.shape, view.costs, view.calibration
        assert costs is not None
        assert calibration is not None
        experts = shape.top_k * shape.tiles * costs.device_at[1]
        window = (1 + self._before) * costs.other_at[1] + costs.launch + experts
        named = [0.0] * shape.layers
        if self._predictor is not None:
            named = calibration.accuracy[self._predictor].tolist()
        return [
            LayerLoads(hits[layer], shape.top_k, named[layer], window, costs.link, costs.fetch, shape.tiles)
            for layer in range(shape.layers)
        ]

    def start(self, placed: list[Expert], room: Room, view: View) -> None:
        shape, calibration = view.shape, view.calibration
        known = view.popularity if calibration is None else calibration.decode_counts
        self._measured = Reconfiguration(shape.layers, shape.experts) if self._reconfigures else None
        self._sizes = room.sizes or ()
        self._rows: list[list[int]] = known.tolist()
        self._steps = [0] * shape.layers
        self._priorities = [[priority(rows, 0) for rows in layer] for layer in self._rows]
        self._held: list[set[int]] = [set() for _ in range(shape.layers)]
        for layer, expert in placed:
            self._held[layer].add(expert)

    def plan(self, layer: int, active: Active, cut: IntArray, view: View) -> Moves:
        rows, priorities, held = self._rows[layer], self._priorities[layer], self._held[layer]
        self._steps[layer] = step = self._steps[layer] + 1
        used = active.experts.tolist()
        if self._measured is not None and view.phase == "decode":
            self._measured.used(layer, priorities, used)
        for expert, count in zip(used, active.counts.tolist(), strict=True):
            rows[expert] += count
            priorities[expert] = priority(rows[expert], step)
        new = [expert for expert in used if expert not in held and cut[expert]]
        if not new:
            return STAY
        new.sort(key=lambda expert: -priorities[expert])  # stable: of equal ones the smaller index
        free = self._sizes[layer] - len(held)
        cold = sorted(held.difference(used), key=lambda expert: (priorities[expert], -expert))
        into, out = new[:free], []
        for expert, least in zip(new[free:], cold, strict=False):
            if priorities[least] >= priorities[expert]:
                break
            into.append(expert)
            out.append(least)
        held.difference_update(out)
        held.update(into)
        return Moves([(layer, expert) for expert in out], [(layer, expert) for expert in into])


def _room(divisions: Sequence[Division]) -> Room:
    sizes = [division.experts for division in divisions]
    return Room(sum(sizes), [division.kept for division in divisions], sizes)
