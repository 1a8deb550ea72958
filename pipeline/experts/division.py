"""A layer's routing divided into one descriptor (`shm/descriptor.py`) for each worker: what it computes.

The division depends on the plan and the batch alone, never on timing or on which workers run, and partial
sums are added in the workers' order. So any worker can compute any part, and the result has the same bits
(docs/architecture.md, Equality).

In decode the tiles in (NUMA node, expert, tile) order are cut into consecutive runs, whose costs are in
proportion to the workers' cores: one sequence uses every core, and with several nodes (`shm/numa.py`) a
worker reads its own node's memory, except where a node holds a larger part of the tiles than of the cores. In
prefill whole experts are assigned, the most expensive first. C does all of it in one call (`divide.c`);
`Plain` says the same in Python, for machines without a compiler and for tests."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from importlib.machinery import PathFinder
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import IntArray, Phase
from pipeline.coordinator_config import WorkerCores
from pipeline.errors import PlanError
from pipeline.policies.view import Routing
from shm.descriptor import Descriptor, describe, numbers
from shm.mask import Mask
from shm.numa import node_of

# The products of this many rows take as long as one read of a tile's weights. Measured on experts of 14336 x
# 4096: one more row costs a quarter of that read in int4, an eighth in int8, a seventh in bf16.
ROWS_PER_READ = 5
VERSION = 1  # of divide.c: a library that an older checkout left behind is not used


class HostPlan(NamedTuple):
    """What the host computes of one layer: of each active expert tiles [lo, hi)."""

    layer: int
    routing: Routing
    lo: IntArray  # [E]
    hi: IntArray  # [E]
    phase: Phase
    mask: Mask


class Divided(NamedTuple):
    """The descriptors of a layer, with consecutive seqs from the given one on."""

    parts: list[tuple[int, Descriptor]]  # with the worker that each is for, ascending
    tiles: int  # of all of them


class Divider(Protocol):
    """Divides layers among workers."""

    def divide(self, plan: HostPlan, seq: int) -> Divided:
        """The descriptors of a plan; that of worker w has the number seq + w. Raises PlanError for an expert
        that does not exist."""


def divider(workers: WorkerCores, experts: int, tiles: int) -> Divider:
    """The quickest there is. `experts` of a layer, `tiles` of an expert."""
    function = compiled()
    return Plain(workers) if function is None else Compiled(function, workers, experts, tiles)


# --- in Python
# -------------------------------------------------------------------------------------------------

Items = list[tuple[int, int, int]]  # expert, lo, hi
Part = list[tuple[int, int, int]]  # index of the item, tile lo, tile hi


class Plain:
    """The specification of the division."""

    def __init__(self, workers: WorkerCores) -> None:
        self._workers = workers

    def divide(self, plan: HostPlan, seq: int) -> Divided:
        """As Divider.divide."""
        active, workers = plan.routing.active, self._workers
        if len(active.experts) and not 0 <= active.experts[0] <= active.experts[-1] < len(plan.lo):
            raise _no_expert(len(plan.lo))
        users = dict(zip(active.experts.tolist(), pairwise(active.offsets.tolist()), strict=True))
        items = [(e, int(plan.lo[e]), int(plan.hi[e])) for e in users if plan.lo[e] < plan.hi[e]]
        costs = [ROWS_PER_READ + end - start for start, end in (users[e] for e, _, _ in items)]  # of a tile
        cut = _consecutive if plan.phase == "decode" else _by_expert
        parts: list[tuple[int, Descriptor]] = []
        for worker, part in enumerate(cut(items, costs, workers)):
            places = [np.arange(*users[items[i][0]]) for i, _, _ in part]
            if not part:
                continue
            every = np.concatenate(places)
            mine = [(items[i][0], lo, hi) for i, lo, hi in part]
            offsets = [0, *accumulate(map(len, places))]
            lists = active.rows[every], active.weights[every]
            rows = len(plan.routing.experts)
            parts.append((worker, describe(plan.layer, mine, offsets, *lists, rows, plan.mask, seq + worker)))
        return Divided(parts, sum(hi - lo for _, lo, hi in items))


def _consecutive(items: Items, costs: list[int], workers: WorkerCores) -> list[Part]:
    """A tile belongs to the worker in whose run its middle lies."""
    total = sum(cost * (hi - lo) for cost, (_, lo, hi) in zip(costs, items, strict=True))
    ends = list(accumulate(workers.cores))
    cores = ends[-1]
    parts: list[Part] = [[] for _ in ends]
    worker, before = 0, 0  # `before`: cost of all tiles before the present stretch
    for i, lo, hi in _stretches(items, workers.nodes):
        cost = costs[i]
        start = lo
        while True:
            # the first tile with its middle at or beyond this run's end
            beyond = 2 * ends[worker] * total - cores * (2 * before + cost)
            if beyond > 2 * cores * cost * (hi - lo - 1):  # none
                parts[worker].append((i, start, hi))
                break
            end = lo + max(0, -(-beyond // (2 * cores * cost)))
            if end > start:
                parts[worker].append((i, start, end))
                start = end
            worker += 1
        before += cost * (hi - lo)
    return parts


def _stretches(items: Items, nodes: int) -> Part:
    """The tiles as stretches of one expert, in the order in which they are cut."""
    if nodes == 1:
        return [(i, lo, hi) for i, (_, lo, hi) in enumerate(items)]
    of_node: list[Part] = [[] for _ in range(nodes)]
    for i, (expert, lo, hi) in enumerate(items):
        for tile in range(lo, hi):
            of_node[node_of(expert, tile, nodes)].append((i, tile, tile + 1))
    return [stretch for stretches in of_node for stretch in stretches]


def _by_expert(items: Items, costs: list[int], workers: WorkerCores) -> list[Part]:
    totals = [cost * (hi - lo) for cost, (_, lo, hi) in zip(costs, items, strict=True)]
    loads = [0] * len(workers)
    parts: list[Part] = [[] for _ in loads]
    for i in sorted(range(len(totals)), key=lambda i: -totals[i]):
        # to the worker that would finish it first
        worker = min(range(len(loads)), key=lambda w: (loads[w] + totals[i]) / workers.cores[w])
        loads[worker] += totals[i]
        parts[worker].append((i, items[i][1], items[i][2]))
    return [sorted(part) for part in parts]


def _no_expert(experts: int) -> PlanError:
    return PlanError(f"a policy's routing names an expert outside the layer's {experts}")


# --- in C
# ------------------------------------------------------------------------------------------------------


class _Division(ctypes.Structure):
    """`struct division` of divide.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("experts", "nodes", "workers", "by_expert")),
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
    """The function of divide.c; None where it was not compiled, or not for this version."""
    found = PathFinder.find_spec("_divide", [str(Path(__file__).parent)])
    if found is None or found.origin is None:
        return None
    try:
        library = ctypes.CDLL(found.origin)
        if library.tandem_divide_version() != VERSION:
            return None
    except (OSError, AttributeError):
        return None
    function = library.tandem_divide
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return function


