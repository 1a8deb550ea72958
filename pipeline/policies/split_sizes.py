"""MoEpic's configuration: how many experts each layer's cache keeps, and how many leading tiles of each.

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
from math import comb
from typing import NamedTuple

from pipeline.policies.parts import evenly

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
        found = []
        for kept in range(self.tiles, 0, -1):
            experts = min(most, budget // kept)
            found.append(Division(kept, experts, self.exposed(kept, experts)))
        return min(found, key=lambda division: division.seconds)


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
