"""MoEpic's replacement: the leading tiles of the experts of the highest priority, and its configuration.

A layer's exposed latency is the part of its loading time that nothing hides: of what is predicted right, the
previous layer hides as much as it leaves time for. A cached expert lacks its last tiles, another one all of
them. The inner problem divides one layer's tiles: many experts with few tiles each, or few with many. The
outer one moves an expert's worth of tiles from layer to layer until no move shortens the sum.

Latencies are expected over the number of a token's experts that are cached. The mean number alone would not
do: as hit rates rise ever more slowly with the size of a cache, whole experts load the fewest tiles. Parts of
more experts make the tokens' loads more alike, so that they fit the time of the previous layer more often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import comb, inf, log
from typing import ClassVar, NamedTuple

from pipeline.arrays import IntArray
from pipeline.policies.options import Number
from pipeline.policies.parts import STAY, Expert, Moves, Parts, Replacement, Room, evenly
from pipeline.policies.view import Active, View

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

    def exposed(self, kept: int, experts: int) -> float:
        """Seconds of loading that are not hidden, with so many cached experts of `kept` tiles each."""
        hit, missing, used = self.hits[experts], self.tiles - kept, self.used
        bottom = self.fetch + missing * self.tile if missing else 0.0
        whole = self.fetch + self.tiles * self.tile
        seconds = 0.0
        for cached in range(used + 1):
            load = cached * bottom + (used - cached) * whole
            share = comb(used, cached) * hit**cached * (1 - hit) ** (used - cached)
            seconds += share * (load - self.accuracy * min(load, self.window))
        return seconds

    def division(self, budget: int) -> Division:
        """The inner problem: the best division of `budget` tiles. Of equally good ones, that with the most
        tiles of each expert."""
        most = len(self.hits) - 1
        divisions = []
        for kept in range(self.tiles, 0, -1):
            experts = min(most, budget // kept)
            divisions.append(Division(kept, experts, self.exposed(kept, experts)))
        return min(divisions, key=lambda division: division.seconds)


def configured(layers: Sequence[LayerLoads], budget: int) -> list[Division]:
    """The outer problem: each layer's division, for `budget` tiles in all. First the whole experts that fit
    are divided evenly. Then the layer with the highest exposed latency that gains by it gets an expert's
    worth of tiles from the layer that loses least, as long as the sum falls; in the end no such move between
    two layers shortens it."""
    worth = layers[0].tiles
    budgets = [count * worth for count in evenly(len(layers), budget // worth)]
    budgets[0] += budget % worth

    @cache
    def best(place: int, tiles: int) -> Division:
        return layers[place].division(tiles)

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


class Split(Replacement):
    """MoEpic's cache. Of a cached expert the leading `theta` of its tiles stay resident, so that more experts
    are cached, and the others are fetched with each use. It keeps the experts of the highest priority: mu *
    rho ** (nu / omega) with mu their rows over the steps, nu the steps since their last use (least cache
    priority, LCP). A fetched expert enters where its priority is above the lowest one of those that the step
    does not use.

    By default theta and the number of cached experts are configured for each layer (`configured`), with
    the calibration's hit rates and the costs; with a given theta all layers have the same."""

    name: ClassVar[str] = "split"
    help: ClassVar[str] = "leading tiles of the experts of the highest priority"
    options = (
        Number(
            name="theta",
            help="share of a cached expert that stays resident, 1 for all; by default configured by layer",
            default=None,
            low=0,
            high=1,
            whole=False,
        ),
    )
    fills: ClassVar[str] = "fetched"
    without: ClassVar[str] = "theta=0.3"

    def __init__(self, *, theta: float | None) -> None:
        self._theta = theta
        self.needs_costs = self.needs_calibration = theta is None

    def join(self, parts: Parts) -> None:
        self._predictor = parts.prediction.predictor

    def notes(self, view: View) -> tuple[str, ...]:
        if view.shape.tiles > 1 or self._theta == 1:
            return ()
        return (
            "an expert has a single tile, so none is kept in part (--tile, in channels, makes them smaller)",
        )

    def room(self, view: View, tiles: int) -> Room:
        shape = view.shape
        if self._theta is None:
            divisions = configured(self._loads(view), tiles)
            kept, sizes = [d.kept for d in divisions], [d.experts for d in divisions]
        else:
            kept = [max(1, round(self._theta * shape.tiles))] * shape.layers
            sizes = [min(size, shape.experts) for size in evenly(shape.layers, tiles // kept[0])]
        return Room(sum(sizes), kept, sizes)

    def _loads(self, view: View) -> list[LayerLoads]:
        """Loads of the layers in a decode step of one row."""
        shape, costs, calibration = view.shape, view.costs, view.calibration
        assert costs is not None
        assert calibration is not None
        experts = shape.top_k * shape.tiles * costs.device_at[1]
        window = costs.other_at[1] + costs.launch + experts
        named = [0.0] * shape.layers
        if self._predictor is not None:
            named = calibration.accuracy[self._predictor].tolist()
        hits = calibration.hit_rates.tolist()
        return [
            LayerLoads(hits[layer], shape.top_k, named[layer], window, costs.link, costs.fetch, shape.tiles)
            for layer in range(shape.layers)
        ]

    def start(self, placed: list[Expert], room: Room, view: View) -> None:
        shape, calibration = view.shape, view.calibration
        known = view.popularity if calibration is None else calibration.decode_counts
        self._sizes: Sequence[int] = room.sizes or ()
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
