"""A layer divided between host and device by its cuts and its residency, and among workers: each host tile is
in exactly one descriptor, costs fit the workers' cores, and C writes the bytes of the specification."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import pytest
from descriptor_parts import Parts, parts_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pipeline.config import WorkerCores
from pipeline.errors import PlanError
from pipeline.experts.division import (
    ROWS_PER_READ,
    Divided,
    Divider,
    Share,
    Split,
    empty_part,
    largest,
    split_layer,
)
from pipeline.policies.view import Active, Routing
from shm.descriptor import Descriptor, describe
from shm.mask import DENSE, Mask
from shm.numa import node_of

EXPERTS, TILES = 12, 7
SEQ = 40
Tile = tuple[int, int]


@st.composite
def plans(draw: st.DrawFn) -> Split:
    """Up to 6 rows, some weights 0; of each expert any range of tiles, or none."""
    rows, k = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    experts = np.array([random.permutation(EXPERTS)[:k] for _ in range(rows)], np.int32)
    weights = random.choice(np.array([0, 0.25, 1, 2], np.float32), (rows, k))
    lo, hi = random.integers(0, TILES + 1, (2, EXPERTS)).astype(np.int32)
    if draw(st.booleans()):
        hi[:] = TILES
    mask = draw(st.sampled_from([DENSE, Mask(0.5, 0.25)]))
    return Split(3, Routing(experts, weights), lo, hi, mask)


@st.composite
def worker_cores(draw: st.DrawFn) -> WorkerCores:
    cores = draw(st.lists(st.integers(1, 8), min_size=1, max_size=6))
    return WorkerCores(tuple(cores), draw(st.integers(1, len(cores))))


Items = list[tuple[int, int, int]]  # expert, lo, hi
Part = list[tuple[int, int, int]]  # index of the item, tile lo, tile hi


class Plain:
    """The specification of divide.c."""

    def __init__(self, workers: WorkerCores) -> None:
        self._workers = workers

    def divide(self, split: Split, seq: int) -> Divided:
        """Return the descriptors of the host's tiles; that of worker w has the number seq + w. Raises
        PlanError for an expert that does not exist."""
        active: Active = split.routing.active
        if len(active.experts) and not 0 <= active.experts[0] <= active.experts[-1] < len(split.lo):
            raise PlanError("an expert outside the layer")
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


def divided(plan: Split, workers: WorkerCores) -> dict[int, Parts]:
    """By worker."""
    parts = Divider(workers, EXPERTS, TILES).divide(plan, SEQ).parts
    return {worker: parts_of(descriptor) for worker, descriptor in parts}


def tiles_of(parts: Parts) -> list[Tile]:
    return [(expert, tile) for expert, lo, hi in parts.items.tolist() for tile in range(lo, hi)]


def users_of(plan: Split) -> dict[int, list[tuple[int, float]]]:
    """(row, weight) of the rows that use each expert of which the host has tiles."""
    routing, users = plan.routing, dict[int, list[tuple[int, float]]]()
    for row, (experts, weights) in enumerate(zip(routing.experts, routing.weights, strict=True)):
        for expert, weight in zip(experts.tolist(), weights.tolist(), strict=True):
            if weight and plan.lo[expert] < plan.hi[expert]:
                users.setdefault(expert, []).append((row, weight))
    return dict(sorted(users.items()))


def all_tiles(plan: Split) -> list[Tile]:
    return [(e, tile) for e in users_of(plan) for tile in range(plan.lo[e], plan.hi[e])]


def cost(plan: Split, tiles: list[Tile]) -> int:
    users = users_of(plan)
    return sum(ROWS_PER_READ + len(users[expert]) for expert, _ in tiles)


def pairs_of(part: Share | Active) -> list[list[tuple[int, float]]]:
    """Each item's rows and their weights."""
    pairs = list(zip(part.rows.tolist(), part.weights.tolist(), strict=True))
    offsets = part.offsets.tolist()
    assert (offsets[0], offsets[-1]) == (0, len(pairs))
    return [pairs[start:end] for start, end in pairwise(offsets)]


@settings(max_examples=200)
@given(plans(), st.data())
def test_each_active_expert_is_divided_at_its_cut(plan, data) -> None:
    counts = arrays(np.int32, EXPERTS, elements=st.integers(0, TILES))
    cut, residency = data.draw(counts), data.draw(counts)
    every = plan._replace(lo=np.zeros_like(cut), hi=np.ones_like(cut))
    split, users = split_layer(plan.routing, cut, residency, TILES, 3, plan.mask), users_of(every)
    active = plan.routing.active
    assert active.experts.tolist() == list(users)
    assert active.counts.tolist() == [len(pairs) for pairs in users.values()]
    assert pairs_of(active) == list(users.values())
    assert split.host_tiles().tolist() == [TILES - cut[e] for e in users]
    assert (split.layer, split.mask) == (3, plan.mask)
    device = [e for e in users if cut[e]]
    assert split.device.items.tolist() == [[e, min(cut[e], residency[e]), cut[e]] for e in device]
    assert pairs_of(split.device) == [users[e] for e in device]
    for part in (active[:5], split.device):
        assert {array.dtype for array in part} == {np.dtype(np.int32), np.dtype(np.float32)}
        assert all(array.flags.c_contiguous for array in part)


