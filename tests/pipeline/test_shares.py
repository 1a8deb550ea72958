"""A layer's work divided between host and device: by its cuts, and by its residency."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pipeline.errors import PlanError
from pipeline.experts.shares import split_layer
from pipeline.policies.view import Routing

EXPERTS, TILES = 5, 4


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    """R rows of k different experts; some weights are 0."""
    rows, k = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    experts = [draw(st.permutations(range(EXPERTS)))[:k] for _ in range(rows)]
    weights = [[draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])) for _ in range(k)] for _ in range(rows)]
    return Routing(np.array(experts, np.int32), np.array(weights, np.float32))


COUNTS = arrays(np.int32, EXPERTS, elements=st.integers(0, TILES))


def pairs_of(rows: np.ndarray, weights: np.ndarray) -> list[tuple[int, float]]:
    return list(zip(rows.tolist(), weights.tolist(), strict=True))


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
    assert routing.rows == {e: len(users[e]) for e in every if users[e]}

    host = split.host
    pairs = [pairs_of(rows, weights) for rows, weights in zip(host.rows, host.weights, strict=True)]
    on_host = list(zip(host.experts.tolist(), host.lo.tolist(), pairs, strict=True))
    assert on_host == [(e, cut[e], users[e]) for e in every if users[e] and cut[e] < TILES]
    assert set(host.hi.tolist()) <= {TILES}
    assert host.total == sum(TILES - lo for _, lo, _ in on_host)

    device = [(s.expert, s.resident, s.cut, pairs_of(s.rows, s.weights)) for s in split.device]
    expected = [(e, min(cut[e], residency[e]), cut[e], users[e]) for e in every if users[e] and cut[e]]
    assert device == expected


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
    assert [(s.resident, s.cut) for s in split.device] == ([device] if device else [])
    assert split.host.lo.tolist() == ([] if host is None else [host])


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
            assert split_layer(routing, cut, residency, TILES).host.experts.tolist() == [2]


@pytest.mark.parametrize("shape", [(EXPERTS - 1,), (EXPERTS + 1,), (1, EXPERTS)])
def test_cuts_of_another_shape_are_a_plan_error(shape) -> None:
    last = Routing(np.array([[EXPERTS - 1]], np.int32), np.array([[1.0]], np.float32))
    with pytest.raises(PlanError):
        split_layer(last, np.zeros(shape, np.int32), np.zeros(EXPERTS, np.int32), TILES)
