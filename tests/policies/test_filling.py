"""The balanced cut: against every cut of small layers, on a clock that moves and computes tile by tile."""

from __future__ import annotations

from itertools import product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.policies.filling import Fixed, Group, balance, sides

Problem = tuple[list[Group], Fixed]
PLAIN = Fixed(host=0, launch=0, link=0, tile=2, fetch=0)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to four experts of up to four tiles, often alike, in any state of residency."""
    tiles = draw(st.integers(1, 4))
    kinds = draw(st.lists(st.tuples(st.floats(0.1, 9), st.floats(0.01, 6)), min_size=1, max_size=3))
    experts = []
    for _ in range(draw(st.integers(1, 4))):
        host, device = draw(st.sampled_from(kinds))
        resident = draw(st.integers(0, tiles))
        experts.append(Group(host, device, resident, tiles - resident, int(resident < tiles)))
    some = st.just(0.0) | st.floats(0, 4)
    tile = draw(st.floats(0, 6) | st.just(inf))
    return experts, Fixed(draw(some), draw(some), draw(some), tile, draw(some))


def ends(groups: list[Group], cuts: tuple[int, ...], fixed: Fixed) -> float:
    """The layer's seconds where each group is one expert, tile by tile."""
    host = sum((group.tiles - cut) * group.host for group, cut in zip(groups, cuts, strict=True))
    if all(group.tiles == cut for group, cut in zip(groups, cuts, strict=True)):
        host = 0.0
    else:
        host += fixed.host
    device = fixed.launch if any(cuts) else 0.0
    device += sum(min(group.resident, cut) * group.device for group, cut in zip(groups, cuts, strict=True))
    link = fixed.link
    for group, cut in zip(groups, cuts, strict=True):
        for tile in range(group.resident, cut):
            link += fixed.tile + (fixed.fetch if tile == group.resident else 0)
            device = max(device, link) + group.device
    return max(host, device)


@settings(max_examples=400)
@given(problems())
def test_the_cut_is_within_a_tile_of_the_best_of_all_cuts(problem: Problem) -> None:
    groups, fixed = problem
    found = balance(groups, fixed)
    cuts = tuple(group.taken for group in groups)
    least = min(ends(groups, tried, fixed) for tried in product(*(range(g.tiles + 1) for g in groups)))
    link = fixed.fetch + fixed.tile if fixed.tile < inf else 0.0
    a_tile = max(max(group.host, link + group.device) for group in groups)
    assert ends(groups, cuts, fixed) <= least + a_tile
    assert found.seconds == pytest.approx(ends(groups, cuts, fixed))
    assert sides(groups, fixed).seconds == pytest.approx(found.seconds)


@settings(max_examples=200)
@given(
    st.integers(0, 40),
    st.integers(1, 40),
    st.floats(0.1, 9),
    st.floats(0.01, 6),
    st.floats(0, 6),
    st.floats(0, 20),
)
def test_a_single_group_of_many_tiles_is_cut_best(
    resident: int, missing: int, host: float, device: float, tile: float, exchange: float
) -> None:
    fixed = Fixed(exchange, 0.3, 0, tile, 0)
    group = Group(host, device, resident, missing, 1)
    found = balance([group], fixed)
    assert found.seconds <= min(ends([group], (cut,), fixed) for cut in range(group.tiles + 1)) * (1 + 1e-9)


def test_both_sides_end_together() -> None:
    group = Group(host=1, device=0.01, resident=0, missing=30, lacking=5)
    found = balance([group], PLAIN)  # the link moves one tile while the host computes two
    assert group.taken == 10
    assert found.host == 20
    assert found.device == pytest.approx(20.01)


def test_the_device_takes_resident_tiles_and_the_tiles_that_the_host_is_slowest_at() -> None:
    heavy = Group(host=8, device=0.1, resident=0, missing=8, lacking=1)
    light = Group(host=1, device=0.1, resident=4, missing=4, lacking=1)
    balance([heavy, light], PLAIN)
    assert (heavy.taken, light.taken) == (7, 4)


def test_a_host_that_gains_less_than_the_exchange_computes_nothing() -> None:
    group = Group(host=1, device=0.1, resident=6, missing=2, lacking=1)
    assert balance([group], PLAIN._replace(host=20)).host == 0
    assert group.taken == 8


def test_without_staging_nothing_is_moved() -> None:
    group = Group(host=1, device=0.1, resident=3, missing=5, lacking=2)
    balance([group], PLAIN._replace(tile=inf))
    assert group.taken == 3


def test_the_host_takes_resident_tiles_of_a_slow_device() -> None:
    group = Group(host=1, device=1, resident=10, missing=0, lacking=0)
    balance([group], PLAIN)
    assert group.taken == 5


@settings(max_examples=300)
@given(problems(), st.floats(0, 40))
def test_no_tile_is_moved_that_other_machines_would_wait_for(problem: Problem, floor: float) -> None:
    groups, fixed = problem
    balance(groups, fixed)
    moved = [max(0, group.taken - group.resident) for group in groups]
    found = balance(groups, fixed, floor)
    cuts = tuple(group.taken for group in groups)
    least = min(ends(groups, tried, fixed) for tried in product(*(range(g.tiles + 1) for g in groups)))
    link = fixed.fetch + fixed.tile if fixed.tile < inf else 0.0
    a_tile = max(max(group.host, link + group.device) for group in groups)
    assert ends(groups, cuts, fixed) <= max(least + a_tile, floor + 1e-9)
    assert found.seconds == pytest.approx(ends(groups, cuts, fixed))
    for group, before in zip(groups, moved, strict=True):
        now = max(0, group.taken - group.resident)
        assert now <= before
        assert not now or (found.host or fixed.host) + group.host > floor - 1e-9, "it could go back"
