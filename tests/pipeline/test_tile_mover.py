"""The tile mover with all that it stands on: whatever is asked in whatever order, each slot it names holds
exactly the tile it says, and in the end residency is the target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from moving_parts import SLOTS, Parts, moving_parts, random_store

from pipeline.counters import PhaseCounters
from pipeline.errors import PlanError
from pipeline.experts.shares import Missing
from pipeline.experts.tile_mover import TileMover
from pipeline.policies.view import Target
from shm.layout import ExpertShape
from shm.store import Store

SHAPE = ExpertShape(layers=2, experts=3, hidden=32, intermediate=38, tile=8)  # 5 tiles of 3072 bytes
TILES = SHAPE.tiles
EVERY = [(layer, expert) for layer in range(SHAPE.layers) for expert in range(SHAPE.experts)]
PACES = {"full speed": None, "a slow link": 0.006}  # GB/s: half a millisecond a tile


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with random_store(SHAPE, "test_tile_mover") as store:
        yield store


@pytest.fixture(scope="module", params=PACES.values(), ids=PACES.keys())
def parts(request, store, tmp_path_factory) -> Iterator[Parts]:
    with moving_parts(tmp_path_factory.mktemp("move"), store, SLOTS, request.param) as parts:
        yield parts


def check_slots(parts: Parts, mover: TileMover) -> None:
    """The books are right and every READY slot holds its tile."""
    mover.cache.audit()
    for layer, expert in EVERY:
        slots = mover.cache.slots_of(layer, expert)
        assert len(slots) == mover.cache.residency[layer, expert] <= mover.cache.target[layer, expert]
        for tile, slot in enumerate(slots):
            assert parts.holds(slot, layer, expert, tile)


def demand(parts: Parts, mover: TileMover, layer: int, wanted: list[Missing]) -> None:
    """Stream, and check each tile when it is yielded: an expert's come in their order."""
    due = {item.expert: list(range(item.lo, item.hi)) for item in wanted}
    left: list[Missing] = []
    for expert, slot in mover.stream(layer, wanted, left):
        assert parts.holds(slot, layer, expert, due[expert].pop(0))
        check_slots(parts, mover)
    assert not any(due.values())
    assert left == []


def settle(parts: Parts, mover: TileMover) -> None:
    mover.settle()
    assert np.array_equal(mover.cache.residency, mover.cache.target)
    assert mover.cache.free == mover.cache.slots - mover.cache.target.sum()
    check_slots(parts, mover)


def missing(mover: TileMover, layer: int, cuts: list[int]) -> list[Missing]:
    """What the device lacks for these cuts, as the engine asks for it."""
    residency = mover.cache.residency[layer].tolist()
    return [Missing(e, r, p) for e, (r, p) in enumerate(zip(residency, cuts, strict=True)) if r < p]


@dataclass(frozen=True)
class Predicted:
    targets: list[Target]


RETARGET = st.lists(
    st.builds(Target, st.integers(0, 1), st.integers(0, 2), st.integers(0, TILES)), min_size=1, max_size=6
)
PREDICT = st.builds(Predicted, RETARGET)
DEMAND = st.tuples(st.integers(0, 1), st.lists(st.integers(0, TILES), min_size=3, max_size=3))
UPDATE = st.sampled_from(["update", "update", "settle", "phase"])
FULL = [Target(layer, expert, 3) for layer, expert in EVERY]
NONE = [Target(layer, expert, 0) for layer, expert in EVERY]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@example(
    capacity=18, staging=1, orders=[FULL, "update", (0, [5, 5, 5]), NONE, (1, [5, 5, 5]), FULL, "update"]
)
@example(capacity=18, staging=1, orders=[FULL, "update", NONE, "update", FULL, "update", (1, [0, 5, 4])])
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
            case "settle":
                settle(parts, mover)
            case tuple((layer, cuts)):
                wanted = missing(mover, layer, cuts)
                for expert, cut in enumerate(cuts):
                    if cut and mover.cache.residency[layer, expert]:
                        mover.used(layer, expert)
                demand(parts, mover, layer, wanted)
            case Predicted(targets):
                with suppress(PlanError):
                    mover.retarget(targets, predicted=True)
            case list(targets):
                before = mover.cache.target.copy()
                try:
                    mover.retarget(targets)
                except PlanError:  # more than the capacity
                    assert np.array_equal(mover.cache.target, before)
        check_slots(parts, mover)
    settle(parts, mover)
    mover.retarget(NONE)  # nothing of this example is under way in the next
    settle(parts, mover)
    for counted in (now, other):
        assert counted.predicted_tiles == counted.useful_tiles + counted.wasted_tiles


