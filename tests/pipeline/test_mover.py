"""The mover on a real slab, beside a prefetcher that may exit at any tile: whatever is called, every demanded
tile is given once with its bytes, each READY slot holds exactly its tile, and in the end residency equals the
targets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pytest
from failing_prefetcher import NEVER
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

from pipeline.arrays import IntArray
from pipeline.counters import PhaseCounters
from pipeline.errors import PlanError
from pipeline.experts.mover import SPARE_SLOTS, Mover, Wanted
from pipeline.policies.view import Target

TILES, T = SHAPE.tiles, SHAPE.tile
PACES = {"unlimited link": None, "slow link": 0.006}  # GB/s: half a millisecond a tile


@pytest.fixture(scope="module", params=PACES.values(), ids=PACES.keys())
def parts(request, mover_store, tmp_path_factory) -> Iterator[MoverParts]:
    with mover_parts(tmp_path_factory.mktemp("move"), mover_store, SLOTS, request.param) as parts:
        yield parts


@pytest.fixture
def running(parts) -> MoverParts:
    """With a prefetcher that takes orders, and does not exit as an example may have asked for."""
    parts.prefetcher.start()
    parts.prefetcher.exit_after(NEVER, restarted=True)
    assert parts.link.wait_up(LIMIT)
    return parts


def wait_idle(parts: MoverParts, mover: Mover) -> None:
    mover.wait_idle()
    check_idle(parts, mover)


def chosen(seed: int, lo: int, hi: int) -> IntArray:
    """Some channels of tiles [lo, hi): of each tile none, a few or all."""
    random = np.random.default_rng(seed)
    share = random.choice([0.0, 0.2, 1.0], size=hi - lo).repeat(T)
    return (lo * T + np.flatnonzero(random.random(len(share)) < share)).astype(np.int32)


@dataclass(frozen=True)
class Predicted:
    targets: list[Target]


@dataclass(frozen=True)
class Channels:
    """Channels of a layer's experts are demanded, or those of one predicted."""

    layer: int
    experts: frozenset[int]
    seed: int
    predicted: bool


LAYER, EXPERTS = st.integers(0, 1), st.frozensets(st.integers(0, 2), min_size=1)
CALLS = st.one_of(
    RETARGET,
    DEMAND,
    st.builds(Predicted, RETARGET),
    st.builds(Channels, LAYER, EXPERTS, st.integers(0, 99), st.booleans()),
    st.sampled_from(["update", "update", "wait_idle", "phase", "kill", "start"]),
    st.tuples(st.just("exit"), st.integers(0, 12), st.booleans()),
)


@settings(max_examples=80, suppress_health_check=list(HealthCheck))
@example(
    capacity=18,
    staging=1,
    each=True,
    calls=[FULL, "update", (0, [5, 5, 5]), NONE, (1, [5, 5, 5]), FULL, "update"],
)
@example(
    capacity=2, staging=1, each=True, calls=[[Target(0, 0, 2)], "update", (0, [1, 0, 0]), (0, [2, 0, 0])]
)
@example(capacity=15, staging=1, each=False, calls=[FULL[:5], "update", "kill", (1, [5, 5, 5]), "wait_idle"])
@example(
    capacity=9,
    staging=7,
    each=False,
    calls=[Predicted([Target(0, 0, 3)]), "wait_idle", Predicted([Target(0, 0, 1), Target(0, 0, 4)])],
)
@example(capacity=0, staging=2, each=False, calls=[("exit", 3, True), (0, [5, 5, 5]), (1, [5, 5, 5])])
@given(
    capacity=st.integers(0, 16),
    staging=st.integers(1, 8),
    each=st.booleans(),
    calls=st.lists(CALLS, max_size=14),
)
def test_any_order_of_calls_and_exits(parts, capacity, staging, each, calls) -> None:
    prefetcher = parts.prefetcher
    prefetcher.start()
    assert parts.link.wait_up(LIMIT)
    mover = parts.mover(capacity, staging, each)
    now, other = mover.counters, PhaseCounters(SHAPE.layers)
    residency = mover.cache.residency
    for call in calls:
        match call:
            case "update":
                mover.update()
            case "phase":
                now, other = other, now
                mover.counters = now
            case "wait_idle":
                wait_idle(parts, mover)
            case "kill":
                prefetcher.kill()
            case "start":
                prefetcher.start()
            case ("exit", tiles, restarted):
                prefetcher.exit_after(tiles, restarted)
            case (int(layer), list(cuts)):
                wanted = missing(mover, layer, cuts)
                for expert, cut in enumerate(cuts):
                    if here := min(cut, residency[layer, expert]):
                        mover.used(layer, expert, here)
                demand(parts, mover, layer, wanted)
            case Channels(layer, experts, seed, predicted):
                mover.collect_landings()
                ranges = [(e, int(residency[layer, e])) for e in sorted(experts)]
                every = [Wanted(e, r, TILES, chosen(seed + e, r, TILES)) for e, r in ranges if r < TILES]
                for item in every if predicted else ():
                    mover.predict(layer, item.expert, item.channels)
                if not predicted:
                    demand(parts, mover, layer, every)
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


def test_demanded_tiles_within_the_target_stay_resident(running) -> None:
    """They are not copied a second time in the background."""
    mover = running.mover(TILES + 2, 2)
    mover.retarget([Target(0, 1, TILES), Target(0, 2, 2)])
    demand(running, mover, 0, missing(mover, 0, [1, TILES, 3]))
    assert mover.cache.residency[0].tolist() == [0, TILES, 2]
    wait_idle(running, mover)
    assert (mover.demanded, mover.placed) == (1 + TILES + 3, 0)


def test_predicted_channels_are_not_moved_again(running) -> None:
    mover = running.mover(0, 8)
    guessed = np.arange(0, 30, 2, dtype=np.int32)
    kept = np.array([0, 1, 2, 20, 28, 35], np.int32)
    mover.predict(1, 2, guessed)
    mover.predict(1, 0, guessed)  # not needed
    while not all(order.final for order in mover._guesses.values()):
        running.link.update(20)
    demand(running, mover, 1, [Wanted(2, 0, TILES, kept)])
    counted = mover.counters.channels
    assert (counted.guessed, counted.right) == (15, 4)
    wait_idle(running, mover)
    assert (counted.moved, counted.wasted) == (2 * len(guessed) + 2, len(guessed))


def test_predictions_leave_slots_to_demands(running) -> None:
    """And a prediction for which few slots are left gets its first channels."""
    mover = running.mover(0, 3 + SPARE_SLOTS)
    every = np.arange(SHAPE.padded, dtype=np.int32)
    mover.predict(0, 0, every[: 2 * T])
    mover.predict(0, 1, every)
    mover.predict(0, 2, every)
    assert mover.cache.free == SPARE_SLOTS
    assert [len(order.channels) for order in mover._guesses.values()] == [2 * T, T]
    demand(running, mover, 0, [Wanted(expert, 0, TILES, every) for expert in (0, 1, 2)])
    wait_idle(running, mover)


def test_predictions_of_a_layer_that_needs_nothing_are_dropped(running) -> None:
    mover = running.mover(0, 6)
    mover.predict(0, 0, np.arange(4, dtype=np.int32))
    mover.predict(1, 0, np.arange(4, dtype=np.int32))
    assert list(mover.demand(0, [])) == []
    assert list(mover._guesses) == [(1, 0)]
    assert list(mover.demand(1, [])) == []
    wait_idle(running, mover)
