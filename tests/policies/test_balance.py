"""Dividing experts between device and host: against an exhaustive search, and on hand-worked cases."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.policies.balance import (
    EXACT,
    beam,
    by_difference,
    fetched,
    greedy,
    makespan,
    optimum,
    two_ended,
)

Problem = tuple[list[float], list[float], list[int], int]


@st.composite
def problems(draw: st.DrawFn, most: int = 8, ample: bool = False) -> Problem:
    """Seconds on the device and on the host, tiles needed, free tiles. Few different numbers, so that experts
    are often equal."""
    count = draw(st.integers(1, most))
    some = st.lists(st.sampled_from([1.0, 2.0, 3.5, 7.0]) | st.floats(0.1, 9), min_size=count, max_size=count)
    need = draw(st.lists(st.sampled_from([0, 4, 4, 2]), min_size=count, max_size=count))
    free = 99 if ample else draw(st.sampled_from([0, 4, 10, 99, 99, 99]))
    return draw(some), draw(some), need, free


def fits(answer: list[bool], need: list[int], free: int) -> bool:
    return sum(tiles for tiles, here in zip(need, answer, strict=True) if here) <= free


def least(problem: Problem) -> float:
    """By exhaustive search."""
    device, host, need, free = problem
    every = [list(answer) for answer in product([True, False], repeat=len(device))]
    return min(
        max(
            sum(device[i] for i in range(len(device)) if answer[i]),
            sum(host[i] for i in range(len(host)) if not answer[i]),
        )
        for answer in every
        if fits(answer, need, free)
    )


@settings(deadline=None, max_examples=300)
@given(problems())
def test_optimum_is_the_fastest_of_all_assignments(problem: Problem) -> None:
    device, host, need, free = problem
    best = optimum(*problem)
    assert fits(best, need, free)
    assert makespan(best, device, host) == pytest.approx(least(problem), abs=1e-12)


@settings(deadline=None, max_examples=300)
@given(problems())
def test_greedy_is_never_faster_than_the_optimum(problem: Problem) -> None:
    device, host, need, free = problem
    answer = greedy(*problem)
    assert fits(answer, need, free)
    assert makespan(answer, device, host) >= least(problem) - 1e-12


@settings(deadline=None, max_examples=200)
@given(problems(most=7), st.sampled_from([1, 2, 5, 128]))
def test_beam_is_between_greedy_and_optimum_at_its_limits(problem: Problem, width: int) -> None:
    device, host, need, free = problem
    answer = beam(*problem, width)
    seconds = makespan(answer, device, host)
    assert fits(answer, need, free)
    assert seconds >= least(problem) - 1e-12
    if width == 1:  # following one assignment, the faster one each time, is greedy
        assert seconds == pytest.approx(makespan(greedy(*problem), device, host))
    if width >= 2 ** len(device):  # and following all of them is trying all
        assert seconds == pytest.approx(least(problem))


def algorithm_1(device: list[float], host: list[float]) -> tuple[list[int], list[int]]:
    """DALI's Algorithm 1, line by line; C and G."""
    on_cpu, on_gpu = [0] * len(host), [0] * len(device)
    t_cpu = t_gpu = 0.0
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


@given(problems(ample=True))
def test_greedy_is_algorithm_1(problem: Problem) -> None:
    device, host, _, _ = problem
    _, on_gpu = algorithm_1(device, host)
    assert [int(here) for here in greedy(*problem)] == on_gpu


def test_greedy_by_hand() -> None:
    # differences 4, 1, 3: the first to the device (1 <= 5), the third (1 + 1 <= 4) too, the second to the
    # host (2 + 2 > 3)
    assert by_difference([1, 2, 1], [5, 3, 4]) == [0, 2, 1]
    assert greedy([1, 2, 1], [5, 3, 4], [4, 4, 4], 99) == [True, False, True]
    # equal on both sides: the device's
    assert greedy([2], [2], [4], 4) == [True]
    # no free tile: the host computes the expert, however slow; a resident expert still goes to the device
    assert greedy([1, 1, 1], [9, 8, 7], [4, 4, 0], 4) == [True, False, True]


def test_greedy_is_not_always_best() -> None:
    device, host = [3.0, 3.0, 2.0, 2.0, 2.0], [3.0, 3.0, 2.0, 2.0, 2.0]
    need = [0] * 5
    assert makespan(greedy(device, host, need, 0), device, host) == 7
    assert makespan(optimum(device, host, need, 0), device, host) == 6


def test_optimum_of_many_equal_experts_is_fast() -> None:
    """16 experts of two kinds: 65536 assignments, unless equal experts are recognized."""
    device, host = [1.0, 6.0] * 8, [2.5, 2.5] * 8
    answer = optimum(device, host, [0, 4] * 8, 99)
    # n of the 6.0s and all 1.0s on the device: max(8 + 6n, 20 - 2.5n) is least at n = 1: 17.5
    assert makespan(answer, device, host) == 17.5


def test_optimum_beyond_its_limit_is_no_worse_than_greedy() -> None:
    count = EXACT + 20
    device = [1.0 + 0.37 * (i * i % 11) for i in range(count)]
    host = [2.0 + 0.21 * (i * 7 % 13) for i in range(count)]
    need = [4] * count
    answer = optimum(device, host, need, 60)
    assert fits(answer, need, 60)
    assert makespan(answer, device, host) <= makespan(greedy(device, host, need, 60), device, host)


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
    assert two_ended(link, device, host, rows) == answer


def test_bandwidth_by_hand() -> None:
    # the link moves a tile in 3, the host computes one in 1: a quarter of the 8 missing tiles is fetched
    assert fetched([12, 12], [4, 4], [1, 1], [4, 4]) == [2, 0]
    # the one with more rows is fetched first: 6 / 12 of the tiles, all of them the heavy one's
    assert fetched([6, 6], [2, 10], [1, 5], [4, 4]) == [0, 4]
    # more than one expert's tiles; the first expert is resident
    assert fetched([0, 2, 2], [0, 6, 6], [9, 1, 1], [0, 4, 4]) == [0, 4, 2]
    # a link without cost fetches all tiles
    assert fetched([0, 0], [1, 1], [1, 1], [4, 3]) == [4, 3]
    assert fetched([0], [0], [1], [4]) == [4]
    assert fetched([5], [0], [1], [4]) == [0]


@given(st.integers(1, 20), st.floats(0.01, 10), st.floats(0.01, 10))
def test_bandwidth_makes_both_finish_together(tiles: int, link: float, host: float) -> None:
    """One expert: no other number of tiles finishes sooner, except by rounding to whole tiles."""
    (count,) = fetched([link * tiles], [host * tiles], [1], [tiles])
    ideal = tiles * link * host / (link + host)
    assert max(count * link, (tiles - count) * host) <= ideal + max(link, host) / 2 + 1e-9
