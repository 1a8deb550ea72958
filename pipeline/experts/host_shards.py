"""The host's share of a layer, divided into one shard for each worker.

The division depends on the plan and the batch alone, never on timing or on which workers run, and partial
sums are added in shard order. So any worker can compute any shard, and the result has the same bits
(docs/architecture.md, Equality).

With several NUMA nodes, decode's tiles are divided in the order of the nodes that hold them (`shm/numa.py`),
and workers are in that order too. So a worker reads its own node's memory, except where a node holds a larger
part of the tiles than of the cores: its excess tiles go to the neighbouring workers.
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

# The products of this many rows take as long as one read of a tile's weights. Measured on experts of 14336 x
# 4096: one more row costs a quarter of that read in int4, an eighth in int8, a seventh in bf16.
ROWS_PER_READ = 5


@dataclass(frozen=True)
class HostShard:
    """One worker's part of a share, as in Work; `kept`: the batch's rows that x holds, in order."""

    items: IntArray  # [n, 3]
    offsets: IntArray  # [n + 1]
    rows: IntArray  # [offsets[-1]], indices into `kept`
    weights: FloatArray
    kept: NDArray[np.intp]
    worker: int  # it was sized for this worker's cores, and lies on its node


def empty_shard(worker: int) -> HostShard:
    """A shard without items, for an x of one row: it warms a worker up, or measures a round trip."""
    none, items = np.zeros(0, np.int32), np.zeros((0, 3), np.int32)
    return HostShard(
        items, np.zeros(1, np.int32), none, np.zeros(0, np.float32), np.zeros(1, np.intp), worker
    )


def divide_into_shards(
    share: HostShare, workers: WorkerCores, phase: Phase, batch_rows: int
) -> list[HostShard]:
    """At most one shard for each worker, its cost in proportion to the worker's cores. In decode the tiles in
    (node, expert, tile) order are cut into consecutive shards; in prefill whole experts are assigned, the
    most expensive first."""
    if len(share.experts) == 0:
        return []
    costs = [ROWS_PER_READ + len(rows) for rows in share.rows]  # of one tile of each expert
    parts = _consecutive(share, costs, workers) if phase == "decode" else _by_expert(share, costs, workers)
    return [_shard(share, part, batch_rows, worker) for worker, part in enumerate(parts) if part]


Part = list[tuple[int, int, int]]  # index into the share, tile lo, tile hi


def _consecutive(share: HostShare, costs: list[int], workers: WorkerCores) -> list[Part]:
    """A tile belongs to the shard in which its middle lies. Plain integers, because decode has few experts
    and this runs in every layer."""
    total = sum(
        cost * (hi - lo) for cost, lo, hi in zip(costs, share.lo.tolist(), share.hi.tolist(), strict=True)
    )
    ends = list(accumulate(workers.cores))
    cores = ends[-1]
    parts: list[Part] = [[] for _ in ends]
    shard, before = 0, 0  # `before`: cost of all tiles before the present stretch
    for i, lo, hi in _stretches(share, workers.nodes):
        cost = costs[i]
        start = lo
        while True:
            # the first tile with its middle at or beyond this shard's end
            beyond = 2 * ends[shard] * total - cores * (2 * before + cost)
            end = min(hi, lo + max(0, -(-beyond // (2 * cores * cost))))
            if end > start:
                parts[shard].append((i, start, end))
                start = end
            if start == hi:
                break
            shard += 1
        before += cost * (hi - lo)
    return parts


def _stretches(share: HostShare, nodes: int) -> Part:
    """The share's tiles as stretches of one expert, in the order in which they are cut."""
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
        # to the worker that would finish it first
        worker = min(range(len(loads)), key=lambda w: (loads[w] + totals[i]) / workers.cores[w])
        loads[worker] += totals[i]
        chosen[worker].append(i)
    return [[(i, int(share.lo[i]), int(share.hi[i])) for i in sorted(part)] for part in chosen]


def _shard(share: HostShare, part: Part, batch_rows: int, worker: int) -> HostShard:
    experts = share.experts.tolist()
    offsets = [0]
    for i, _, _ in part:
        offsets.append(offsets[-1] + len(share.rows[i]))
    rows = np.concatenate([share.rows[i] for i, _, _ in part])
    kept = np.arange(1)
    if batch_rows > 1:  # a single row is always used
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
        worker=worker,
    )
