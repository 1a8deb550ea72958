"""Divides a layer's work: by its cuts between host and device, and the host's tiles among the workers, with
one descriptor (`shm/descriptor.py`) for each of them.

The division depends on the plan and the batch alone, never on timing or on which workers run, and partial
sums are added in the workers' order. So any worker can compute any part, and the result has the same bits
(docs/architecture.md, Equality).

The tiles in (NUMA node, expert, tile) order are cut into consecutive runs, whose costs are in proportion to
the workers' cores: one sequence uses every core, and with several nodes (`shm/numa.py`) a worker reads its
own node's memory, except where a node holds a larger part of the tiles than of the cores. C does all of it in
one call (`divide.c`); `Plain` says the same in Python, for machines without a compiler and for tests."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.machinery import PathFinder
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import FloatArray, IntArray
from pipeline.config import WorkerCores
from pipeline.errors import PlanError
from pipeline.policies.view import Active, Routing
from shm.descriptor import Descriptor, address_of, describe, numbers
from shm.mask import DENSE, Mask
from shm.numa import node_of

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


Items = list[tuple[int, int, int]]  # expert, lo, hi
Part = list[tuple[int, int, int]]  # index of the item, tile lo, tile hi


class Plain:
    """Divides in Python: the specification of divide.c."""

    def __init__(self, workers: WorkerCores) -> None:
        self._workers = workers

    def divide(self, split: Split, seq: int) -> Divided:
        """Return the descriptors of the host's tiles; that of worker w has the number seq + w. Raises
        PlanError for an expert that does not exist."""
        active: Active = split.routing.active
        if len(active.experts) and not 0 <= active.experts[0] <= active.experts[-1] < len(split.lo):
            raise _no_expert(len(split.lo))
        users = dict(zip(active.experts.tolist(), pairwise(active.offsets.tolist()), strict=True))
        items = [(e, int(split.lo[e]), int(split.hi[e])) for e in users if split.lo[e] < split.hi[e]]
        costs = [ROWS_PER_READ + end - start for start, end in (users[e] for e, _, _ in items)]  # of a tile
        parts: list[tuple[int, Descriptor]] = []
        for worker, part in enumerate(_runs(items, costs, self._workers)):
            if not part:
                continue
            places = [np.arange(*users[items[i][0]]) for i, _, _ in part]
            every = np.concatenate(places)
            mine = [(items[i][0], lo, hi) for i, lo, hi in part]
            lists = [0, *accumulate(map(len, places))], active.rows[every], active.weights[every]
            rows = len(split.routing.experts)
            parts.append((worker, describe(split.layer, mine, *lists, rows, split.mask, seq + worker)))
        return Divided(parts, sum(hi - lo for _, lo, hi in items))


def _runs(items: Items, costs: list[int], workers: WorkerCores) -> list[Part]:
    """Cut the tiles into runs: a tile belongs to the worker in whose run its middle lies."""
    tiles = [(i, tile) for i, (_, lo, hi) in enumerate(items) for tile in range(lo, hi)]
    if workers.nodes > 1:
        tiles.sort(key=lambda at: node_of(items[at[0]][0], at[1], workers.nodes))
    total, ends = sum(costs[i] for i, _ in tiles), list(accumulate(workers.cores))
    parts: list[Part] = [[] for _ in ends]
    worker, before = 0, 0  # `before`: cost of the tiles before this one
    for i, tile in tiles:
        while ends[-1] * (2 * before + costs[i]) >= 2 * ends[worker] * total:
            worker += 1
        part = parts[worker]
        if workers.nodes == 1 and part and part[-1][0] == i:  # the tile follows
            part[-1] = i, part[-1][1], tile + 1
        else:
            part.append((i, tile, tile + 1))
        before += costs[i]
    return parts


def _no_expert(experts: int) -> PlanError:
    return PlanError(f"a policy's routing names an expert outside the layer's {experts}")


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
def compiled() -> Any:
    """Return the function of divide.c, or None where it was not compiled, or not for this version."""
    spec = PathFinder.find_spec("_divide", [str(Path(__file__).parent)])
    if spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
        if library.tandem_divide_version() != VERSION:
            return None
    except (OSError, AttributeError):
        return None
    function = library.tandem_divide
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return function


class Compiled:
    """Divides by divide.c, with memory that is used for every layer."""

    def __init__(self, function: Any, workers: WorkerCores, experts: int, tiles: int) -> None:
        self._function = function
        self._workers, self._experts = workers, experts
        self._tiles = tiles if workers.nodes > 1 else 1  # items of an expert in one descriptor, at most
        self._cores = np.array(workers.cores, np.int64)
        self._starts, self._lengths = np.zeros((2, len(workers)), np.int64)
        self._kept = [
            self._cores,
            self._starts,
            self._lengths,
            np.empty(4 * experts + 2, np.int64),
            np.empty((experts * self._tiles + 1, 3), np.int64),
        ]
        self._pairs = np.empty((2, 0), np.int32)
        self._struct = s = _Division(experts, workers.nodes, len(workers), row_cost=ROWS_PER_READ)
        s.cores, s.starts, s.lengths, s.scratch, self._part = map(address_of, self._kept)
        self._at = ctypes.addressof(s)

    def divide(self, split: Split, seq: int) -> Divided:
        """Divide as Plain.divide says."""
        s, routing = self._struct, split.routing
        s.rows, s.k = rows, k = routing.experts.shape
        if not len(split.lo) == len(split.hi) == self._experts or routing.weights.shape != (rows, k):
            raise PlanError(f"a plan's arrays do not fit each other, or {self._experts} experts")
        given = (
            np.ascontiguousarray(routing.experts, np.int32),
            np.ascontiguousarray(routing.weights, np.float32),
            np.ascontiguousarray(split.lo, np.int32),
            np.ascontiguousarray(split.hi, np.int32),
        )
        s.chosen, s.weights, s.lo, s.hi = map(address_of, given)
        s.seq, s.layer = seq, split.layer
        s.threshold, s.share = split.mask.threshold, split.mask.share
        to = np.empty(self._room(rows, k), np.int32)
        s.to, s.room = address_of(to), len(to)
        if fault := self._function(self._at, self._part):
            raise _no_expert(self._experts) if fault == 1 else PlanError("a layer's descriptors have no room")
        starts, lengths = self._starts.tolist(), self._lengths.tolist()
        parts = [
            (worker, to[start : start + length])
            for worker, (start, length) in enumerate(zip(starts, lengths, strict=True))
            if length
        ]
        return Divided(parts, s.tiles)

    def _room(self, rows: int, k: int) -> int:
        """Return the numbers of all descriptors, at most: where a run ends within an item, the next one has
        the item's rows too."""
        pairs, workers = rows * k, len(self._workers)
        if self._pairs.shape[1] < pairs:
            self._pairs = np.empty((2, pairs), np.int32)
            self._struct.pair_rows, self._struct.pair_weights = map(address_of, self._pairs)
        every = self._tiles * numbers(min(self._experts, pairs), pairs)
        return every + workers * (numbers(1, rows) + 16)


Divider = Plain | Compiled


def divider(workers: WorkerCores, experts: int, tiles: int) -> Divider:
    """Return the quickest way to divide a layer of so many experts, of so many tiles each."""
    function = compiled()
    return Plain(workers) if function is None else Compiled(function, workers, experts, tiles)


def largest(workers: WorkerCores, experts: int, tiles: int, rows: int, k: int) -> int:
    """Return the numbers of one worker's descriptor, at most, for so many rows with k experts each."""
    most = tiles if workers.nodes > 1 else 1
    return numbers(most * min(experts, rows * k), most * rows * k)


def empty_part(worker: int, seq: int = 0, rows: int = 1) -> tuple[int, Descriptor]:
    """Return a descriptor without items: it warms a worker up, or measures a round trip."""
    return worker, describe(0, [], [0], [], [], rows, seq=seq)
