"""The tile mover while its prefetcher exits and is restarted: the cache stays consistent, each READY slot
holds exactly its tile, and tiles that cannot be fetched are handed back."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mover_parts import (
    DEMAND,
    FULL,
    LIMIT,
    NONE,
    RETARGET,
    SHAPE,
    SLOTS,
    MoverParts,
    check_idle,
    check_slots,
    demand,
    missing,
    mover_parts,
    retarget,
)
from pipeline.experts.tile_mover import TileMover

from pipeline.policies.view import Target

TILES = SHAPE.tiles


@pytest.fixture
def parts(mover_store, tmp_path) -> Iterator[MoverParts]:
    with mover_parts(tmp_path, mover_store, SLOTS) as parts:
        yield parts


@pytest.fixture(scope="module")
def shared_parts(mover_store, tmp_path_factory) -> Iterator[MoverParts]:
    with mover_parts(tmp_path_factory.mktemp("restarts"), mover_store, SLOTS) as parts:
        yield parts


def wait_idle(parts: MoverParts, mover: TileMover) -> None:
    parts.prefetcher.start()
    deadline = time.monotonic() + LIMIT
    while not mover.wait_idle():  # a new incarnation may take longer than the mover's limit
        assert time.monotonic() < deadline
    check_idle(parts, mover)


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
def test_any_order_of_calls_and_exits(shared_parts, capacity, staging, calls) -> None:
    parts, prefetcher = shared_parts, shared_parts.prefetcher
    prefetcher.start()
    assert parts.link.wait_up(LIMIT)
    mover = parts.mover(capacity, staging)
    for call in calls:
        match call:
            case "update":
                mover.update()
            case "wait_idle":
                wait_idle(parts, mover)
            case "kill":
                prefetcher.kill()
            case "start":
                prefetcher.start()
            case tuple((int(tiles), bool(restarted))):
                prefetcher.exit_after(tiles, restarted)
            case tuple((layer, list(cuts))):
                demand(parts, mover, layer, missing(mover, layer, cuts))
            case list(targets):
                retarget(mover, targets)
        check_slots(parts, mover)
    wait_idle(parts, mover)
    mover.retarget(NONE)  # the next example begins with an idle prefetcher
    wait_idle(parts, mover)


def wait_down(parts: MoverParts, mover: TileMover) -> None:
    while parts.link.up:
        parts.link.update(20)
    mover.update()


@pytest.mark.parametrize("tiles", [0, 1, TILES, TILES + 2])
def test_exit_during_a_demand_hands_back_the_unfetched_tiles(parts, tiles) -> None:
    """A half-written tile is neither yielded nor kept. Tiles that landed just before the exit may be lost or
    not."""
    mover = parts.mover(2 * TILES, 3)
    mover.retarget([Target(0, 0, TILES), Target(0, 1, TILES)])
    parts.prefetcher.exit_after(tiles, restarted=False)
    unfetched = demand(parts, mover, 0, missing(mover, 0, [TILES, TILES, 4]))
    assert mover.demanded + sum(item.hi - item.lo for item in unfetched) == 2 * TILES + 4
    assert mover.demanded <= tiles
    assert mover.cache.residency.sum() == mover.demanded
    wait_idle(parts, mover)
    assert mover.cache.residency[0].tolist() == [TILES, TILES, 0]


def test_demand_without_a_prefetcher_is_handed_back(parts) -> None:
    mover = parts.mover(2 * TILES, 3)
    mover.retarget([Target(0, 0, 3)])
    wait_idle(parts, mover)
    parts.prefetcher.kill()
    wait_down(parts, mover)
    mover.retarget([Target(0, 1, 4)])
    mover.update()
    assert mover.idle
    assert mover.cache.free == mover.cache.slots - 3
    wanted = missing(mover, 0, [TILES, 2, TILES])
    assert demand(parts, mover, 0, wanted) == wanted
    assert mover.cache.residency[0].tolist() == [3, 0, 0]  # resident tiles stay usable
    wait_idle(parts, mover)
    assert mover.cache.residency[0].tolist() == [3, 4, 0]


def test_background_orders_are_repeated_after_a_restart(parts) -> None:
    mover = parts.mover(3 * TILES, 1)
    parts.prefetcher.exit_after(TILES + 2, restarted=False)
    mover.retarget([Target(1, expert, TILES) for expert in range(3)])
    mover.update()
    wait_down(parts, mover)
    assert mover.idle
    assert mover.cache.free == 1 + 3 * TILES - mover.cache.residency.sum()
    assert mover.cache.residency.sum() <= TILES + 2
    check_slots(parts, mover)
    parts.prefetcher.start()
    assert parts.link.wait_up(LIMIT)
    mover.update()
    assert not mover.idle
    wait_idle(parts, mover)
    assert mover.demanded == 0


def test_wait_idle_gives_up_on_a_restart_after_its_limit(parts) -> None:
    mover = parts.mover(TILES, 1, restart_limit=0.3)
    parts.prefetcher.exit_after(2, restarted=False)
    mover.retarget([Target(0, 0, TILES)])
    assert not mover.wait_idle()
    check_slots(parts, mover)
    assert not parts.link.up
    parts.prefetcher.start()
    parts.prefetcher.exit_after(1, restarted=True)
    wait_idle(parts, mover)


def test_wait_idle_survives_repeated_exits_over_the_first_tile(parts) -> None:
    mover = parts.mover(TILES, 1)
    mover.retarget([Target(0, 0, TILES)])
    for _ in range(4):
        parts.prefetcher.exit_after(0, restarted=True)
        demand(parts, mover, 0, missing(mover, 0, [TILES, 0, 0]))
        parts.prefetcher.start()
        assert parts.link.wait_up(LIMIT)
    wait_idle(parts, mover)
