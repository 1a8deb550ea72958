"""A layer's routing divided into one descriptor (`shm/descriptor.py`) for each worker: what it computes.

The division depends on the plan and the batch alone, never on timing or on which workers run, and partial
sums are added in the workers' order. So any worker can compute any part, and the result has the same bits
(docs/architecture.md, Equality).

In decode the tiles in (NUMA node, expert, tile) order are cut into consecutive runs, whose costs are in
proportion to the workers' cores: one sequence uses every core, and with several nodes (`shm/numa.py`) a
worker reads its own node's memory, except where a node holds a larger part of the tiles than of the cores. In
prefill whole experts are assigned, the most expensive first. C does all of it in one call
(`compiled_division.py`); `Plain` says the same in Python, for machines without a compiler and for tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import numpy as np

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
            raise no_expert(len(plan.lo))
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


def no_expert(experts: int) -> PlanError:
    """For a routing that names an expert beyond a layer's `experts`."""
    return PlanError(f"a policy's routing names an expert outside the layer's {experts}")


def largest(workers: WorkerCores, experts: int, tiles: int, rows: int, k: int) -> int:
    """Numbers of one worker's descriptor, at most, for so many rows with k experts each."""
    most = tiles if workers.nodes > 1 else 1
    return numbers(most * min(experts, rows * k), most * rows * k)


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
