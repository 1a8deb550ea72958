"""A layer's work divided between host and device: by its cuts, and by its residency."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pipeline.errors import PlanError
from pipeline.experts.shares import Missing, Share, split_layer
from pipeline.policies.view import Active, Routing

EXPERTS, TILES = 5, 4


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    """R rows of k different experts; some weights are 0."""
    rows, k = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    experts = [draw(st.permutations(range(EXPERTS)))[:k] for _ in range(rows)]
    weights = [[draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])) for _ in range(k)] for _ in range(rows)]
    return Routing(np.array(experts, np.int32), np.array(weights, np.float32))


COUNTS = arrays(np.int32, EXPERTS, elements=st.integers(0, TILES))


def pairs_of(part: Share | Active) -> list[list[tuple[int, float]]]:
    """Each item's rows and their weights."""
    pairs = list(zip(part.rows.tolist(), part.weights.tolist(), strict=True))
    offsets = part.offsets.tolist()
    assert offsets[0] == 0
    assert offsets[-1] == len(pairs)
    return [pairs[start:end] for start, end in pairwise(offsets)]


@settings(max_examples=200, deadline=None)
@given(routings(), COUNTS, COUNTS)
def test_each_active_expert_is_divided_at_its_cut(routing, cut, residency) -> None:
    split = split_layer(routing, cut, residency, TILES)
    every = range(EXPERTS)
    users = {  # expert -> (row, weight) of the rows that use it
        e: [
            (row, float(w))
            for row in range(len(routing.experts))
            for chosen, w in zip(routing.experts[row], routing.weights[row], strict=True)
            if chosen == e and w != 0
        ]
        for e in every
    }
    active = routing.active
    assert active.experts.tolist() == [e for e in every if users[e]]
    assert active.counts.tolist() == [len(users[e]) for e in every if users[e]]
    assert pairs_of(active) == [users[e] for e in every if users[e]]

    host = [e for e in every if users[e] and cut[e] < TILES]
    assert split.host.items.tolist() == [[e, cut[e], TILES] for e in host]
    assert pairs_of(split.host) == [users[e] for e in host]
    assert split.host.tiles == sum(TILES - cut[e] for e in host)

    device = [e for e in every if users[e] and cut[e]]
    assert split.device.items.tolist() == [[e, min(cut[e], residency[e]), cut[e]] for e in device]
    assert pairs_of(split.device) == [users[e] for e in device]
    for part in (active, split.host, split.device):
        assert all(array.dtype == np.intp for array in part[5:])  # an active expert's place, to index with
        assert {array.dtype for array in part[:5]} == {np.dtype(np.int32), np.dtype(np.float32)}
        assert all(array.flags.c_contiguous for array in part)


@settings(max_examples=200, deadline=None)
@given(routings(), st.data())
def test_items_taken_from_a_share_keep_their_rows(routing, data) -> None:
    share = split_layer(routing, np.zeros(EXPERTS, np.int32), np.zeros(EXPERTS, np.int32), TILES).host
    every = range(len(share.items))
    chosen = data.draw(st.lists(st.sampled_from(every), min_size=1, max_size=6) if every else st.just([]))
    if chosen:
        taken, pairs = share.take(chosen), pairs_of(share)
        assert taken.items.tolist() == [share.items.tolist()[i] for i in chosen]
        assert pairs_of(taken) == [pairs[i] for i in chosen]
        assert [array.dtype for array in taken] == [array.dtype for array in share]


def test_device_tiles_that_cannot_be_fetched_become_a_host_share() -> None:
    routing = Routing(np.array([[1, 4], [4, 2]], np.int32), np.array([[0.5, 1], [0.25, 1]], np.float32))
    split = split_layer(routing, np.full(EXPERTS, 3, np.int32), np.ones(EXPERTS, np.int32), TILES)
    late = split.without([Missing(4, 2, 3), Missing(1, 1, 3), Missing(4, 1, 2)])
    assert late.host.items.tolist() == [[1, 1, 3], [4, 1, 3]]
    assert pairs_of(late.host) == [[(0, 0.5)], [(0, 1.0), (1, 0.25)]]
    assert not len(late.device.items)


@pytest.mark.parametrize(
    ("resident", "cut", "device", "host"),  # device: resident, cut; host: its first tile
    [
        (3, 2, (2, 2), 2),  # 0 < p < r: tile 2 is resident, and still the host's
        (1, 3, (1, 3), 3),  # r < p < n: tiles 1 and 2 are fetched
        (0, 4, (0, 4), None),  # on demand
        (4, 4, (4, 4), None),  # all resident
        (4, 0, None, 0),  # all resident, none used
        (2, 2, (2, 2), 2),
    ],
)
def test_device_share_has_resident_and_missing_tiles(resident, cut, device, host) -> None:
    one = Routing(np.array([[1]], np.int32), np.array([[1.0]], np.float32))
    split = split_layer(one, np.full(EXPERTS, cut, np.int32), np.full(EXPERTS, resident, np.int32), TILES)
    assert split.device.items.tolist() == ([[1, *device]] if device else [])
    assert split.host.items.tolist() == ([] if host is None else [[1, host, TILES]])


@pytest.mark.parametrize("wrong", [-1, TILES + 1])
def test_cut_out_of_range_is_a_plan_error_for_active_experts_only(wrong) -> None:
    routing = Routing(np.array([[2, 3]], np.int32), np.array([[1.0, 0.0]], np.float32))
    residency = np.zeros(EXPERTS, np.int32)
    for expert in range(EXPERTS):
        cut = np.zeros(EXPERTS, np.int32)
        cut[expert] = wrong
        if expert == 2:
            with pytest.raises(PlanError, match=r"0\.\.4"):
                split_layer(routing, cut, residency, TILES)
        else:  # no row routes to it, or with weight 0
            assert split_layer(routing, cut, residency, TILES).host.items[:, 0].tolist() == [2]


@pytest.mark.parametrize("shape", [(EXPERTS - 1,), (EXPERTS + 1,), (1, EXPERTS)])
def test_cuts_of_another_shape_are_a_plan_error(shape) -> None:
    last = Routing(np.array([[EXPERTS - 1]], np.int32), np.array([[1.0]], np.float32))
    with pytest.raises(PlanError):
        split_layer(last, np.zeros(shape, np.int32), np.zeros(EXPERTS, np.int32), TILES)


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=5),
    st.lists(st.integers(0, 4), max_size=9),
    st.booleans(),
)
def test_take_gives_each_items_rows_and_weights(counts, chosen, single) -> None:
    """Also where items come several times, and where each has one row."""
    counts = [1] * len(counts) if single else counts
    chosen = [item for item in chosen if item < len(counts)]
    offsets = np.cumsum([0, *counts], dtype=np.int32)
    rows = np.arange(offsets[-1], dtype=np.int32)
    items = np.array([[expert, 0, 4] for expert in range(len(counts))], np.int32)
    taken = Share(items, offsets, rows, rows.astype(np.float32) / 8).take(chosen)
    assert taken.items[:, 0].tolist() == chosen
    expected = [list(range(offsets[item], offsets[item + 1])) for item in chosen]
    found = [taken.rows[a:b].tolist() for a, b in pairwise(taken.offsets.tolist())]
    assert found == expected
    assert (taken.weights * 8).tolist() == taken.rows.tolist()
    assert (taken.items.dtype, taken.offsets.dtype, taken.rows.dtype) == (np.int32,) * 3
