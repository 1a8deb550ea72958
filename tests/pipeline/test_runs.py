"""Runs: every host tile in exactly one, of about equal cost, and the sum of their parts is the whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.coordinator_config import WorkerCores
from pipeline.experts.host_shards import ROWS_PER_READ, HostShard, cut_into_shards
from pipeline.experts.shares import HostShare
from shm.numa import node_of

ROWS = 6  # of the batch
TILES = 7
SEED = st.integers(0, 2**32 - 1)


@st.composite
def shares(draw: st.DrawFn, batch: int = ROWS) -> HostShare:
    """Some experts with tiles [lo, hi) and some of the batch's rows each."""
    experts = sorted(draw(st.sets(st.integers(0, 11), max_size=6)))
    lo = [draw(st.integers(0, TILES - 1)) for _ in experts]
    hi = [draw(st.integers(first + 1, TILES)) for first in lo]
    rows = [sorted(draw(st.sets(st.integers(0, batch - 1), min_size=1))) for _ in experts]
    weights = [draw(st.lists(st.integers(1, 9), min_size=len(r), max_size=len(r))) for r in rows]
    return HostShare(
        np.array(experts, np.int32),
        np.array(lo, np.int32),
        np.array(hi, np.int32),
        [np.array(r, np.int32) for r in rows],
        [np.array(w, np.float32) for w in weights],
    )


@st.composite
def crews(draw: st.DrawFn) -> WorkerCores:
    cores = draw(st.lists(st.integers(1, 8), min_size=1, max_size=6))
    return WorkerCores(tuple(cores), draw(st.integers(1, len(cores))))


def tiles_of(run: HostShard) -> list[tuple[int, int]]:
    return [(expert, tile) for expert, lo, hi in run.items.tolist() for tile in range(lo, hi)]


def all_tiles(share: HostShare) -> list[tuple[int, int]]:
    items = zip(share.experts.tolist(), share.lo.tolist(), share.hi.tolist(), strict=True)
    return [(expert, tile) for expert, lo, hi in items for tile in range(lo, hi)]


def cost(share: HostShare, tiles: list[tuple[int, int]]) -> int:
    rows = dict(zip(share.experts.tolist(), map(len, share.rows), strict=True))
    return sum(ROWS_PER_READ + rows[expert] for expert, _ in tiles)


@settings(max_examples=150, deadline=None)
@given(shares(), st.integers(1, 9))
def test_decode_cuts_the_tiles_in_order_into_consecutive_runs_of_equal_cost(share, workers) -> None:
    runs = cut_into_shards(share, WorkerCores.alike(workers), "decode", ROWS)
    assert len(runs) <= workers
    assert all(len(run.items) for run in runs)
    assert [tile for run in runs for tile in tiles_of(run)] == all_tiles(share)
    ideal = cost(share, all_tiles(share)) / workers
    for run in runs:
        dearest = max(cost(share, [tile]) for tile in tiles_of(run))
        assert cost(share, tiles_of(run)) <= ideal + dearest
        experts = run.items[:, 0].tolist()
        assert len(experts) == len(set(experts))  # an expert's tiles in a run are one item


@settings(max_examples=150, deadline=None)
@given(shares(), st.integers(1, 9))
def test_prefill_gives_out_whole_experts(share, workers) -> None:
    runs = cut_into_shards(share, WorkerCores.alike(workers), "prefill", ROWS)
    assert len(runs) == min(workers, len(share.experts))  # nobody idles while another has two
    items = sorted(item for run in runs for item in map(tuple, run.items.tolist()))
    given = zip(share.experts.tolist(), share.lo.tolist(), share.hi.tolist(), strict=True)
    assert items == list(given)
    loads = [cost(share, tiles_of(run)) for run in runs]
    for run, load in zip(runs, loads, strict=True):
        assert run.items[:, 0].tolist() == sorted(run.items[:, 0].tolist())
        last = min(cost(share, [(e, t) for t in range(lo, hi)]) for e, lo, hi in run.items.tolist())
        assert load - last <= min(loads)  # given to the one that had least


@settings(max_examples=150, deadline=None)
@given(shares(), st.integers(1, 6), st.integers(1, 8), st.sampled_from(["decode", "prefill"]))
def test_workers_that_are_all_as_wide_are_cut_for_as_if_they_had_one_core(
    share, workers, cores, phase
) -> None:
    narrow = cut_into_shards(share, WorkerCores.alike(workers), phase, ROWS)
    wide = cut_into_shards(share, WorkerCores((cores,) * workers), phase, ROWS)
    assert [run.items.tolist() for run in wide] == [run.items.tolist() for run in narrow]