@pytest.mark.parametrize("wrong", [-1, TILES + 1])
def test_cut_out_of_range_is_a_plan_error_for_active_experts_only(wrong) -> None:
    routing = Routing(np.array([[2, 3]], np.int32), np.array([[1.0, 0.0]], np.float32))
    residency = np.zeros(EXPERTS, np.int32)
    for expert in range(EXPERTS):
        cut = np.zeros(EXPERTS, np.int32)
        cut[expert] = wrong
        if expert == 2:
            with pytest.raises(PlanError, match=rf"0\.\.{TILES}"):
                split_layer(routing, cut, residency, TILES)
        else:  # no row routes to it, or with weight 0
            assert split_layer(routing, cut, residency, TILES).host_tiles().tolist() == [TILES]


@pytest.mark.parametrize("shape", [(EXPERTS - 1,), (EXPERTS + 1,), (1, EXPERTS)])
def test_cuts_of_another_shape_are_a_plan_error(shape) -> None:
    last = Routing(np.array([[EXPERTS - 1]], np.int32), np.array([[1.0]], np.float32))
    with pytest.raises(PlanError):
        split_layer(last, np.zeros(shape, np.int32), np.zeros(EXPERTS, np.int32), TILES)


@settings(max_examples=400)
@given(plans(), worker_cores())
def test_c_writes_the_bytes_of_the_specification(plan, workers) -> None:
    """And the same bytes for the same plan."""
    plain, compiled = Plain(workers), Divider(workers, EXPERTS, TILES)
    found = [way.divide(plan, SEQ) for way in (plain, compiled, compiled)]
    for each in found:
        assert each.tiles == found[0].tiles == len(all_tiles(plan))
        assert [worker for worker, _ in each.parts] == [worker for worker, _ in found[0].parts]
        for (worker, descriptor), (_, expected) in zip(each.parts, found[0].parts, strict=True):
            assert descriptor.dtype == np.int32
            np.testing.assert_array_equal(descriptor, expected)
            rows, k = plan.routing.experts.shape
            assert len(descriptor) <= largest(workers, EXPERTS, TILES, rows, k)
            parts = parts_of(descriptor)
            assert (parts.generation, parts.seq, parts.layer) == (0, SEQ + worker, plan.layer)
            assert (parts.x_rows, parts.mask) == (rows, (plan.mask.threshold, plan.mask.share))


@settings(max_examples=200)
@given(plans(), worker_cores())
def test_tiles_are_cut_in_node_order_and_in_proportion_to_cores(plan, workers) -> None:
    found = divided(plan, workers)
    tiles = [tile for parts in found.values() for tile in tiles_of(parts)]
    order = all_tiles(plan)
    if workers.nodes > 1:
        order.sort(key=lambda tile: (node_of(*tile, workers.nodes), tile))
    assert tiles == order
    after = 0
    for worker, parts in found.items():
        first, after = after, after + len(tiles_of(parts))
        # its own tiles and one of a neighbour at either end, half of which may lie on its side
        dearest = max(cost(plan, [tile]) for tile in order[max(first - 1, 0) : after + 1])
        ideal = cost(plan, order) * workers.cores[worker] / sum(workers.cores)
        if len(found) == len(workers):
            assert abs(cost(plan, tiles_of(parts)) - ideal) <= dearest
        assert cost(plan, tiles_of(parts)) <= ideal + dearest
        if workers.nodes == 1:  # an expert's tiles in a run are one item
            assert len(set(parts.items[:, 0].tolist())) == len(parts.items)


def simple(ranges: list[tuple[int, int, int]], rows: int = 1) -> Split:
    experts = np.array([[e for e, _, _ in ranges]] * rows, np.int32)
    lo, hi = np.zeros((2, 16), np.int32)
    for expert, *ends in ranges:
        lo[expert], hi[expert] = ends
    return Split(0, Routing(experts, np.ones(experts.shape, np.float32)), lo, hi, DENSE)


def test_what_is_nobodys_has_no_descriptor_and_unknown_experts_are_refused() -> None:
    workers, none = WorkerCores.equal(3), np.zeros(EXPERTS, np.int32)
    plan = Split(0, Routing(np.array([[1, 2]], np.int32), np.ones((1, 2), np.float32)), none, none, DENSE)
    divider = Divider(workers, EXPERTS, TILES)
    assert divider.divide(plan, 0) == ([], 0)
    for expert in (-1, EXPERTS, 2**31 - 1):
        routing = Routing(np.array([[1, expert]], np.int32), np.ones((1, 2), np.float32))
        with pytest.raises(PlanError, match="expert outside"):
            divider.divide(plan._replace(routing=routing, hi=none + TILES), 0)


def test_arrays_that_do_not_fit_each_other_are_refused() -> None:
    divider, good = Divider(WorkerCores.equal(2), 16, 8), simple([(1, 0, 8)])
    assert divider.divide(good, 0).parts
    narrow = Routing(good.routing.experts, np.ones((1, 2), np.float32))
    for wrong in ({"lo": good.lo[1:]}, {"hi": good.hi[1:]}, {"routing": narrow}):
        with pytest.raises(PlanError, match="do not fit"):
            divider.divide(good._replace(**wrong), 0)


def test_an_empty_part_has_no_items() -> None:
    worker, descriptor = empty_part(4, 9, 2)
    parts = parts_of(descriptor)
    assert (worker, parts.seq, parts.x_rows, len(parts.items), parts.offsets.tolist()) == (4, 9, 2, 0, [0])
