"""The tile mover on a real link and slab: after any order of calls each READY slot holds exactly its tile,
and in the end residency equals the targets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mover_parts import (
    DEMAND,
    FULL,
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
from pipeline.experts.demand_stream import DemandStream
from pipeline.experts.tile_mover import TileMover

from pipeline.counters import PhaseCounters
from pipeline.errors import PlanError
from pipeline.experts.shares import Missing
from pipeline.policies.view import Target

TILES = SHAPE.tiles
PACES = {"unlimited link": None, "slow link": 0.006}  # GB/s: half a millisecond a tile


@pytest.fixture(scope="module", params=PACES.values(), ids=PACES.keys())
def parts(request, mover_store, tmp_path_factory) -> Iterator[MoverParts]:
    with mover_parts(tmp_path_factory.mktemp("move"), mover_store, SLOTS, request.param) as parts:
        yield parts


def wait_idle(parts: MoverParts, mover: TileMover) -> None:
    assert mover.wait_idle()
    check_idle(parts, mover)


@dataclass(frozen=True)
class Predicted:
    targets: list[Target]


PREDICT = st.builds(Predicted, RETARGET)
UPDATE = st.sampled_from(["update", "update", "wait_idle", "phase"])


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@example(
    capacity=18, staging=1, orders=[FULL, "update", (0, [5, 5, 5]), NONE, (1, [5, 5, 5]), FULL, "update"]
)
@example(capacity=18, staging=1, orders=[FULL, "update", NONE, "update", FULL, "update", (1, [0, 5, 4])])
@example(
    capacity=1,
    staging=1,
    orders=[Predicted([Target(0, 1, 1)]), "wait_idle", [Target(0, 1, 1), Target(0, 1, 0)]],
)
@example(capacity=2, staging=1, orders=[[Target(0, 0, 2)], "update", (0, [1, 0, 0]), (0, [2, 0, 0])])
@given(
    capacity=st.integers(0, 20),
    staging=st.integers(1, 4),
    orders=st.lists(st.one_of(RETARGET, PREDICT, DEMAND, UPDATE), max_size=12),
)
def test_any_order_of_calls(parts, capacity, staging, orders) -> None:
    mover = parts.mover(capacity, staging)
    now, other = mover.counters, PhaseCounters(SHAPE.layers)
    for order in orders:
        match order:
            case "update":
                mover.update()
            case "phase":
                now, other = other, now
                mover.counters = now
            case "wait_idle":
                wait_idle(parts, mover)
            case tuple((layer, cuts)):
                wanted = missing(mover, layer, cuts)
                for expert, cut in enumerate(cuts):
                    if here := min(cut, mover.cache.residency[layer, expert]):
                        mover.used(layer, expert, here)
                assert demand(parts, mover, layer, wanted) == []
            case Predicted(targets):
                with suppress(PlanError):
                    mover.retarget(targets, predicted=True)
            case list(targets):
                retarget(mover, targets)
        check_slots(parts, mover)
    wait_idle(parts, mover)
    mover.retarget(NONE)  # the next example begins with an idle prefetcher
    wait_idle(parts, mover)
    for counted in (now, other):
        assert counted.predicted_tiles == counted.useful_tiles + counted.wasted_tiles


def test_prediction_counts_in_the_phase_that_made_it(parts) -> None:
    mover = parts.mover(2 * TILES, 1)
    before, after = mover.counters, PhaseCounters(SHAPE.layers)
    mover.retarget([Target(0, 0, TILES), Target(0, 1, TILES)], predicted=True)
    mover.counters = after
    wait_idle(parts, mover)
    mover.used(0, 0, TILES)
    mover.retarget([Target(0, 1, 0)])
    assert (before.predicted_tiles, before.useful_tiles, before.wasted_tiles) == (2 * TILES, TILES, TILES)
    assert (after.predicted_tiles, after.useful_tiles, after.wasted_tiles) == (0, 0, 0)
    wait_idle(parts, mover)


def test_predicted_tiles_are_useful_wasted_or_late(parts) -> None:
    """Of three predicted experts one is used, one evicted, and one demanded before it was ordered."""
    mover = parts.mover(3 * TILES, 3)
    mover.retarget([Target(0, 0, TILES), Target(0, 1, TILES)], predicted=True)
    wait_idle(parts, mover)
    mover.retarget([Target(1, 2, TILES)], predicted=True)
    mover.used(0, 0, TILES)
    mover.used(0, 0, TILES)
    assert demand(parts, mover, 1, missing(mover, 1, [0, 0, TILES])) == []
    mover.retarget([Target(0, 1, 0)])
    counted = mover.counters
    assert (counted.predicted_tiles, counted.useful_tiles, counted.wasted_tiles) == (2 * TILES, TILES, TILES)
    assert counted.late_tiles == TILES
    wait_idle(parts, mover)


def test_empty_cache_streams_through_one_slot(parts) -> None:
    mover = parts.mover(0, 1)
    for _ in range(2):
        assert demand(parts, mover, 1, missing(mover, 1, [TILES] * 3)) == []
    assert mover.demanded == 2 * 3 * TILES
    assert mover.placed == 0
    wait_idle(parts, mover)


def test_demanded_tiles_within_the_target_stay_resident(parts) -> None:
    """Demanded tiles are not fetched a second time in the background."""
    mover = parts.mover(TILES + 2, 2)
    mover.retarget([Target(0, 1, TILES), Target(0, 2, 2)])
    assert demand(parts, mover, 0, missing(mover, 0, [1, TILES, 3])) == []
    assert mover.cache.residency[0].tolist() == [0, TILES, 2]
    wait_idle(parts, mover)
    assert (mover.demanded, mover.placed) == (1 + TILES + 3, 0)


def test_demand_for_tiles_with_a_background_order(parts) -> None:
    """The demand replaces the background order, and the residency still reaches its target."""
    mover = parts.mover(15, 3)
    mover.retarget([Target(1, expert, TILES) for expert in range(3)])
    mover.update()
    assert demand(parts, mover, 1, missing(mover, 1, [0, TILES, 2])) == []
    wait_idle(parts, mover)
    assert mover.cache.residency[1].tolist() == [TILES] * 3


def test_shrunk_target_truncates_the_background_order(parts) -> None:
    mover = parts.mover(10, 2)
    mover.retarget([Target(0, 0, TILES), Target(1, 2, TILES)])
    mover.update()
    mover.retarget([Target(0, 0, 1), Target(1, 2, 0)])
    wait_idle(parts, mover)
    mover.retarget([Target(0, 0, TILES)])
    wait_idle(parts, mover)


def test_demand_truncates_a_background_order_for_its_slots(parts) -> None:
    """Cancelled orders that were not yet acknowledged hold all slots but one, and a new order has that
    one."""
    mover = parts.mover(15, 1)
    mover.retarget([Target(0, expert, TILES) for expert in range(3)])
    mover.update()
    mover.retarget([*(Target(0, expert, 0) for expert in range(3)), Target(1, 0, TILES)])
    assert mover.cache.free == 1
    mover.update()
    assert demand(parts, mover, 1, missing(mover, 1, [0, TILES, TILES])) == []
    wait_idle(parts, mover)
    assert mover.cache.residency.tolist() == [[0, 0, 0], [TILES, 0, 0]]


def test_policies_see_a_demand_although_an_earlier_order_of_its_expert_ends(parts) -> None:
    """The earlier order was cancelled and holds a slot until it is truncated, which the demand waits for."""
    mover = parts.mover(2, 1)
    mover.retarget([Target(1, 1, 2)])
    mover.update()
    mover.retarget([Target(1, 1, 0)])
    mover.retarget([Target(1, 1, 2)])
    assert not mover.idle
    mover.begin_demand(1, {1: Missing(1, 0, TILES)})
    assert mover.ordered[1, 1] == 2
    mover.stop_background_order()
    assert mover.ordered[1, 1] == 2
    mover.end_demand()
    assert mover.ordered[1, 1] == mover.cache.residency[1, 1]
    wait_idle(parts, mover)


def test_tiles_that_have_landed_while_others_wait_for_slots_are_given_together(parts, monkeypatch) -> None:
    """To a device whose launches cost more than tiles."""
    monkeypatch.setattr(type(parts.device), "on_host", False)
    mover, unfetched, groups = parts.mover(0, 4), list[Missing](), list[int]()
    due = dict.fromkeys(range(3), 0)

    def land() -> None:
        while mover.link.under_way():
            mover.link.update(5)

    landing = DemandStream(mover, 1, missing(mover, 1, [TILES] * 3), unfetched).groups()
    land()
    for group in landing:
        for expert, slot in group:
            assert parts.holds(slot, 1, expert, due[expert])
            due[expert] += 1
        groups.append(len(group))
        land()
    assert unfetched == []
    assert sum(groups) == 3 * TILES
    assert len(groups) <= 6  # of four slots each, and one more where the last quarter begins
    wait_idle(parts, mover)