def test_what_comes_of_a_prediction_counts_where_it_was_made(parts) -> None:
    mover = parts.mover(2 * TILES, 1)
    before, after = mover.counters, PhaseCounters(SHAPE.layers)
    mover.retarget([Target(0, 0, TILES), Target(0, 1, TILES)], predicted=True)
    mover.counters = after
    settle(parts, mover)
    mover.used(0, 0)
    mover.retarget([Target(0, 1, 0)])
    assert (before.predicted_tiles, before.useful_tiles, before.wasted_tiles) == (2 * TILES, TILES, TILES)
    assert (after.predicted_tiles, after.useful_tiles, after.wasted_tiles) == (0, 0, 0)
    settle(parts, mover)


def test_what_prediction_brought_is_of_use_or_wasted(parts) -> None:
    """Of three predicted experts one is used, one dropped, and one demanded before it was ordered."""
    mover = parts.mover(3 * TILES, 3)
    mover.retarget([Target(0, 0, TILES), Target(0, 1, TILES)], predicted=True)
    settle(parts, mover)
    mover.retarget([Target(1, 2, TILES)], predicted=True)
    mover.used(0, 0)
    mover.used(0, 0)
    demand(parts, mover, 1, missing(mover, 1, [0, 0, TILES]))
    mover.retarget([Target(0, 1, 0)])
    counted = mover.counters
    assert (counted.predicted_tiles, counted.useful_tiles, counted.wasted_tiles) == (2 * TILES, TILES, TILES)
    assert counted.late_tiles == TILES
    settle(parts, mover)


def test_a_dropped_prediction_counts_where_it_was_made(parts) -> None:
    """What of it was under way lands in another phase, and is no more of use."""
    mover = parts.mover(3 * TILES, 3)
    before, after = mover.counters, PhaseCounters(SHAPE.layers)
    mover.retarget([Target(0, expert, TILES) for expert in range(3)], predicted=True)
    mover.order_lacking()
    mover.counters = after
    mover.retarget([Target(0, expert, 0) for expert in range(3)])
    settle(parts, mover)
    assert before.predicted_tiles == before.wasted_tiles
    assert after.predicted_tiles == after.wasted_tiles == 0


def test_a_cache_of_nothing_streams_through_one_slot(parts) -> None:
    mover = parts.mover(0, 1)
    for _ in range(2):
        demand(parts, mover, 1, missing(mover, 1, [TILES] * 3))
    assert mover.demanded == 2 * 3 * TILES
    assert mover.placed == 0
    settle(parts, mover)


def test_a_demand_that_the_target_wants_stays(parts) -> None:
    """Placed by the step's own fetch; nothing is fetched a second time."""
    mover = parts.mover(TILES + 2, 2)
    mover.retarget([Target(0, 1, TILES), Target(0, 2, 2)])
    demand(parts, mover, 0, missing(mover, 0, [1, TILES, 3]))
    assert mover.cache.residency[0].tolist() == [0, TILES, 2]
    settle(parts, mover)
    assert (mover.demanded, mover.placed) == (1 + TILES + 3, 0)


def test_a_demand_for_what_is_being_placed(parts) -> None:
    """Its background order has left; the demand takes its place, and the residency still comes."""
    mover = parts.mover(15, 3)
    mover.retarget([Target(1, expert, TILES) for expert in range(3)])
    mover.update()
    demand(parts, mover, 1, missing(mover, 1, [0, TILES, 2]))
    settle(parts, mover)
    assert mover.cache.residency[1].tolist() == [TILES] * 3


def test_a_target_that_shrinks_truncates_what_is_under_way(parts) -> None:
    mover = parts.mover(10, 2)
    mover.retarget([Target(0, 0, TILES), Target(1, 2, TILES)])
    mover.update()
    mover.retarget([Target(0, 0, 1), Target(1, 2, 0)])
    settle(parts, mover)
    mover.retarget([Target(0, 0, TILES)])
    settle(parts, mover)


def test_a_demand_finds_a_slot_while_all_are_being_placed(parts) -> None:
    """Orders that were cancelled and not yet acknowledged hold all slots but one, a new order has that one:
    one of them has to make room."""
    mover = parts.mover(15, 1)
    mover.retarget([Target(0, expert, TILES) for expert in range(3)])
    mover.update()
    mover.retarget([*(Target(0, expert, 0) for expert in range(3)), Target(1, 0, TILES)])
    assert mover.cache.free == 1
    mover.update()
    demand(parts, mover, 1, missing(mover, 1, [0, TILES, TILES]))
    settle(parts, mover)
    assert mover.cache.residency.tolist() == [[0, 0, 0], [TILES, 0, 0]]
