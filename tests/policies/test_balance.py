"""Dividing experts between device and host: against DALI's algorithm line by line, and by hand."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_machine import COSTS, make_view

from pipeline.policies.assignments import (
    ASSIGNMENTS,
    Cheaper,
    Greedy,
    TwoEnded,
    bandwidth,
    cheaper,
    greedy,
    two_ended,
)
from pipeline.policies.costs import Costs
from pipeline.policies.parts import Assignment
from pipeline.policies.view import ModelShape, Routing, View

Problem = tuple[list[float], list[float], float, float]


@st.composite
def problems(draw: st.DrawFn, most: int = 8) -> Problem:
    """Seconds on the device and on the host, of the exchange and of the launch. Few different numbers, so
    that experts are often equal; some do not fit the device."""
    count = draw(st.integers(1, most))
    some = st.sampled_from([1.0, 2.0, 3.5, 7.0]) | st.floats(0.1, 9)
    device = draw(st.lists(some | st.just(inf), min_size=count, max_size=count))
    host = draw(st.lists(some, min_size=count, max_size=count))
    fixed = st.sampled_from([0.0, 0.0, 0.5, 3.0, 20.0])
    return device, host, draw(fixed), draw(fixed)


def algorithm_1(
    device: list[float], host: list[float], exchange: float, launch: float
) -> tuple[list[int], list[int]]:
    """DALI's Algorithm 1, line by line; C and G. T_cpu begins with the exchange, T_gpu with the launch."""
    on_cpu, on_gpu = [0] * len(host), [0] * len(device)
    t_cpu, t_gpu = exchange, launch
    indices = sorted(range(len(device)), key=lambda idx: abs(device[idx] - host[idx]), reverse=True)
    for idx in indices:
        gpu_time, cpu_time = device[idx], host[idx]
        if gpu_time == 0 and cpu_time == 0:
            continue
        if t_gpu + gpu_time <= t_cpu + cpu_time:
            on_gpu[idx] = 1
            t_gpu += gpu_time
        else:
            on_cpu[idx] = 1
            t_cpu += cpu_time
    return on_cpu, on_gpu


@given(problems())
def test_greedy_is_algorithm_1(problem: Problem) -> None:
    _, on_gpu = algorithm_1(*problem)
    assert [int(here) for here in greedy(*problem)] == on_gpu


def test_cheaper_by_hand() -> None:
    # the host takes 1 less for the first, and for the second one as much: the device's
    assert cheaper([5, 4, 0], [4, 4, 1], 0) == [False, True, True]
    # an exchange that takes as long as both gain is not worth it
    assert cheaper([5, 6], [4, 4], 2.9) == [False, False]
    assert cheaper([5, 6], [4, 4], 3) == [True, True]
    assert cheaper([inf], [4], 99) == [False]
    # a launch that takes longer than the third gains is not worth it, but it is where all else is there
    assert cheaper([5, 4, 0], [3, 4, 1], 0, 1) == [False, True, True]
    assert cheaper([5, 4, 0], [3, 4, 1], 0, 1.1) == [False, False, False]
    assert cheaper([5, 4, 0], [3, 4, 1], 2, 1.1) == [True, True, True]


@pytest.mark.parametrize(
    ("link", "device", "host", "rows", "answer"),
    [
        # The queue: resident 2 (3 rows), resident 0 (1), missing 3 (5 rows), missing 1 (1).
        # Resident 2: 1 <= 4. Resident 0: 2 <= 4. Missing 3 lands at 6, done at 7 > 4: the host's tail, 1, at
        # 4. Then missing 3 on the device at 7 <= 4 + 9.
        ([0, 6, 0, 6], [1, 1, 1, 1], [3, 4, 7, 9], [1, 1, 3, 5], [True, False, True, True]),
        # a host as fast as this takes both that are missing
        ([0, 6, 0, 6], [1, 1, 1, 1], [1, 1.5, 3, 3], [1, 1, 3, 5], [True, False, True, False]),
        # Transfers overlap with computing: resident experts keep the device busy until 4; the missing one has
        # landed by 3: done at 5, not at 8.
        ([0, 0, 3], [2, 2, 1], [9, 9, 5], [1, 1, 1], [True, True, True]),
        # Transfers follow each other: the second lands at 6, the device would be done at 7, the host is at 5.
        ([3, 3], [1, 1], [5, 5], [1, 1], [True, False]),
        # The device is slow: the host takes the missing one (1 < 4) and the light resident one (2 < 4), the
        # device the heavy one (4 <= 2 + 3), unless the host is done with that sooner too (2 + 1 < 4).
        ([0, 0, 5], [4, 4, 4], [3, 1, 1], [3, 1, 1], [True, False, False]),
        ([0, 0, 5], [4, 4, 4], [1, 1, 1], [3, 1, 1], [False, False, False]),
    ],
)
def test_two_ended_by_hand(link, device, host, rows, answer) -> None:
    assert two_ended(link, device, host, rows, 0)[0] == answer


