"""The host's share of a layer, divided into one shard for each worker.

The division depends on the plan and the batch alone, never on timing or on which workers run, and partial
sums are added in shard order. So any worker can compute any shard, and the result has the same bits
(docs/architecture.md, Equality).

With several NUMA nodes, decode's tiles are divided in the order of the nodes that hold them (`shm/numa.py`),
and workers are in that order too. So a worker reads its own node's memory, except where a node holds a larger
part of the tiles than of the cores: its excess tiles go to the neighbouring workers.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import FloatArray, IntArray, Phase
from pipeline.coordinator_config import WorkerCores
from pipeline.experts.shares import NOTHING, Share
from protocol.messages import Work
from shm.mask import Mask
from shm.numa import node_of

# The products of this many rows take as long as one read of a tile's weights. Measured on experts of 14336 x
# 4096: one more row costs a quarter of that read in int4, an eighth in int8, a seventh in bf16.
ROWS_PER_READ = 5


class HostShard(NamedTuple):
    """One worker's part of a share, as in Work; `kept`: the batch's rows that x holds, in order."""

    items: IntArray  # [n, 3]
    offsets: IntArray  # [n + 1]
    rows: IntArray  # [offsets[-1]], indices into `kept`
    weights: FloatArray
    kept: NDArray[np.intp]
    worker: int  # it was sized for this worker's cores, and lies on its node

    def work(self, seq: int, layer: int, x: FloatArray, mask: Mask) -> Work:
        """x: float32 [len(kept), H]."""
        parts = self.items, self.offsets, self.rows, self.weights
        return Work(seq, layer, *parts, x, mask.threshold, mask.share)


def empty_shard(worker: int) -> HostShard:
    """A shard without items, for an x of one row: it warms a worker up, or measures a round trip."""
    return HostShard(*NOTHING, FIRST_ROW, worker)


def divide_into_shards(share: Share, workers: WorkerCores, phase: Phase, batch_rows: int) -> list[HostShard]:
    """At most one shard for each worker, its cost in proportion to the worker's cores. In decode the tiles in
    (node, expert, tile) order are cut into consecutive shards; in prefill whole experts are assigned, the
    most expensive first."""
    if len(share.items) == 0:
        return []
    if len(workers) == 1:
        return [_shard(share, batch_rows, 0)]
    items, ends = share.items.tolist(), share.offsets.tolist()
    # of one tile of each item
    costs = [ROWS_PER_READ + end - start for start, end in pairwise(ends)]
    parts = _consecutive(items, costs, workers) if phase == "decode" else _by_expert(items, costs, workers)
    return [
        _shard(_taken(share, items, ends, part, workers.nodes), batch_rows, worker)
        for worker, part in enumerate(parts)
        if part
    ]


FIRST_ROW = np.arange(1)  # of a batch of one row

Items = list[list[int]]  # expert, lo, hi
Part = list[tuple[int, int, int]]  # index into the share's items, tile lo, tile hi


def _consecutive(items: Items, costs: list[int], workers: WorkerCores) -> list[Part]:
    """A tile belongs to the shard in which its middle lies. Plain integers and few steps, because decode has
    few experts and this runs in every layer, while all cores wait and with code that is in no cache."""
    total = sum(cost * (hi - lo) for cost, (_, lo, hi) in zip(costs, items, strict=True))
    ends = list(accumulate(workers.cores))
    cores = ends[-1]
    parts: list[Part] = [[] for _ in ends]
    shard, before = 0, 0  # `before`: cost of all tiles before the present stretch
    for i, lo, hi in _stretches(items, workers.nodes):
        cost = costs[i]
        start = lo
        while True:
            # the first tile with its middle at or beyond this shard's end
            beyond = 2 * ends[shard] * total - cores * (2 * before + cost)
            if beyond > 2 * cores * cost * (hi - lo - 1):  # none
                parts[shard].append((i, start, hi))
                break
            end = lo + max(0, -(-beyond // (2 * cores * cost)))
            if end > start:
                parts[shard].append((i, start, end))
                start = end
            shard += 1
        before += cost * (hi - lo)
    return parts


def _stretches(items: Items, nodes: int) -> Part:
    """The share's tiles as stretches of one expert, in the order in which they are cut."""
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
    chosen: list[list[int]] = [[] for _ in loads]
    for i in sorted(range(len(totals)), key=lambda i: -totals[i]):
        # to the worker that would finish it first
        worker = min(range(len(loads)), key=lambda w: (loads[w] + totals[i]) / workers.cores[w])
        loads[worker] += totals[i]
        chosen[worker].append(i)
    return [[(i, items[i][1], items[i][2]) for i in sorted(part)] for part in chosen]


def _taken(share: Share, items: Items, ends: list[int], part: Part, nodes: int) -> Share:
    """The share's tiles of one part; `items` and `ends`, its offsets, as plain numbers."""
    chosen = [i for i, _, _ in part]
    first, end = chosen[0], chosen[-1] + 1
    if nodes > 1 or end - first > len(chosen):  # not a stretch of the share
        numbers = np.array([(items[i][0], lo, hi) for i, lo, hi in part], np.int32)
        return share.take(chosen)._replace(items=numbers)
    numbers = share.items[first:end].copy()
    numbers[0, 1], numbers[-1, 2] = part[0][1], part[-1][2]  # all between are whole
    start, stop = ends[first], ends[end]
    offsets = share.offsets[first : end + 1] - start if start else share.offsets[: end + 1]
    return Share(numbers, offsets, share.rows[start:stop], share.weights[start:stop])


def _shard(share: Share, batch_rows: int, worker: int) -> HostShard:
    """The whole share as a worker's shard."""
    if batch_rows == 1:  # it is always used
        return HostShard(*share, FIRST_ROW, worker)
    kept, rows = np.arange(batch_rows), share.rows
    used = np.zeros(batch_rows, bool)
    used[rows] = True
    if not used.all():
        kept = np.flatnonzero(used)
        rows = (np.cumsum(used, dtype=np.int32) - np.int32(1))[rows]
    return HostShard(share.items, share.offsets, rows, share.weights, kept, worker)
