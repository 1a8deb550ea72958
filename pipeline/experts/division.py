"""Divides a layer's work: by its cuts between host and device, and the host's tiles among the workers, with
one descriptor (`shm/descriptor.py`) for each of them.

The division depends on the plan and the batch alone, never on timing or on which workers run, and partial
sums are added in the workers' order. So any worker can compute any part, and the result has the same bits
(docs/architecture.md, Equality).

The tiles in (NUMA node, expert, tile) order are cut into consecutive runs, whose costs are in proportion to
the workers' cores: one sequence uses every core, and with several nodes (`shm/numa.py`) a worker reads its
own node's memory, except where a node holds a larger part of the tiles than of the cores. C does all of it in
one call (`divide.c`)."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import FloatArray, IntArray
from pipeline.config import WorkerCores
from pipeline.errors import PlanError
from pipeline.policies.view import Routing
from shm.compiled import load
from shm.descriptor import Descriptor, address_of, describe, numbers
from shm.mask import DENSE, Mask

# The products of this many rows take as long as one read of a tile's weights. Measured on experts of 14336 x
# 4096: one more row costs a quarter of that read in int4, an eighth in int8, a seventh in bf16.
ROWS_PER_READ = 5
VERSION = 2  # of divide.c: a library that an older checkout left behind is not used


class Share(NamedTuple):
    """The device's part of a layer. Item i = (expert, lo, hi) has the rows rows[offsets[i]:offsets[i + 1]],
    and their weights at the same places; its tiles [0, lo) are read from the slab, [lo, hi) are copied
    there."""

    items: IntArray  # [m, 3], experts ascending
    offsets: IntArray  # [m + 1]
    rows: IntArray  # [offsets[-1]], ascending for each item
    weights: FloatArray  # [offsets[-1]]

    def where(self, kept: NDArray[np.bool_]) -> Share:
        """Return the share with the items for which `kept` [m] is true."""
        items, count = self.items[kept], np.count_nonzero(kept)
        if len(self.rows) == len(kept):  # a row each, as where one sequence is decoded
            return Share(items, self.offsets[: count + 1], self.rows[kept], self.weights[kept])
        counts = np.diff(self.offsets)
        offsets, pairs = np.zeros(count + 1, np.int32), np.repeat(kept, counts)
        counts[kept].cumsum(out=offsets[1:])
        return Share(items, offsets, self.rows[pairs], self.weights[pairs])


NOTHING = Share(
    np.zeros((0, 3), np.int32), np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32)
)


class Split(NamedTuple):
    """One layer's work for host and device. The host computes tiles [lo, hi) of each active expert."""

    layer: int
    routing: Routing
    lo: IntArray  # [E]
    hi: IntArray  # [E]
    mask: Mask
    device: Share = NOTHING

    def host_tiles(self) -> IntArray:
        """Return the host's tiles of each active expert."""
        experts = self.routing.active.experts
        tiles: IntArray = np.maximum(self.hi.take(experts) - self.lo.take(experts), 0)
        return tiles


def split_layer(
    routing: Routing,
    cut: IntArray,
    residency: IntArray,
    tiles: int,
    layer: int = 0,
    mask: Mask = DENSE,
) -> Split:
    """Divide a layer: of each active expert the device computes tiles [0, cut), the host [cut, tiles). cut,
    residency: int32 [E], of this layer. Raises PlanError for a cut outside 0..tiles."""
    every, active = all_tiles(len(cut), tiles), routing.active
    cuts = cut.take(active.experts) if cut.shape == residency.shape else None
    if cuts is None or ((used := np.count_nonzero(cuts)) and (cuts.min() < 0 or cuts.max() > tiles)):
        raise PlanError(f"a policy's cuts must be {len(residency)} numbers in 0..{tiles}")
    if not used:
        return Split(layer, routing, cut, every, mask)
    items = np.empty((len(cuts), 3), np.int32)
    items[:, 0], items[:, 2] = active.experts, cuts
    np.minimum(cuts, residency.take(active.experts), out=items[:, 1])
    share = Share(items, active.offsets, active.rows, active.weights)
    share = share if used == len(cuts) else share.where(cuts > 0)
    return Split(layer, routing, cut, every, mask, share)


@cache
def all_tiles(experts: int, tiles: int) -> IntArray:
    """Return `tiles` for each of so many experts."""
    every = np.full(experts, tiles, np.int32)
    every.flags.writeable = False
    return every


class Divided(NamedTuple):
    """The descriptors of a layer, with consecutive seqs from the given one on."""

    parts: list[tuple[int, Descriptor]]  # with the worker that each is for, ascending
    tiles: int  # of all of them


