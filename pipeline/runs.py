"""What the host computes in a layer, cut into one run for each worker.

The cut depends on the plan and the batch alone, never on timing or on who is alive, and partial sums are
added in run order: so the result is the same bits whoever computes a run (DESIGN.md section 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.policies.view import FloatArray, IntArray, Phase
from pipeline.split import HostShare

# Time of a tile for R rows, in units of reading its weights: measured with the reference kernel, one row
# more costs about 4 % (bf16, 4096 x 256) of what the first one does.
ROWS_PER_READ = 25


@dataclass(frozen=True)
class Run:
    """One worker's part, in Work's terms; `kept` are the batch's rows that x holds, in order."""

    items: IntArray  # [n, 3]
    offsets: IntArray  # [n + 1]
    rows: IntArray  # [offsets[-1]], indices into `kept`
    weights: FloatArray
    kept: NDArray[np.intp]


def cut_into_runs(share: HostShare, workers: int, phase: Phase, batch_rows: int) -> list[Run]:
    """At most `workers` runs of about equal cost. In decode the tiles in (expert, tile) order are cut into
    consecutive runs; in prefill whole experts are given out, the most expensive first."""
    if len(share.experts) == 0:
        return []
    counts = np.array([len(rows) for rows in share.rows])
    costs = ROWS_PER_READ + counts  # of one tile
    parts = _consecutive(share, costs, workers) if phase == "decode" else _by_expert(share, costs, workers)
    return [_run(share, part, batch_rows) for part in parts if part]


Part = list[tuple[int, int, int]]  # index into the share, tile lo, tile hi


def _consecutive(share: HostShare, costs: NDArray[np.int64], workers: int) -> list[Part]:
    tiles = share.hi - share.lo
    owner = np.repeat(np.arange(len(tiles)), tiles)  # of each tile, in (expert, tile) order
    cost = costs[owner]
    middle = 2 * np.cumsum(cost) - cost  # in half units: a tile belongs to the run in which its middle lies
    run = middle * workers // (2 * cost.sum())
    starts = np.flatnonzero((np.diff(owner, prepend=-1) != 0) | (np.diff(run, prepend=-1) != 0)).tolist()
    first = np.cumsum(tiles) - tiles  # where each expert's tiles begin
    parts: list[Part] = [[] for _ in range(workers)]
    for start, end in zip(starts, [*starts[1:], len(owner)], strict=True):
        i = int(owner[start])
        offset = int(share.lo[i] - first[i])
        parts[int(run[start])].append((i, start + offset, end + offset))
    return parts


def _by_expert(share: HostShare, costs: NDArray[np.int64], workers: int) -> list[Part]:
    totals = costs * (share.hi - share.lo)
    loads = [0] * workers
    chosen: list[list[int]] = [[] for _ in range(workers)]
    for i in np.argsort(-totals, kind="stable").tolist():
        run = loads.index(min(loads))
        loads[run] += int(totals[i])
        chosen[run].append(i)
    return [[(i, int(share.lo[i]), int(share.hi[i])) for i in sorted(part)] for part in chosen]


def _run(share: HostShare, part: Part, batch_rows: int) -> Run:
    rows = np.concatenate([share.rows[i] for i, _, _ in part])
    used = np.zeros(batch_rows, bool)
    used[rows] = True
    local = np.cumsum(used, dtype=np.int32) - 1
    return Run(
        items=np.array([(share.experts[i], lo, hi) for i, lo, hi in part], np.int32),
        offsets=np.cumsum([0] + [len(share.rows[i]) for i, _, _ in part]).astype(np.int32),
        rows=local[rows].astype(np.int32),
        weights=np.concatenate([share.weights[i] for i, _, _ in part]),
        kept=np.flatnonzero(used),
    )
