"""The division of a layer by C (`divide.c`): all workers' descriptors in one call, the same bytes as
`division.Plain`."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.coordinator_config import WorkerCores
from pipeline.errors import PlanError
from pipeline.experts.division import ROWS_PER_READ, Divided, Divider, HostPlan, Plain, no_expert
from shm.descriptor import address_of, numbers

VERSION = 1  # of divide.c: a library that an older checkout left behind is not used


def divider(workers: WorkerCores, experts: int, tiles: int) -> Divider:
    """The quickest there is. `experts` of a layer, `tiles` of an expert."""
    function = compiled()
    return Plain(workers) if function is None else Compiled(function, workers, experts, tiles)


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
        s.cores, s.starts, s.lengths, s.scratch, self._part = map(address_of, self._kept)
        self._at = ctypes.addressof(s)

    def divide(self, plan: HostPlan, seq: int) -> Divided:
        """As Divider.divide."""
        s, routing = self._struct, plan.routing
        s.rows, s.k = rows, k = routing.experts.shape
        if not len(plan.lo) == len(plan.hi) == self._experts or routing.weights.shape != (rows, k):
            raise PlanError(f"a plan's arrays do not fit each other, or {self._experts} experts")
        given = (
            np.ascontiguousarray(routing.experts, np.int32),
            np.ascontiguousarray(routing.weights, np.float32),
            np.ascontiguousarray(plan.lo, np.int32),
            np.ascontiguousarray(plan.hi, np.int32),
        )
        s.chosen, s.weights, s.lo, s.hi = map(address_of, given)
        s.seq, s.layer, s.by_expert = seq, plan.layer, plan.phase != "decode"
        s.threshold, s.share = plan.mask.threshold, plan.mask.share
        to = np.empty(self._room(rows, k), np.int32)
        s.to, s.room = address_of(to), len(to)
        if fault := self._function(self._at, self._part):
            raise no_expert(self._experts) if fault == 1 else PlanError("a layer's descriptors have no room")
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
            self._struct.pair_rows, self._struct.pair_weights = map(address_of, self._pairs)
        every = self._tiles * numbers(min(self._experts, pairs), pairs)
        return every + workers * (numbers(1, rows) + 16)
