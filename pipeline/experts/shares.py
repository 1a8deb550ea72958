"""A layer's work divided between host and device, by its routing, its cuts and its residency: ranges of tiles
for the host, which `division.py` divides among workers, and the device's share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import FloatArray, IntArray
from pipeline.errors import PlanError
from pipeline.policies.view import Active, Routing


class Share(NamedTuple):
    """One side's part of a layer, with the lists of a descriptor: item i = (expert, lo, hi) has the rows
    rows[offsets[i]:offsets[i + 1]] and their weights at the same places."""

    items: IntArray  # [m, 3], experts ascending
    offsets: IntArray  # [m + 1]
    rows: IntArray  # [offsets[-1]], ascending for each item
    weights: FloatArray  # [offsets[-1]]

    @property
    def tiles(self) -> int:
        """The sum of hi - lo."""
        return sum(hi - lo for _, lo, hi in self.items.tolist())

    def take(self, chosen: list[int]) -> Share:
        """The share with these items alone, in this order."""
        if len(self.rows) == len(self.items):  # of one row each, as where one sequence is decoded
            places = np.array(chosen, np.intp)
            whole = len(places) <= len(self.items)  # else items come several times
            offsets = self.offsets[: len(places) + 1] if whole else np.arange(len(places) + 1, dtype=np.int32)
            rows, weights = self.rows.take(places), self.weights.take(places)
            return Share(self.items.take(places, 0), offsets, rows, weights)
        starts = self.offsets[chosen]
        counts = self.offsets[1:][chosen] - starts
        offsets = np.zeros(len(chosen) + 1, np.int32)
        counts.cumsum(out=offsets[1:])
        places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)
        return Share(self.items[chosen], offsets, self.rows[places], self.weights[places])


NOTHING = Share(
    np.zeros((0, 3), np.int32), np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32)
)


@dataclass(frozen=True, eq=False)
class Split:
    """One layer's work for host and device. The host computes tiles [lo, hi) of each active expert. Of the
    device's, tiles [0, lo) of an item are read from the slab, and [lo, hi) are copied there."""

    routing: Routing
    lo: IntArray  # [E]
    hi: IntArray  # [E]
    device: Share = NOTHING

    @cached_property
    def host(self) -> Share:
        """The host's part as a share: what it costs follows from this."""
        lo, hi = (ends.take(self.routing.active.experts) for ends in (self.lo, self.hi))
        return _share(self.routing.active, lo, hi, lo < hi)


def split_layer(routing: Routing, cut: IntArray, residency: IntArray, tiles: int) -> Split:
    """cut, residency: int32 [E], of this layer. Of each active expert the device computes tiles [0, cut), the
    host [cut, tiles). Raises PlanError for a cut outside 0..tiles."""
    if cut.shape != residency.shape:
        raise _wrong_cuts(residency, tiles)
    every, active = all_tiles(len(cut), tiles), routing.active
    cuts = cut.take(active.experts)
    if not np.count_nonzero(cuts):  # in a third of the time of any()
        return Split(routing, cut, every)
    if cuts.min() < 0 or cuts.max() > tiles:
        raise _wrong_cuts(residency, tiles)
    resident = np.minimum(cuts, residency[active.experts])
    return Split(routing, cut, every, _share(active, resident, cuts, cuts > 0))


@cache
def all_tiles(experts: int, tiles: int) -> IntArray:
    """`tiles` for each of so many experts."""
    every = np.full(experts, tiles, np.int32)
    every.flags.writeable = False
    return every


def _share(
    active: Active, lo: IntArray | int, hi: IntArray | int, among: NDArray[np.bool_] | None = None
) -> Share:
    """The share with tiles [lo, hi) of the active experts, or of those `among` them."""
    items = np.empty((len(active.experts), 3), np.int32)
    items[:, 0], items[:, 1], items[:, 2] = active.experts, lo, hi
    share = Share(items, active.offsets, active.rows, active.weights)
    if among is None or among.all():
        return share
    return share.take(np.flatnonzero(among).tolist())


def _wrong_cuts(residency: IntArray, tiles: int) -> PlanError:
    return PlanError(f"a policy's cuts must be {len(residency)} numbers in 0..{tiles}")
