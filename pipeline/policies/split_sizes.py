"""MoEpic's configuration: how many experts each layer's cache keeps, and how many leading tiles of each.

A layer's exposed latency is the part of its loading time that nothing hides. A cached expert lacks its last
tiles, an expert that is not cached all of them; what is predicted right is loaded while the previous layer
runs. The inner problem divides one layer's tiles: many experts with few tiles each, or few with many. The
outer one moves an expert's worth of tiles from layer to layer until no move shortens the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

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
    used: float  # experts of a step
    accuracy: float  # share of them that the prediction names
    window: float  # seconds that the previous layer leaves for loading
    tile: float  # seconds to move a tile
    fetch: float  # seconds of an order of tiles beside these
    tiles: int

    def exposed(self, kept: int, experts: int) -> float:
        """Seconds of loading that are not hidden, with so many cached experts of `kept` tiles each."""
        hit, missing = self.hits[experts], self.tiles - kept
        bottom = self.fetch + missing * self.tile if missing else 0.0
        load = self.used * (hit * bottom + (1 - hit) * (self.fetch + self.tiles * self.tile))
        return self.accuracy * max(0.0, load - self.window) + (1 - self.accuracy) * load

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
    """The outer problem: each layer's division, for `budget` tiles in all, divided evenly at first. The layer
    with the highest exposed latency that gains by it gets an expert's worth of tiles from the layer that
    loses least, as long as the sum falls; in the end no such move between two layers shortens it."""
    worth = layers[0].tiles
    each, left = divmod(budget, len(layers))
    budgets = [each + (place < left) for place in range(len(layers))]

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
