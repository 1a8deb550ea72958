"""Zero copy: demanded tiles that the device's kernels read in the store, over the link, without a slot or a
landing.

Only for tiles that will not stay resident, of experts with few rows, whose pages are locked, and where the
costs say that it takes less than fetching and computing them. A tile has the same bits wherever it is read.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pipeline.arrays import IntArray
from pipeline.device.base import Locks
from pipeline.experts.shares import Share
from pipeline.policies.costs import Costs
from shm.store import Store

MOST_ROWS = 8  # of an expert: with more, kernels may read a tile several times

Tile = tuple[int, int, Tensor]  # item of a share, tile of its expert, bytes


class ZeroCopy:
    """Used by the engine's thread alone."""

    def __init__(self, store: Store, lock: Callable[[], Locks], own: bool = True) -> None:
        """`lock`: begins to lock the store's pages in this process; `own`: for zero copy alone."""
        self._store, self._lock, self._own = store, lock, own
        self._locks: Locks | None = None
        self._costs: Costs | None = None
        with warnings.catch_warnings():
            # The store is read-only on purpose, and no kernel writes to it.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            self._bytes = torch.from_numpy(store.all_tiles())
        self._first = store.all_tiles().ctypes.data - store.segment.array.ctypes.data

    def use_costs(self, costs: Costs | None) -> None:
        """Decide by these. Where zero copy may pay, the pages are locked, in the background."""
        self._costs = costs
        tiles = self._store.layout.shape.tiles
        if costs is not None and self._locks is None and costs.zero_copy_pays(1, tiles):
            self._locks = self._lock()

    def seconds(self, tiles: int) -> float:
        """Of the link, by the costs, for so many tiles."""
        return 0.0 if self._costs is None else self._costs.zero_copy * tiles

    def wait_locked(self, tiles: int, limit: float, tick: Callable[[], None]) -> bool:
        """Lock the pages, and return once the first `tiles` tiles of the first expert are locked; False
        after `limit` seconds."""
        self._locks = self._locks or self._lock()
        until = time.monotonic() + limit
        while (found := self.tile(0, 0, tiles - 1)) is None and time.monotonic() < until:
            tick()
            time.sleep(0.01)
        return found is not None

    def close(self) -> None:
        """Lock no more; before the store is closed."""
        self.stop_locking()
        self._locks, self._bytes = None, self._bytes[:0]

    def stop_locking(self) -> None:
        """Lock no more pages for zero copy; those that are locked stay so."""
        if self._locks is not None and self._own:
            self._locks.stop()

    def tile(self, layer: int, expert: int, tile: int) -> Tensor | None:
        """A tile's bytes where the device can read them: uint8, a tensor of the host. None where it cannot
        yet."""
        layout = self._store.layout
        start = layout.offset(layer, expert, tile)
        end = start + layout.tile_bytes
        if self._locks is None or self._first + end > self._locks.locked:
            return None
        return self._bytes[start:end]

    def chosen(self, layer: int, share: Share, target: IntArray) -> list[Tile]:
        """The missing tiles of a share that are read in place, item after item, all of an item or none.
        target: int32 [E], the layer's tiles that are to stay resident."""
        costs = self._costs
        if costs is None or not costs.zero_copy or not len(share.items):
            return []
        if np.diff(share.offsets).max() > MOST_ROWS:
            return []
        items = [
            (item, expert, lo, hi)
            for item, (expert, lo, hi) in enumerate(share.items.tolist())
            if max(lo, target[expert]) == lo < hi
        ]
        if not costs.zero_copy_pays(len(items), sum(hi - lo for _, _, lo, hi in items)):
            return []
        found: list[Tile] = []
        for item, expert, lo, hi in items:
            tiles = [(item, tile, self.tile(layer, expert, tile)) for tile in range(lo, hi)]
            whole = [(i, tile, data) for i, tile, data in tiles if data is not None]
            if len(whole) == len(tiles):
                found += whole
        return found


def without(share: Share, chosen: Sequence[Tile]) -> list[list[int]]:
    """The items with missing tiles, without those that are read in place: [expert, lo, hi] each."""
    gone = {item for item, _, _ in chosen}
    items = enumerate(share.items.tolist())
    return [numbers for item, numbers in items if numbers[1] < numbers[2] and item not in gone]
