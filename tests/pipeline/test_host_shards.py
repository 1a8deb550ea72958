"""Host shards: each host tile is in exactly one, costs fit the workers' cores, and the shards add up to the
share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_shares import share_of

from pipeline.coordinator_config import WorkerCores
from pipeline.experts.host_shards import ROWS_PER_READ, HostShard, divide_into_shards
from pipeline.experts.shares import NOTHING, Share
from shm.numa import node_of

ROWS = 6  # of the batch
TILES = 7
SEED = st.integers(0, 2**32 - 1)


@st.composite
def host_shares(draw: st.DrawFn, batch: int = ROWS) -> Share:
    """Some experts with tiles [lo, hi) and some of the batch's rows each."""
    experts = sorted(draw(st.sets(st.integers(0, 11), max_size=6)))
    lo = [draw(st.integers(0, TILES - 1)) for _ in experts]
    hi = [draw(st.integers(first + 1, TILES)) for first in lo]
    rows = [sorted(draw(st.sets(st.integers(0, batch - 1), min_size=1))) for _ in experts]
    weights = [draw(st.lists(st.integers(1, 9), min_size=len(r), max_size=len(r))) for r in rows]
    return share_of(list(zip(experts, lo, hi, strict=True)), rows, weights)


@st.composite
def worker_cores(draw: st.DrawFn) -> WorkerCores:
    cores = draw(st.lists(st.integers(1, 8), min_size=1, max_size=6))
    return WorkerCores(tuple(cores), draw(st.integers(1, len(cores))))


def tiles_of(shard: HostShard | Share) -> list[tuple[int, int]]:
    return [(expert, tile) for expert, lo, hi in shard.items.tolist() for tile in range(lo, hi)]


def cost(share: Share, tiles: list[tuple[int, int]]) -> int:
    rows = dict(zip(share.items[:, 0].tolist(), np.diff(share.offsets).tolist(), strict=True))
    return sum(ROWS_PER_READ + rows[expert] for expert, _ in tiles)


@settings(max_examples=150, deadline=None)
@given(host_shares(), st.integers(1, 9))
def test_decode_cuts_the_tiles_in_order_into_consecutive_shards_of_equal_cost(share, workers) -> None:
    shards = divide_into_shards(share, WorkerCores.equal(workers), "decode", ROWS)
    assert len(shards) <= workers
    assert all(len(shard.items) for shard in shards)
    assert [tile for shard in shards for tile in tiles_of(shard)] == tiles_of(share)
    ideal = cost(share, tiles_of(share)) / workers
    for shard in shards:
        dearest = max(cost(share, [tile]) for tile in tiles_of(shard))
        assert cost(share, tiles_of(shard)) <= ideal + dearest
        experts = shard.items[:, 0].tolist()
        assert len(experts) == len(set(experts))  # an expert's tiles in a shard are one item


@settings(max_examples=150, deadline=None)
@given(host_shares(), st.integers(1, 9))
def test_prefill_assigns_whole_experts(share, workers) -> None:
    shards = divide_into_shards(share, WorkerCores.equal(workers), "prefill", ROWS)
    assert len(shards) == min(workers, len(share.items))  # no worker idles while another has two
    assert sorted(item for shard in shards for item in shard.items.tolist()) == share.items.tolist()
    loads = [cost(share, tiles_of(shard)) for shard in shards]
    for shard, load in zip(shards, loads, strict=True):
        assert shard.items[:, 0].tolist() == sorted(shard.items[:, 0].tolist())
        last = min(cost(share, [(e, t) for t in range(lo, hi)]) for e, lo, hi in shard.items.tolist())
        assert load - last <= min(loads)  # assigned to the worker that had the least


def by_longest_first(totals: list[int], cores: tuple[int, ...]) -> list[int]:
    """The worker of each expert, by longest processing time first: the most expensive expert that is left
    goes to the worker that would finish it first."""
    loads, left, worker_of = [0] * len(cores), set(range(len(totals))), [0] * len(totals)
    while left:
        expert = min(left, key=lambda e: (-totals[e], e))
        left.remove(expert)
        ends = [(load + totals[expert]) / width for load, width in zip(loads, cores, strict=True)]
        worker_of[expert] = ends.index(min(ends))
        loads[worker_of[expert]] += totals[expert]
    return worker_of


@settings(max_examples=300, deadline=None)
@given(host_shares(), st.sampled_from([(1, 4), (4, 1), (1, 1), (2, 3, 1)]))
def test_prefill_assigns_the_most_expensive_experts_first(share, cores) -> None:
    """Against a second implementation, by the experts' costs: their tiles and their rows."""
    experts = share.items[:, 0].tolist()
    tiles = tiles_of(share)
    totals = [cost(share, [tile for tile in tiles if tile[0] == expert]) for expert in experts]
    worker_of = by_longest_first(totals, cores)
    expected = [
        [e for e, w in zip(experts, worker_of, strict=True) if w == worker] for worker in range(len(cores))
    ]
    shards = divide_into_shards(share, WorkerCores(cores), "prefill", ROWS)
    assert [shard.items[:, 0].tolist() for shard in shards] == [part for part in expected if part]


def test_prefill_gives_a_wide_worker_the_expensive_experts() -> None:
    """Four experts of one tile, with 1, 2, 3 and 40 rows, for workers of 1 and 4 cores: costs 6, 7, 8 and
    45."""
    rows = [list(range(count)) for count in (1, 2, 3, 40)]
    share = share_of([(expert, 0, 1) for expert in range(4)], rows)
    shards = divide_into_shards(share, WorkerCores((1, 4)), "prefill", 40)
    assert [shard.items[:, 0].tolist() for shard in shards] == [[0, 2], [1, 3]]


