"""What the host computes in a layer, cut into one run for each worker.

The cut depends on the plan and the batch alone, never on timing or on who is alive, and partial sums are
added in run order: so the result is the same bits whoever computes a run (DESIGN.md section 4).

With several NUMA nodes, decode's tiles are cut in the order of the nodes where they lie (`shm/numa.py`), and
workers are in that order as well: so a worker reads its own node's memory, except where one node has more of
the tiles than of the cores; what is too much there falls to the neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import FloatArray, IntArray, Phase
from pipeline.coordinator_config import WorkerCores
from pipeline.experts.shares import HostShare
from shm.numa import node_of

# The rows whose products take as long as reading a tile's weights once: measured on experts of 14336 x 4096,
# one more row costs a quarter of that in int4, an eighth in int8, a seventh in bf16.
ROWS_PER_READ = 5


@dataclass(frozen=True)
class HostShard:
    """One worker's part, in Work's terms; `kept` are the batch's rows that x holds, in order."""

    items: IntArray  # [n, 3]
    offsets: IntArray  # [n + 1]
    rows: IntArray  # [offsets[-1]], indices into `kept`
    weights: FloatArray
    kept: NDArray[np.intp]


def empty_shard() -> HostShard:
    """A run of nothing, for an x of one row: it wakes a worker, or measures the way to it and back."""
    none, items = np.zeros(0, np.int32), np.zeros((0, 3), np.int32)
    return HostShard(items, np.zeros(1, np.int32), none, np.zeros(0, np.float32), np.zeros(1, np.intp))


def cut_into_shards(share: HostShare, workers: WorkerCores, phase: Phase, batch_rows: int) -> list[HostShard]:
    """At most one run for each worker, its cost in proportion to its cores. In decode the tiles in (node,
    expert, tile) order are cut into consecutive runs; in prefill whole experts are given out, the most
    expensive first."""
    if len(share.experts) == 0:
        return []
    costs = [ROWS_PER_READ + len(rows) for rows in share.rows]  # of one tile of each expert
    parts = _consecutive(share, costs, workers) if phase == "decode" else _by_expert(share, costs, workers)
    return [_run(share, part, batch_rows) for part in parts if part]


Part = list[tuple[int, int, int]]  # index into the share, tile lo, tile hi


def _consecutive(share: HostShare, costs: list[int], workers: WorkerCores) -> list[Part]:
    """A tile belongs to the run in which its middle lies. Plain integers: at decode there are a few experts,
    and this is on every layer's way."""
    total = sum(
        cost * (hi - lo) for cost, lo, hi in zip(costs, share.lo.tolist(), share.hi.tolist(), strict=True)
    )
    ends = list(accumulate(workers.cores))
    cores = ends[-1]
    parts: list[Part] = [[] for _ in ends]
    run, before = 0, 0  # `before`: cost of all tiles before the stretch at hand
    for i, lo, hi in _stretches(share, workers.nodes):
        cost = costs[i]
        start = lo
        while True:
            # the first tile whose middle is at or beyond this run's end
            beyond = 2 * ends[run] * total - cores * (2 * before + cost)
            end = min(hi, lo + max(0, -(-beyond // (2 * cores * cost))))
            if end > start:
                parts[run].append((i, start, end))
                start = end
            if start == hi:
                break
            run += 1
        before += cost * (hi - lo)
    return parts


def _stretches(share: HostShare, nodes: int) -> Part:
    """The share's tiles in the order in which they are cut."""
    whole = list(zip(range(len(share.experts)), share.lo.tolist(), share.hi.tolist(), strict=True))
    if nodes == 1:
        return whole
    experts = share.experts.tolist()
    of_node: list[Part] = [[] for _ in range(nodes)]
    for i, lo, hi in whole:
        for tile in range(lo, hi):
            of_node[node_of(experts[i], tile, nodes)].append((i, tile, tile + 1))
    return [stretch for stretches in of_node for stretch in stretches]


def _by_expert(share: HostShare, costs: list[int], workers: WorkerCores) -> list[Part]:
    totals = [cost * tiles for cost, tiles in zip(costs, (share.hi - share.lo).tolist(), strict=True)]
    loads = [0] * len(workers)
    chosen: list[list[int]] = [[] for _ in loads]
    for i in sorted(range(len(totals)), key=lambda i: -totals[i]):
        # to who would be done with it first
        run = min(range(len(loads)), key=lambda run: (loads[run] + totals[i]) / workers.cores[run])
        loads[run] += totals[i]
        chosen[run].append(i)
    return [[(i, int(share.lo[i]), int(share.hi[i])) for i in sorted(part)] for part in chosen]


def _run(share: HostShare, part: Part, batch_rows: int) -> HostShard:
    experts = share.experts.tolist()
    offsets = [0]
    for i, _, _ in part:
        offsets.append(offsets[-1] + len(share.rows[i]))
    rows = np.concatenate([share.rows[i] for i, _, _ in part])
    kept = np.arange(1)
    if batch_rows > 1:  # of a single row there is nothing to leave out
        used = np.zeros(batch_rows, bool)
        used[rows] = True
        kept = np.flatnonzero(used)
        rows = (np.cumsum(used, dtype=np.int32) - np.int32(1))[rows]
    return HostShard(
        items=np.array([(experts[i], lo, hi) for i, lo, hi in part], np.int32),
        offsets=np.array(offsets, np.int32),
        rows=rows,
        weights=np.concatenate([share.weights[i] for i, _, _ in part]),
        kept=kept,
    )