class Compiled:
    """The division by divide.c, with memory that is used for every layer."""

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
            np.empty(7 * experts + 2 * len(workers) + 2, np.int64),
            np.empty((experts * self._tiles + 1, 3), np.int64),
        ]
        self._pairs = np.empty((2, 0), np.int32)
        self._struct = s = _Division(experts, workers.nodes, len(workers), row_cost=ROWS_PER_READ)
        s.cores, s.starts, s.lengths, s.scratch, self._part = map(_address, self._kept)
        self._at = ctypes.addressof(s)

    def divide(self, plan: HostPlan, seq: int) -> Divided:
        """As Divider.divide."""
        s, routing = self._struct, plan.routing
        s.rows, s.k = rows, k = routing.experts.shape
        given = (
            np.ascontiguousarray(routing.experts, np.int32),
            np.ascontiguousarray(routing.weights, np.float32),
            np.ascontiguousarray(plan.lo, np.int32),
            np.ascontiguousarray(plan.hi, np.int32),
        )
        s.chosen, s.weights, s.lo, s.hi = map(_address, given)
        s.seq, s.layer, s.by_expert = seq, plan.layer, plan.phase != "decode"
        s.threshold, s.share = plan.mask.threshold, plan.mask.share
        to = np.empty(self._room(rows, k), np.int32)
        s.to, s.room = _address(to), len(to)
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
        """Numbers of all descriptors, at most: a run ends within an item, whose rows the next one has too."""
        pairs, workers = rows * k, len(self._workers)
        if self._pairs.shape[1] < pairs:
            self._pairs = np.empty((2, pairs), np.int32)
            self._struct.pair_rows, self._struct.pair_weights = map(_address, self._pairs)
        every = self._tiles * numbers(min(self._experts, pairs), pairs)
        return every + workers * (numbers(1, rows) + 16)


def largest(workers: WorkerCores, experts: int, tiles: int, rows: int, k: int) -> int:
    """Numbers of one worker's descriptor, at most, for so many rows with k experts each."""
    most = tiles if workers.nodes > 1 else 1
    return numbers(most * min(experts, rows * k), most * rows * k)


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]  # sooner than by ctypes
    return address


def empty_part(worker: int, seq: int = 0, rows: int = 1) -> tuple[int, Descriptor]:
    """A descriptor without items: it warms a worker up, or measures a round trip."""
    return worker, describe(0, [], [0], [], [], rows, seq=seq)


def spans(experts: int, ranges: Sequence[tuple[int, int, int]]) -> tuple[IntArray, IntArray]:
    """lo and hi of a HostPlan with these tiles (expert, lo, hi) alone. Ranges of one expert follow each
    other."""
    lo, hi = np.zeros((2, experts), np.int32)
    for expert, first, end in sorted(ranges):
        if lo[expert] == hi[expert]:
            lo[expert] = first
        hi[expert] = end
    return lo, hi