def test_two_ended_counts_the_exchange_and_says_how_long_the_layer_takes() -> None:
    # the first case above: the device is done at 7, the host at 4
    sides = [0, 6, 0, 6], [1, 1, 1, 1], [3, 4, 7, 9], [1, 1, 3, 5]
    assert two_ended(*sides, 0)[1] == 7
    # from 4 on the exchange is worth less than a second transfer: done at 13 <= 10 + 4
    assert two_ended(*sides, 10) == ([True, True, True, True], 13)
    assert two_ended(*sides, 8.5) == ([True, False, True, True], 12.5)
    # the device begins 3 later: the resident ones by 5; the second host expert is done before it, at 13
    assert two_ended(*sides, 0, 3) == ([True, False, True, True], 7)
    assert two_ended([0], [1], [2], [1], 0, 4) == ([False], 2)


def test_bandwidth_by_hand() -> None:
    # the link moves a tile in 3, the host computes one in 1: a quarter of the 8 missing tiles is fetched
    assert bandwidth([12, 12], [4, 4], [1, 1], [4, 4], 0) == [2, 0]
    # the one with more rows is fetched first: 6 / 12 of the tiles, all of them the heavy one's
    assert bandwidth([6, 6], [2, 10], [1, 5], [4, 4], 0) == [0, 4]
    # more than one expert's tiles; the first expert is resident
    assert bandwidth([0, 2, 2], [0, 6, 6], [9, 1, 1], [0, 4, 4], 0) == [0, 4, 2]
    # a link without cost fetches all tiles
    assert bandwidth([0, 0], [1, 1], [1, 1], [4, 3], 0) == [4, 3]
    assert bandwidth([0], [0], [1], [4], 0) == [4]
    assert bandwidth([5], [0], [1], [4], 0) == [0]
    # the exchange of 8 is worth half of the tiles: 8 + 8 on either side
    assert bandwidth([12, 12], [4, 4], [1, 1], [4, 4], 8) == [4, 0]
    assert bandwidth([12, 12], [4, 4], [1, 1], [4, 4], 99) == [4, 4]
    assert bandwidth([inf, 0], [4, 4], [1, 1], [4, 0], 9) == [0, 0]


@given(st.integers(1, 20), st.floats(0.01, 10), st.floats(0.01, 10))
def test_bandwidth_makes_both_finish_together(tiles: int, link: float, host: float) -> None:
    """One expert: no other number of tiles finishes sooner, except by rounding to whole tiles."""
    (count,) = bandwidth([link * tiles], [host * tiles], [1], [tiles], 0)
    ideal = tiles * link * host / (link + host)
    assert max(count * link, (tiles - count) * host) <= ideal + max(link, host) / 2 + 1e-9


SHAPE = ModelShape(layers=2, experts=4, tiles=4, top_k=2)
ROUTING = Routing(np.array([[3, 1]], np.int32), np.array([[0.7, 0.3]], np.float32))


def view_of(residency: list[int], costs: Costs, capacity: int = 32) -> View:
    resident = np.zeros((2, 4), np.int32)
    resident[1] = residency
    return replace(make_view(SHAPE, capacity, costs), residency=resident, target=resident)


@pytest.mark.parametrize("part", [Greedy, TwoEnded, Cheaper])
def test_missing_experts_are_streamed_to_a_device_without_a_cache(part: type[Assignment]) -> None:
    """Equation 9 bounds what is held at once: staging slots are enough for experts of any size."""
    fast = Costs(rows=(1,), host=(9.0,), device=(1.0,), link=0.5, round_trip=0.0)
    view = replace(view_of([0, 0, 0, 0], fast, capacity=0), staging=1)
    assert part().cut(1, ROUTING, view)[[1, 3]].tolist() == [4, 4]
    assert part().cut(1, ROUTING, replace(view, staging=0))[[1, 3]].tolist() == [0, 0]


@pytest.mark.parametrize("part", [Greedy, TwoEnded, Cheaper])
def test_of_a_transfer_under_way_the_rest_is_priced(part: type[Assignment]) -> None:
    """An expert takes 4 on the host and 1 on the device, and 2 each of its four tiles on the link: the
    host's. With three of them there it is the device's: what is resident costs no transfer (DALI, section
    4.3)."""
    costs = Costs(rows=(1,), host=(1.0,), device=(0.25,), link=2.0, round_trip=0.0)
    one = Routing(ROUTING.experts[:, :1], ROUTING.weights[:, :1])
    cuts = [int(part().cut(1, one, view_of([0, 0, 0, landed], costs))[3]) for landed in range(5)]
    assert cuts == sorted(cuts)
    assert (cuts[0], cuts[3]) == (0, 4)


@pytest.mark.parametrize("part", [Greedy, TwoEnded, Cheaper])
def test_small_experts_stay_on_the_device_where_the_exchange_takes_longer(part: type[Assignment]) -> None:
    """An expert takes 4 on the host and 6 on the device, with its transfer 8; an exchange is 20."""
    small = Costs(rows=(1,), host=(1.0,), device=(1.5,), link=0.5, round_trip=0.0)
    one = Routing(ROUTING.experts[:, :1], ROUTING.weights[:, :1])
    assert part().cut(1, one, view_of([0, 0, 0, 0], small))[3] == 0
    assert part().cut(1, one, view_of([0, 0, 0, 0], replace(small, round_trip=20.0)))[3] == 4


def test_layer_without_active_experts_has_no_cuts() -> None:
    nothing = Routing(ROUTING.experts, np.zeros_like(ROUTING.weights))
    for part in ASSIGNMENTS:
        assert part(**{option.name: option.default for option in part.options}).cut(
            1, nothing, view_of([0, 4, 0, 0], COSTS)
        ).shape == (4,)