@settings(max_examples=150, deadline=None)
@given(host_shares(), st.integers(1, 6), st.integers(1, 8), st.sampled_from(["decode", "prefill"]))
def test_equally_wide_workers_get_the_same_shards_as_workers_of_one_core(
    share, workers, cores, phase
) -> None:
    narrow = divide_into_shards(share, WorkerCores.equal(workers), phase, ROWS)
    wide = divide_into_shards(share, WorkerCores((cores,) * workers), phase, ROWS)
    assert [shard.items.tolist() for shard in wide] == [shard.items.tolist() for shard in narrow]


@settings(max_examples=150, deadline=None)
@given(host_shares(), worker_cores())
def test_decode_cuts_in_node_order_and_in_proportion_to_cores(share, workers) -> None:
    shards = divide_into_shards(share, workers, "decode", ROWS)
    tiles = [tile for shard in shards for tile in tiles_of(shard)]
    order = tiles_of(share)
    if workers.nodes > 1:
        order.sort(key=lambda tile: (node_of(*tile, workers.nodes), tile))
    assert tiles == order
    whole = cost(share, order)
    if len(shards) == len(workers):  # every worker has a shard
        after = 0
        for shard, cores in zip(shards, workers.cores, strict=True):
            first, after = after, after + len(tiles_of(shard))
            # its own tiles and one of a neighbour at either end, half of which may lie on its side
            dearest = max(cost(share, [tile]) for tile in order[max(first - 1, 0) : after + 1])
            assert abs(cost(share, tiles_of(shard)) - whole * cores / sum(workers.cores)) <= dearest


@pytest.mark.parametrize("batch", [1, 4])
def test_workers_read_their_own_nodes_tiles_where_nodes_have_equal_cores(batch: int) -> None:
    """Two nodes, two workers on the first and a wider one on the second; some tiles are resident."""
    share = share_of([(1, 0, 8), (4, 2, 8), (5, 0, 8), (7, 4, 8)], [list(range(batch))] * 4)
    shards = divide_into_shards(share, WorkerCores((2, 2, 4), 2), "decode", batch)
    assert [{node_of(*tile, 2) for tile in tiles_of(shard)} for shard in shards] == [{0}, {0}, {1}]
    assert [len(tiles_of(shard)) for shard in shards] == [6, 7, 13]


def test_shards_of_fewer_tiles_than_workers_keep_their_workers() -> None:
    """One tile on the second of two nodes: the second node's worker computes it."""
    (shard,) = divide_into_shards(share_of([(1, 0, 1)], [[0]]), WorkerCores((1, 3), 2), "decode", 1)
    assert shard.worker == 1


def test_tiles_beyond_a_nodes_cores_go_to_its_neighbour() -> None:
    """All eight tiles, of as many experts, lie on one of two nodes."""
    share = share_of([(expert, 0, 1) for expert in range(0, 16, 2)], [[0]] * 8)
    shards = divide_into_shards(share, WorkerCores((1, 1), 2), "decode", 1)
    assert [len(tiles_of(shard)) for shard in shards] == [4, 4]


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, ROWS), worker_cores(), st.sampled_from(["decode", "prefill"]), SEED)
def test_shards_add_up_to_the_weighted_sum(data, batch, workers, phase, seed) -> None:
    """Each tile multiplies its rows by a number of its own; all in whole numbers, so sums are exact."""
    share = data.draw(host_shares(batch))
    rng = np.random.default_rng(seed)
    x = rng.integers(-9, 9, (batch, 2)).astype(np.float64)
    factor = rng.integers(-9, 9, (12, TILES)).astype(np.float64)
    expected = np.zeros_like(x)
    for i, (expert, lo, hi) in enumerate(share.items):
        users = slice(share.offsets[i], share.offsets[i + 1])
        for tile in range(lo, hi):
            for row, weight in zip(share.rows[users], share.weights[users], strict=True):
                expected[row] += weight * factor[expert, tile] * x[row]

    total = np.zeros_like(x)
    for shard in divide_into_shards(share, workers, phase, batch):
        sent = x[shard.kept]
        assert sorted(set(shard.rows.tolist())) == list(range(len(sent)))  # only rows that an item uses
        y = np.zeros_like(sent)
        for i, (expert, lo, hi) in enumerate(shard.items):
            here = slice(shard.offsets[i], shard.offsets[i + 1])
            for row, weight in zip(shard.rows[here], shard.weights[here], strict=True):
                y[row] += weight * factor[expert, lo:hi].sum() * sent[row]
        total[shard.kept] += y
    np.testing.assert_array_equal(total, expected)


@settings(max_examples=50, deadline=None)
@given(host_shares(), worker_cores(), st.sampled_from(["decode", "prefill"]))
def test_same_share_gives_the_same_shards_in_the_wires_types(share, workers, phase) -> None:
    first, again = (divide_into_shards(share, workers, phase, ROWS) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        for name in ("items", "offsets", "rows", "weights", "kept"):
            assert getattr(a, name).dtype == {"weights": "f4", "kept": "i8"}.get(name, "i4")
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_empty_share_has_no_shards(phase) -> None:
    assert divide_into_shards(NOTHING, WorkerCores.equal(3), phase, ROWS) == []
