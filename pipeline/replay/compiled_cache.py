"""The simulated cache by the C library `cache.c`, which does the same as `cache.py` sooner."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from pipeline.arrays import IntArray
from pipeline.config import BACKGROUND_ORDERS
from pipeline.errors import PlanError
from pipeline.policies.costs import Landing
from pipeline.policies.view import ModelShape
from pipeline.replay.cache import SimulatedCache, targets_of

VERSION = 4  # of the library: one that an older checkout left behind is not used

if TYPE_CHECKING:
    from pipeline.replay._cache import Cache as Compiled

    compiled = True
else:
    try:
        from pipeline.replay import _cache

        compiled = VERSION == _cache.VERSION
        Compiled = _cache.Cache
    except (ImportError, AttributeError):  # it was not compiled
        compiled, Compiled = False, object


class CompiledCache(Compiled):
    """As SimulatedCache; only where `compiled`."""

    def __init__(
        self, shape: ModelShape, capacity: int, tile_seconds: float, fetch_seconds: float = 0.0
    ) -> None:
        self.residency: IntArray = np.zeros((shape.layers, shape.experts), np.int32)
        self.target: IntArray = np.zeros((shape.layers, shape.experts), np.int32)
        self.ordered: IntArray = np.zeros((shape.layers, shape.experts), np.int32)
        super().__init__(
            residency=self.residency,
            target=self.target,
            ordered=self.ordered,
            tiles=shape.tiles,
            orders=BACKGROUND_ORDERS,
            capacity=capacity,
            tile_seconds=tile_seconds,
            fetch_seconds=fetch_seconds,
            error=PlanError,
        )

    def place(self, target: IntArray) -> None:
        self.retarget(targets_of(target))
        self.residency[...] = self.ordered[...] = self.target
        self.settle()

    def landing(self, layer: int, now: float) -> list[Landing]:
        found = [Landing(*one) for one in self.under_way(layer, now)]
        return sorted(found, key=attrgetter("seconds"))


AnyCache: TypeAlias = SimulatedCache | CompiledCache


def simulated_cache(
    shape: ModelShape, capacity: int, tile_seconds: float, fetch_seconds: float = 0.0
) -> AnyCache:
    """The faster one that is there."""
    kind = CompiledCache if compiled else SimulatedCache
    return kind(shape, capacity, tile_seconds, fetch_seconds)