class _Division(ctypes.Structure):
    """`struct division` of divide.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("experts", "nodes", "workers")),
        ("cores", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("row_cost", "rows", "k")),
        *((name, ctypes.c_void_p) for name in ("chosen", "weights", "lo", "hi")),
        *((name, ctypes.c_int64) for name in ("seq", "layer")),
        *((name, ctypes.c_float) for name in ("threshold", "share")),
        ("to", ctypes.c_void_p),
        ("room", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("starts", "lengths", "scratch", "pair_rows", "pair_weights")),
        ("tiles", ctypes.c_int64),
    )


@cache
def library() -> Any:
    """Return the function of divide.c. Raises NotCompiled."""
    function = load(__file__, "_divide", VERSION).tandem_divide
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return function


class Divider:
    """Divides layers of so many experts, of so many tiles each, with memory that is used for every layer."""

    def __init__(self, workers: WorkerCores, experts: int, tiles: int) -> None:
        """Raises NotCompiled."""
        self._function = library()
        self._workers, self._experts = workers, experts
        self._tiles = tiles if workers.nodes > 1 else 1  # items of an expert in one descriptor, at most
        self._cores = np.array(workers.cores, np.int64)
        self._starts, self._lengths = np.zeros((2, len(workers)), np.int64)
        self._lo, self._hi = np.zeros((2, experts), np.int32)
        self._kept = [
            self._lo,
            self._hi,
            self._cores,
            self._starts,
            self._lengths,
            np.empty(4 * experts + 2, np.int64),
            np.empty((experts * self._tiles + 1, 3), np.int64),
        ]
        self._struct = s = _Division(experts, workers.nodes, len(workers), row_cost=ROWS_PER_READ)
        s.lo, s.hi, s.cores, s.starts, s.lengths, s.scratch, self._part = map(address_of, self._kept)
        self._size(0, 0)
        self._at = ctypes.addressof(s)

    def divide(self, split: Split, seq: int) -> Divided:
        """Return the descriptors of the host's tiles; that of worker w has the number seq + w. Raises
        PlanError for an expert that does not exist, and for arrays that do not fit each other."""
        s, routing, size = self._struct, split.routing, split.routing.experts.shape
        if not len(split.lo) == len(split.hi) == self._experts or routing.weights.shape != size:
            raise PlanError(f"a plan's arrays do not fit each other, or {self._experts} experts")
        if size != self._chosen.shape:
            self._size(*size)
        self._chosen[:], self._weights[:] = routing.experts, routing.weights
        self._lo[:], self._hi[:] = split.lo, split.hi
        s.seq, s.layer = seq, split.layer
        s.threshold, s.share = split.mask.threshold, split.mask.share
        to = np.empty(s.room, np.int32)
        s.to = address_of(to)
        if fault := self._function(self._at, self._part):
            none = f"a policy's routing names an expert outside the layer's {self._experts}"
            raise PlanError(none if fault == 1 else "a layer's descriptors have no room")
        starts, lengths = self._starts.tolist(), self._lengths.tolist()
        parts = [
            (worker, to[start : start + length])
            for worker, (start, length) in enumerate(zip(starts, lengths, strict=True))
            if length
        ]
        return Divided(parts, s.tiles)

    def _size(self, rows: int, k: int) -> None:
        """Prepare for so many rows with k experts each: where a run ends within an item, the next descriptor
        has the item's rows too."""
        s, pairs, workers = self._struct, rows * k, len(self._workers)
        self._chosen, self._weights = np.empty((rows, k), np.int32), np.empty((rows, k), np.float32)
        self._sorted = np.empty((2, pairs), np.int32)
        of_pairs = self._chosen, self._weights, *self._sorted
        s.chosen, s.weights, s.pair_rows, s.pair_weights = map(address_of, of_pairs)
        every = self._tiles * numbers(min(self._experts, pairs), pairs)
        s.rows, s.k, s.room = rows, k, every + workers * (numbers(1, rows) + 16)


def largest(workers: WorkerCores, experts: int, tiles: int, rows: int, k: int) -> int:
    """Return the numbers of one worker's descriptor, at most, for so many rows with k experts each."""
    most = tiles if workers.nodes > 1 else 1
    return numbers(most * min(experts, rows * k), most * rows * k)


def empty_part(worker: int, seq: int = 0, rows: int = 1) -> tuple[int, Descriptor]:
    """Return a descriptor without items: it warms a worker up, or measures a round trip."""
    return worker, describe(0, [], [0], [], [], rows, seq=seq)
