"""The tile mover while its prefetcher dies and comes back: whatever was under way, the cache's books are
right, each slot it names holds exactly the tile it says, and what cannot come is handed back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mortal_prefetcher import Lives, mortal_parts
from moving_parts import LIMIT, SLOTS, Parts, random_store

from pipeline.errors import PlanError
from pipeline.experts.shares import Missing
from pipeline.experts.tile_mover import TileMover
from pipeline.policies.view import Target
from shm.layout import ExpertShape
from shm.store import Store

SHAPE = ExpertShape(layers=2, experts=3, hidden=32, intermediate=38, tile=8)  # 5 tiles
TILES = SHAPE.tiles
EVERY = [(layer, expert) for layer in range(SHAPE.layers) for expert in range(SHAPE.experts)]
FULL = [Target(layer, expert, 3) for layer, expert in EVERY]
NONE = [Target(layer, expert, 0) for layer, expert in EVERY]


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with random_store(SHAPE, "test_prefetcher_lives") as store:
        yield store


@pytest.fixture
def scene(store, tmp_path) -> Iterator[tuple[Parts, Lives]]:
    with mortal_parts(tmp_path, store, SLOTS) as scene:
        yield scene


@pytest.fixture(scope="module")
def shared_scene(store, tmp_path_factory) -> Iterator[tuple[Parts, Lives]]:
    with mortal_parts(tmp_path_factory.mktemp("lives"), store, SLOTS) as scene:
        yield scene


def check_slots(parts: Parts, mover: TileMover) -> None:
    """The books are right and every READY slot holds its tile: residency is a prefix."""
    mover.cache.audit()
    for layer, expert in EVERY:
        slots = mover.cache.slots_of(layer, expert)
        assert len(slots) == mover.cache.residency[layer, expert] <= mover.cache.target[layer, expert]
        for tile, slot in enumerate(slots):
            assert parts.holds(slot, layer, expert, tile)


def missing(mover: TileMover, layer: int, cuts: list[int]) -> list[Missing]:
    """What the device lacks for these cuts, as the engine asks for it."""
    residency = mover.cache.residency[layer].tolist()
    return [Missing(e, r, p) for e, (r, p) in enumerate(zip(residency, cuts, strict=True)) if r < p]


def demand(parts: Parts, mover: TileMover, layer: int, wanted: list[Missing]) -> list[Missing]:
    """Stream, and check each tile when it is yielded; what was handed back. Together they are all that was
    wanted, each tile once, and of each expert the last ones are those handed back."""
    due = {item.expert: item.lo for item in wanted}
    left: list[Missing] = []
    for expert, slot in mover.stream(layer, wanted, left):
        assert parts.holds(slot, layer, expert, due[expert])
        due[expert] += 1
        check_slots(parts, mover)
    for item in sorted(left, key=lambda item: (item.expert, item.lo)):
        assert item.lo == due[item.expert] < item.hi
        due[item.expert] = item.hi
    assert due == {item.expert: item.hi for item in wanted}
    return left


def settle(parts: Parts, lives: Lives, mover: TileMover) -> None:
    lives.begin()  # somebody is there, or will be
    mover.settle()
    assert np.array_equal(mover.cache.residency, mover.cache.target)
    assert mover.cache.free == mover.cache.slots - mover.cache.target.sum()
    check_slots(parts, mover)


RETARGET = st.lists(
    st.builds(Target, st.integers(0, 1), st.integers(0, 2), st.integers(0, TILES)), min_size=1, max_size=6
)
DEMAND = st.tuples(st.integers(0, 1), st.lists(st.integers(0, TILES), min_size=3, max_size=3))
CALLS = st.sampled_from(["update", "update", "settle", "kill", "begin"])
DOOM = st.tuples(st.integers(0, 12), st.booleans())


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@example(capacity=18, staging=1, calls=[(2, False), FULL, "update", (0, [5, 5, 5]), "begin", (1, [5, 5, 5])])
@example(capacity=0, staging=2, calls=[(3, True), (0, [5, 5, 5]), (1, [5, 5, 5])])
@example(capacity=15, staging=1, calls=[FULL[:5], "update", "kill", (1, [5, 5, 5]), "settle"])
@given(
    capacity=st.integers(0, 20),
    staging=st.integers(1, 4),
    calls=st.lists(st.one_of(RETARGET, DEMAND, CALLS, DOOM), max_size=14),
)
def test_any_order_of_calls_and_deaths(shared_scene, capacity, staging, calls) -> None:
    parts, lives = shared_scene
    lives.begin()
    assert parts.link.wait_up(LIMIT)
    mover = parts.mover(capacity, staging)
    for call in calls:
        match call:
            case "update":
                mover.update()
            case "settle":
                settle(parts, lives, mover)
            case "kill":
                lives.kill()
            case "begin":
                lives.begin()
            case tuple((int(tiles), bool(heir))):
                lives.doom(tiles, heir)
            case tuple((layer, list(cuts))):
                demand(parts, mover, layer, missing(mover, layer, cuts))
            case list(targets):
                before = mover.cache.target.copy()
                try:
                    mover.retarget(targets)
                except PlanError:  # more than the capacity
                    assert np.array_equal(mover.cache.target, before)
        check_slots(parts, mover)
    settle(parts, lives, mover)
    mover.retarget(NONE)  # nothing of this example is under way in the next
    settle(parts, lives, mover)


def wait_down(parts: Parts, mover: TileMover) -> None:
    while parts.link.up:
        parts.link.update(20)
    mover.update()


@pytest.mark.parametrize("tiles", [0, 1, TILES, TILES + 2])
def test_a_death_in_a_demand_hands_back_what_has_not_come(scene, tiles) -> None:
    """The tile at hand is half written: it is neither yielded nor kept. What landed just before the death may
    be heard of or not."""
    parts, lives = scene
    mover = parts.mover(2 * TILES, 3)
    mover.retarget([Target(0, 0, TILES), Target(0, 1, TILES)])
    lives.doom(tiles, heir=False)
    left = demand(parts, mover, 0, missing(mover, 0, [TILES, TILES, 4]))
    assert mover.demanded + sum(item.hi - item.lo for item in left) == 2 * TILES + 4
    assert mover.demanded <= tiles
    assert mover.cache.residency.sum() == mover.demanded
    settle(parts, lives, mover)
    assert mover.cache.residency[0].tolist() == [TILES, TILES, 0]


def test_without_a_prefetcher_nothing_is_ordered_and_all_is_handed_back(scene) -> None:
    parts, lives = scene
    mover = parts.mover(2 * TILES, 3)
    mover.retarget([Target(0, 0, 3)])
    settle(parts, lives, mover)
    lives.kill()
    wait_down(parts, mover)
    mover.retarget([Target(0, 1, 4)])
    mover.update()
    assert not mover.moving
    assert mover.cache.free == mover.cache.slots - 3
    wanted = missing(mover, 0, [TILES, 2, TILES])
    assert demand(parts, mover, 0, wanted) == wanted
    assert mover.cache.residency[0].tolist() == [3, 0, 0]  # what is there stays of use
    settle(parts, lives, mover)
    assert mover.cache.residency[0].tolist() == [3, 4, 0]


def test_background_orders_are_freed_and_asked_for_again(scene) -> None:
    parts, lives = scene
    mover = parts.mover(3 * TILES, 1)
    lives.doom(TILES + 2, heir=False)
    mover.retarget([Target(1, expert, TILES) for expert in range(3)])
    mover.update()
    wait_down(parts, mover)
    assert not mover.moving
    assert mover.cache.free == 1 + 3 * TILES - mover.cache.residency.sum()
    assert mover.cache.residency.sum() <= TILES + 2
    check_slots(parts, mover)
    lives.begin()
    assert parts.link.wait_up(LIMIT)
    mover.update()
    assert mover.moving
    settle(parts, lives, mover)
    assert mover.demanded == 0


def test_settling_waits_for_a_successor_and_not_for_ever(scene, monkeypatch) -> None:
    monkeypatch.setattr("pipeline.experts.tile_mover.COME_LIMIT", 0.3)
    parts, lives = scene
    mover = parts.mover(TILES, 1)
    lives.doom(2, heir=False)
    mover.retarget([Target(0, 0, TILES)])
    assert not mover.settle()
    check_slots(parts, mover)
    monkeypatch.setattr("pipeline.experts.tile_mover.COME_LIMIT", LIMIT)
    lives.begin()
    lives.doom(1, heir=True)
    settle(parts, lives, mover)


def test_one_that_never_lands_a_tile_is_outlived(scene) -> None:
    """Several deaths over the very first tile, each with an heir: settling goes on."""
    parts, lives = scene
    mover = parts.mover(TILES, 1)
    mover.retarget([Target(0, 0, TILES)])
    for _ in range(4):
        lives.doom(0, heir=True)
        demand(parts, mover, 0, missing(mover, 0, [TILES, 0, 0]))
        lives.begin()
        assert parts.link.wait_up(LIMIT)
    settle(parts, lives, mover)