@settings(max_examples=150, deadline=None)
@given(shares(), crews())
def test_in_decode_each_worker_s_part_is_that_of_its_cores_in_the_order_of_the_nodes(share, workers) -> None:
    runs = cut_into_shards(share, workers, "decode", ROWS)
    tiles = [tile for run in runs for tile in tiles_of(run)]
    order = all_tiles(share)
    if workers.nodes > 1:
        order.sort(key=lambda tile: (node_of(*tile, workers.nodes), tile))
    assert tiles == order
    whole = cost(share, order)
    if len(runs) == len(workers):  # nobody was left without
        after = 0
        for run, cores in zip(runs, workers.cores, strict=True):
            first, after = after, after + len(tiles_of(run))
            # of its own tiles and of one neighbour's at either end, half of which may lie on its side
            dearest = max(cost(share, [tile]) for tile in order[max(first - 1, 0) : after + 1])
            assert abs(cost(share, tiles_of(run)) - whole * cores / sum(workers.cores)) <= dearest


@pytest.mark.parametrize("batch", [1, 4])
def test_with_as_many_cores_on_each_node_workers_read_their_own_node_s_tiles(batch: int) -> None:
    """Two nodes, two workers on the first and a wider one on the second; some tiles are resident."""
    lo = np.array([0, 2, 0, 4], np.int32)
    rows, weights = [np.arange(batch, dtype=np.int32)] * 4, [np.ones(batch, np.float32)] * 4
    share = HostShare(np.array([1, 4, 5, 7], np.int32), lo, np.full(4, 8, np.int32), rows, weights)
    runs = cut_into_shards(share, WorkerCores((2, 2, 4), 2), "decode", batch)
    assert [{node_of(*tile, 2) for tile in tiles_of(run)} for run in runs] == [{0}, {0}, {1}]
    assert [len(tiles_of(run)) for run in runs] == [6, 7, 13]


def test_tiles_beyond_a_node_s_cores_fall_to_its_neighbour() -> None:
    """All eight tiles, of as many experts, lie on one of two nodes."""
    rows, weights = [np.zeros(1, np.int32)] * 8, [np.ones(1, np.float32)] * 8
    experts, lo = np.arange(0, 16, 2, dtype=np.int32), np.zeros(8, np.int32)
    share = HostShare(experts, lo, lo + 1, rows, weights)
    runs = cut_into_shards(share, WorkerCores((1, 1), 2), "decode", 1)
    assert [len(tiles_of(run)) for run in runs] == [4, 4]


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, ROWS), crews(), st.sampled_from(["decode", "prefill"]), SEED)
def test_the_runs_add_up_to_the_weighted_sum(data, batch, workers, phase, seed) -> None:
    """Each tile multiplies its rows by a number of its own; all in whole numbers, so sums are exact."""
    share = data.draw(shares(batch))
    rng = np.random.default_rng(seed)
    x = rng.integers(-9, 9, (batch, 2)).astype(np.float64)
    factor = rng.integers(-9, 9, (12, TILES)).astype(np.float64)
    expected = np.zeros_like(x)
    for i, expert in enumerate(share.experts):
        for tile in range(share.lo[i], share.hi[i]):
            for row, weight in zip(share.rows[i], share.weights[i], strict=True):
                expected[row] += weight * factor[expert, tile] * x[row]

    total = np.zeros_like(x)
    for run in cut_into_shards(share, workers, phase, batch):
        sent = x[run.kept]
        assert sorted(set(run.rows.tolist())) == list(range(len(sent)))  # no row that no item uses
        y = np.zeros_like(sent)
        for i, (expert, lo, hi) in enumerate(run.items):
            here = slice(run.offsets[i], run.offsets[i + 1])
            for row, weight in zip(run.rows[here], run.weights[here], strict=True):
                y[row] += weight * factor[expert, lo:hi].sum() * sent[row]
        total[run.kept] += y
    np.testing.assert_array_equal(total, expected)


@settings(max_examples=50, deadline=None)
@given(shares(), crews(), st.sampled_from(["decode", "prefill"]))
def test_the_same_share_gives_the_same_runs_in_the_wire_s_types(share, workers, phase) -> None:
    first, again = (cut_into_shards(share, workers, phase, ROWS) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        for name in ("items", "offsets", "rows", "weights", "kept"):
            assert getattr(a, name).dtype == {"weights": "f4", "kept": "i8"}.get(name, "i4")
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_nothing_to_do_is_no_run(phase) -> None:
    nothing = np.zeros(0, np.int32)
    share = HostShare(nothing, nothing, nothing, [], [])
    assert cut_into_shards(share, WorkerCores.alike(3), phase, ROWS) == []
