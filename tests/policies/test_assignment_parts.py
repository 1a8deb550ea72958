"""The cuts of assignments from routings, costs and residency, each recomputed in another way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_machine import COSTS, capacities, make_routing, make_view, shapes

from pipeline.errors import PolicyError
from pipeline.policies.assignments import (
    ASSIGNMENTS,
    Bandwidth,
    Cheaper,
    Greedy,
    TwoEnded,
)
from pipeline.policies.costs import Costs
from pipeline.policies.parts import Assignment, require
from pipeline.policies.view import ModelShape, Routing, View


def every_assignment() -> list[Assignment]:
    return [part() for part in ASSIGNMENTS]


@st.composite
def steps(draw: st.DrawFn) -> tuple[View, Routing]:
    """One layer to plan: residency within the capacity, some of it partial, targets beyond and below it."""
    shape = draw(shapes())
    capacity = draw(capacities(shape))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    left = capacity
    residency = np.zeros((shape.layers, shape.experts), np.int32)
    for index in rng.permutation(residency.size):
        tiles = min(left, int(rng.choice([0, shape.tiles, int(rng.integers(0, shape.tiles + 1))])))
        residency.ravel()[index] = tiles
        left -= tiles
    target = np.where(rng.random(residency.shape) < 0.2, residency // 2, residency).astype(np.int32)
    staging = draw(st.sampled_from([4, 4, 1, 0]))
    fixed = st.sampled_from([0.0, 0.3, 4.0])
    costs = replace(COSTS, launch=draw(fixed), fetch=draw(fixed))
    view = make_view(shape, capacity, costs)
    view = replace(view, residency=residency, target=target, staging=staging)
    rows = draw(st.sampled_from([1, 1, 3, 12, 700]))
    return view, make_routing(shape, rng, rows)


@settings(deadline=None, max_examples=150)
@given(steps())
def test_cuts_are_in_range_and_fit_the_parts_flags(step: tuple[View, Routing]) -> None:
    view, routing = step
    for part in every_assignment():
        cut = part.cut(0, routing, view)
        assert cut.dtype == np.int32
        assert cut.shape == (view.shape.experts,)
        active = cut[routing.workload(view.shape.experts) > 0]
        assert ((active >= 0) & (active <= view.shape.tiles)).all()
        if not part.uses_device:
            assert not active.any()
        if not part.uses_host:
            assert (active == view.shape.tiles).all()
        if not part.fetches:
            assert (cut <= view.residency[0]).all()


SHAPE = ModelShape(layers=2, experts=4, tiles=4, top_k=2)
ROUTING = Routing(np.array([[3, 1]], np.int32), np.array([[0.7, 0.3]], np.float32))


def view_of(residency: list[int], costs: Costs, capacity: int = 32) -> View:
    resident = np.zeros((2, 4), np.int32)
    resident[1] = residency
    return replace(make_view(SHAPE, capacity, costs), residency=resident, target=resident)


def test_greedy_by_hand() -> None:
    # a tile takes 2 on the host, 1 on the device, 5 on the link: an expert 8, 4 and 20
    costs = Costs(rows=(1,), host=(2.0,), device=(1.0,), link=5.0, round_trip=0.0)
    cut = Greedy().cut(1, ROUTING, view_of([0, 4, 0, 0], costs))
    assert cut[1] == 4  # resident: 4 against 8
    assert cut[3] == 0  # 20 on the device against 8
    # three tiles of expert 3 are resident: the transfer of the last one takes 5, more than computing all, 4;
    # expert 1 differs most (4 against 8) and comes first, then 3: 4 + 5 against 8: the host
    assert Greedy().cut(1, ROUTING, view_of([0, 4, 0, 3], costs))[[1, 3]].tolist() == [4, 0]
    # a link this fast hides behind computing: 4 against 8, then 8 against 8, equal: the device
    fast = replace(costs, link=0.5)
    assert Greedy().cut(1, ROUTING, view_of([0, 0, 0, 0], fast))[[1, 3]].tolist() == [4, 4]
    # where nothing can be streamed, the device computes what is resident
    still = replace(view_of([0, 4, 0, 3], fast), staging=0)
    assert Greedy().cut(1, ROUTING, still)[[1, 3]].tolist() == [4, 0]


@pytest.mark.parametrize("part", [Greedy, TwoEnded, Cheaper])
def test_missing_experts_are_streamed_to_a_device_without_a_cache(part: type[Assignment]) -> None:
    """Equation 9 bounds what is held at once: staging slots are enough for experts of any size."""
    fast = Costs(rows=(1,), host=(9.0,), device=(1.0,), link=0.5, round_trip=0.0)
    view = replace(view_of([0, 0, 0, 0], fast, capacity=0), staging=1)
    assert part().cut(1, ROUTING, view)[[1, 3]].tolist() == [4, 4]


@pytest.mark.parametrize("part", [Greedy, TwoEnded, Cheaper])
def test_small_experts_stay_on_the_device_where_the_exchange_takes_longer(part: type[Assignment]) -> None:
    """An expert takes 4 on the host and 6 on the device, with its transfer 8; an exchange is 20."""
    small = Costs(rows=(1,), host=(1.0,), device=(1.5,), link=0.5, round_trip=0.0)
    one = Routing(ROUTING.experts[:, :1], ROUTING.weights[:, :1])
    assert part().cut(1, one, view_of([0, 0, 0, 0], small))[3] == 0
    assert part().cut(1, one, view_of([0, 0, 0, 0], replace(small, round_trip=20.0)))[3] == 4


def test_two_ended_by_hand() -> None:
    costs = Costs(rows=(1,), host=(2.0,), device=(1.0,), link=1.5, round_trip=0.0)
    # resident 1: done at 4 <= 8. Missing 3 lands at 6, done at 10 > 8: the host
    assert TwoEnded().cut(1, ROUTING, view_of([0, 4, 0, 0], costs))[[1, 3]].tolist() == [4, 0]
    # three of its tiles are resident: the last lands at 1.5, done at 8 <= 8
    assert TwoEnded().cut(1, ROUTING, view_of([0, 4, 0, 3], costs))[[1, 3]].tolist() == [4, 4]


def test_bandwidth_by_hand() -> None:
    # the link moves a tile in 6, the host computes one in 2: a quarter of the missing tiles is fetched
    costs = Costs(rows=(1,), host=(2.0,), device=(1.0,), link=6.0, round_trip=0.0)
    assert Bandwidth().cut(1, ROUTING, view_of([0, 4, 0, 0], costs))[[1, 3]].tolist() == [4, 1]
    assert Bandwidth().cut(1, ROUTING, view_of([0, 0, 0, 0], costs))[[1, 3]].tolist() == [2, 0]
    assert Bandwidth().cut(1, ROUTING, view_of([0, 4, 0, 4], costs))[[1, 3]].tolist() == [4, 4]


def test_assignments_need_costs_and_follow_them() -> None:
    for part in every_assignment():
        view = view_of([0, 4, 0, 0], COSTS)
        if part.needs_costs:
            with pytest.raises(PolicyError, match="--costs"):
                require("any", [part], replace(view, costs=None))
    part = Cheaper()
    slow_link = Costs(rows=(1,), host=(2.0,), device=(1.0,), link=9.0, round_trip=0.0)
    assert part.cut(1, ROUTING, view_of([0, 0, 0, 0], slow_link))[3] == 0
    assert part.cut(1, ROUTING, view_of([0, 0, 0, 0], replace(slow_link, link=0.1)))[3] == 4


def test_layer_without_active_experts_has_no_cuts() -> None:
    nothing = Routing(ROUTING.experts, np.zeros_like(ROUTING.weights))
    for part in every_assignment():
        assert part.cut(1, nothing, view_of([0, 4, 0, 0], COSTS)).shape == (4,)
