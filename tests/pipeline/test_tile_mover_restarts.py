"""The tile mover while its prefetcher exits and is restarted: the cache stays consistent, each READY slot
holds exactly its tile, and tiles that cannot be fetched are handed back."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from failing_prefetcher import FailingPrefetcher, failing_parts
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mover_parts import LIMIT, SLOTS, MoverParts, check_idle, check_slots, demand, missing, random_store

from pipeline.errors import PlanError
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
    with random_store(SHAPE, "test_tile_mover_restarts") as store:
        yield store


@pytest.fixture
def scene(store, tmp_path) -> Iterator[tuple[MoverParts, FailingPrefetcher]]:
    with failing_parts(tmp_path, store, SLOTS) as scene:
        yield scene


@pytest.fixture(scope="module")
def shared_scene(store, tmp_path_factory) -> Iterator[tuple[MoverParts, FailingPrefetcher]]:
    with failing_parts(tmp_path_factory.mktemp("restarts"), store, SLOTS) as scene:
        yield scene


def wait_idle(parts: MoverParts, prefetcher: FailingPrefetcher, mover: TileMover) -> None:
    prefetcher.start()
    deadline = time.monotonic() + LIMIT
    while not mover.wait_idle():  # a new incarnation may take longer than the mover's limit
        assert time.monotonic() < deadline
    check_idle(parts, mover)


RETARGET = st.lists(
    st.builds(Target, st.integers(0, 1), st.integers(0, 2), st.integers(0, TILES)), min_size=1, max_size=6
)
DEMAND = st.tuples(st.integers(0, 1), st.lists(st.integers(0, TILES), min_size=3, max_size=3))
CALLS = st.sampled_from(["update", "update", "wait_idle", "kill", "start"])
EXIT_AFTER = st.tuples(st.integers(0, 12), st.booleans())


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@example(capacity=18, staging=1, calls=[(2, False), FULL, "update", (0, [5, 5, 5]), "start", (1, [5, 5, 5])])
@example(capacity=0, staging=2, calls=[(3, True), (0, [5, 5, 5]), (1, [5, 5, 5])])
@example(capacity=15, staging=1, calls=[FULL[:5], "update", "kill", (1, [5, 5, 5]), "wait_idle"])
@given(
    capacity=st.integers(0, 20),
    staging=st.integers(1, 4),
    calls=st.lists(st.one_of(RETARGET, DEMAND, CALLS, EXIT_AFTER), max_size=14),
)
def test_any_order_of_calls_and_exits(shared_scene, capacity, staging, calls) -> None:
    parts, prefetcher = shared_scene
    prefetcher.start()
    assert parts.link.wait_up(LIMIT)
    mover = parts.mover(capacity, staging)
    for call in calls:
        match call:
            case "update":
                mover.update()
            case "wait_idle":
                wait_idle(parts, prefetcher, mover)
            case "kill":
                prefetcher.kill()
            case "start":
                prefetcher.start()
            case tuple((int(tiles), bool(restarted))):
                prefetcher.exit_after(tiles, restarted)
            case tuple((layer, list(cuts))):
                demand(parts, mover, layer, missing(mover, layer, cuts))
            case list(targets):
                before = mover.cache.target.copy()
                try:
                    mover.retarget(targets)
                except PlanError:  # more than the capacity
                    assert np.array_equal(mover.cache.target, before)
        check_slots(parts, mover)
    wait_idle(parts, prefetcher, mover)
    mover.retarget(NONE)  # the next example begins with an idle prefetcher
    wait_idle(parts, prefetcher, mover)


def wait_down(parts: MoverParts, mover: TileMover) -> None:
    while parts.link.up:
        parts.link.update(20)
    mover.update()


@pytest.mark.parametrize("tiles", [0, 1, TILES, TILES + 2])
def test_exit_during_a_demand_hands_back_the_unfetched_tiles(scene, tiles) -> None:
    """A half-written tile is neither yielded nor kept. Tiles that landed just before the exit may be lost or
    not."""
    parts, prefetcher = scene
    mover = parts.mover(2 * TILES, 3)
    mover.retarget([Target(0, 0, TILES), Target(0, 1, TILES)])
    prefetcher.exit_after(tiles, restarted=False)
    unfetched = demand(parts, mover, 0, missing(mover, 0, [TILES, TILES, 4]))
    assert mover.demanded + sum(item.hi - item.lo for item in unfetched) == 2 * TILES + 4
    assert mover.demanded <= tiles
    assert mover.cache.residency.sum() == mover.demanded
    wait_idle(parts, prefetcher, mover)
    assert mover.cache.residency[0].tolist() == [TILES, TILES, 0]


def test_demand_without_a_prefetcher_is_handed_back(scene) -> None:
    parts, prefetcher = scene
    mover = parts.mover(2 * TILES, 3)
    mover.retarget([Target(0, 0, 3)])
    wait_idle(parts, prefetcher, mover)
    prefetcher.kill()
    wait_down(parts, mover)
    mover.retarget([Target(0, 1, 4)])
    mover.update()
    assert mover.idle
    assert mover.cache.free == mover.cache.slots - 3
    wanted = missing(mover, 0, [TILES, 2, TILES])
    assert demand(parts, mover, 0, wanted) == wanted
    assert mover.cache.residency[0].tolist() == [3, 0, 0]  # resident tiles stay usable
    wait_idle(parts, prefetcher, mover)
    assert mover.cache.residency[0].tolist() == [3, 4, 0]


def test_background_orders_are_repeated_after_a_restart(scene) -> None:
    parts, prefetcher = scene
    mover = parts.mover(3 * TILES, 1)
    prefetcher.exit_after(TILES + 2, restarted=False)
    mover.retarget([Target(1, expert, TILES) for expert in range(3)])
    mover.update()
    wait_down(parts, mover)
    assert mover.idle
    assert mover.cache.free == 1 + 3 * TILES - mover.cache.residency.sum()
    assert mover.cache.residency.sum() <= TILES + 2
    check_slots(parts, mover)
    prefetcher.start()
    assert parts.link.wait_up(LIMIT)
    mover.update()
    assert not mover.idle
    wait_idle(parts, prefetcher, mover)
    assert mover.demanded == 0


def test_wait_idle_gives_up_on_a_restart_after_its_limit(scene) -> None:
    parts, prefetcher = scene
    mover = parts.mover(TILES, 1, restart_limit=0.3)
    prefetcher.exit_after(2, restarted=False)
    mover.retarget([Target(0, 0, TILES)])
    assert not mover.wait_idle()
    check_slots(parts, mover)
    assert not parts.link.up
    prefetcher.start()
    prefetcher.exit_after(1, restarted=True)
    wait_idle(parts, prefetcher, mover)


def test_wait_idle_survives_repeated_exits_over_the_first_tile(scene) -> None:
    parts, prefetcher = scene
    mover = parts.mover(TILES, 1)
    mover.retarget([Target(0, 0, TILES)])
    for _ in range(4):
        prefetcher.exit_after(0, restarted=True)
        demand(parts, mover, 0, missing(mover, 0, [TILES, 0, 0]))
        prefetcher.start()
        assert parts.link.wait_up(LIMIT)
    wait_idle(parts, prefetcher, mover)
