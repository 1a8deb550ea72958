"""The replay's cache and link by hand, in Python and in the library: an expert has four tiles, and a tile
takes 5 seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import BACKGROUND_ORDERS
from pipeline.errors import PlanError
from pipeline.policies.costs import Landing
from pipeline.policies.view import ModelShape, Target
from pipeline.replay.cache import SimulatedCache
from pipeline.replay.compiled_cache import AnyCache, CompiledCache, compiled
from pipeline.replay.outcome import PhaseOutcome

SHAPE = ModelShape(layers=2, experts=6, tiles=4, top_k=1)
needs_library = pytest.mark.skipif(not compiled, reason="cache.c was not compiled")
kinds: list[type[AnyCache]] = []  # of the present test


@pytest.fixture(params=[SimulatedCache, pytest.param(CompiledCache, marks=needs_library)], autouse=True)
def kind(request: pytest.FixtureRequest) -> Iterator[None]:
    kinds.append(request.param)
    yield
    kinds.pop()


def made(capacity: int = 48, shape: ModelShape = SHAPE, fetch: float = 0.0) -> AnyCache:
    cache = kinds[-1](shape, capacity, 5.0, fetch)
    cache.counters = PhaseOutcome(shape.layers)
    return cache


def booked(counters: PhaseOutcome) -> dict[str, int]:
    """The counts of tiles that are not 0."""
    names = ("demanded", "predicted", "useful", "late", "wasted", "placed")
    return {name: count for name in names if (count := getattr(counters, name))}


def test_placed_tiles_are_resident_at_once_and_nothing_moves() -> None:
    cache, target = made(6), np.zeros((2, 6), np.int32)
    target[0, 1], target[1, 3] = 4, 2
    cache.place(target)
    cache.update(0.0)
    cache.update(100.0)
    assert cache.residency.tolist() == cache.target.tolist() == target.tolist()
    assert cache.counters == PhaseOutcome(2)
    cache.retarget([Target(1, 3, 1), Target(0, 0, 1)])  # room for one tile again
    assert cache.residency[1, 3] == 1
    with pytest.raises(PlanError, match="need 7 tiles, the cache holds 6"):
        cache.retarget([Target(0, 5, 1)])


@pytest.mark.parametrize(
    "target", [Target(-1, 0, 1), Target(2, 0, 1), Target(0, -1, 1), Target(0, 6, 1), Target(0, 0, -1)]
)
def test_targets_that_do_not_exist_are_refused(target: Target) -> None:
    with pytest.raises(PlanError, match="a target that does not exist"):
        made().retarget([target])


def test_background_tiles_land_one_after_the_other_from_their_order_on() -> None:
    """Ordered at 10: experts in their order, the earlier layer first."""
    cache = made()
    cache.retarget([Target(1, 0, 1), Target(0, 2, 2)])
    cache.advance(50.0)
    assert not cache.residency.any(), "nothing moves before it is ordered"
    cache.update(60.0)
    seen = []
    for now in (60.0, 64.9, 65.0, 70.0, 74.9, 75.0, 200.0):
        cache.advance(now)
        seen.append((int(cache.residency[0, 2]), int(cache.residency[1, 0])))
    assert seen == [(0, 0), (0, 0), (1, 0), (2, 0), (2, 0), (2, 1), (2, 1)]
    assert booked(cache.counters) == {"placed": 3}
    assert (cache.counters.link_busy, cache.free) == (15.0, 75.0)


def test_link_has_so_many_orders_in_the_background() -> None:
    shape = ModelShape(layers=1, experts=BACKGROUND_ORDERS + 2, tiles=1, top_k=1)
    cache = made(99, shape)
    cache.retarget([Target(0, expert, 1) for expert in range(shape.experts)])
    cache.update(0.0)
    cache.advance(1000.0)
    assert cache.residency.sum() == BACKGROUND_ORDERS
    cache.update(1000.0)
    cache.advance(2000.0)
    assert cache.residency.all()


def test_lowered_target_ends_its_order_behind_the_tile_that_moves() -> None:
    """The tile on the link lands without a place. The next order of the expert begins where it ends."""
    cache = made()
    cache.retarget([Target(0, 0, 4)])
    cache.update(0.0)
    cache.advance(7.0)  # one has landed, one moves
    cache.retarget([Target(0, 0, 1)])
    cache.advance(30.0)
    assert cache.residency[0, 0] == 1
    assert booked(cache.counters) == {"placed": 2}
    assert cache.counters.link_busy == 10.0
    cache.retarget([Target(0, 0, 3)])
    cache.update(30.0)
    cache.advance(40.0)
    assert cache.residency[0, 0] == 3
    assert booked(cache.counters) == {"placed": 4}


def test_order_within_its_lowered_target_goes_on() -> None:
    cache = made()
    cache.retarget([Target(0, 0, 2)])
    cache.update(0.0)
    cache.retarget([Target(0, 0, 3)])
    cache.retarget([Target(0, 0, 2)])
    cache.advance(10.0)
    assert cache.residency[0, 0] == 2


def test_predicted_tiles_are_useful_wasted_or_unused() -> None:
    """Four land; of those above the lowered target two are wasted, one is used, and one lands later."""
    cache = made()
    cache.retarget([Target(0, 0, 4)], predicted=True)
    cache.update(0.0)
    cache.advance(15.0)
    assert (cache.unused, booked(cache.counters)) == (3, {"predicted": 3})
    cache.used((0, 0), 4)
    assert (cache.unused, booked(cache.counters)) == (0, {"predicted": 3, "useful": 3})
    cache.advance(20.0)
    assert (cache.unused, booked(cache.counters)) == (1, {"predicted": 4, "useful": 3})
    cache.used((0, 0), 4)
    cache.used((0, 0), 4)  # its tiles are counted once
    assert (cache.unused, booked(cache.counters)) == (0, {"predicted": 4, "useful": 4})
    cache.retarget([Target(0, 0, 0)])
    assert booked(cache.counters) == {"predicted": 4, "useful": 4}


def test_evicted_predictions_are_wasted_tile_by_tile() -> None:
    cache = made()
    cache.retarget([Target(0, 0, 4)], predicted=True)
    cache.update(0.0)
    cache.advance(20.0)
    cache.retarget([Target(0, 0, 3)])
    assert (cache.unused, booked(cache.counters)) == (3, {"predicted": 4, "wasted": 1})
    cache.retarget([Target(0, 0, 0)])
    assert (cache.unused, booked(cache.counters)) == (0, {"predicted": 4, "wasted": 4})
    cache.used((0, 0), 4)
    assert booked(cache.counters) == {"predicted": 4, "wasted": 4}


def test_tiles_before_a_prediction_are_not_its_own() -> None:
    """Two tiles were resident; of the four two are predicted ones, and these are evicted first."""
    cache, target = made(), np.zeros((2, 6), np.int32)
    target[0, 0] = 2
    cache.place(target)
    cache.retarget([Target(0, 0, 4)], predicted=True)
    cache.update(0.0)
    cache.advance(10.0)
    assert cache.unused == 2
    cache.retarget([Target(0, 0, 1)])
    assert booked(cache.counters) == {"predicted": 2, "wasted": 2}


def test_prediction_that_is_dropped_in_flight_is_wasted() -> None:
    cache = made()
    cache.retarget([Target(0, 0, 4)], predicted=True)
    cache.update(0.0)
    cache.advance(1.0)
    cache.retarget([Target(0, 0, 0)])
    cache.advance(50.0)
    assert (cache.unused, booked(cache.counters)) == (0, {"predicted": 1, "wasted": 1})
    assert not cache.residency.any()


def test_prediction_that_was_dropped_is_not_late() -> None:
    cache = made()
    cache.retarget([Target(0, 0, 1)], predicted=True)
    cache.retarget([Target(0, 0, 0)])
    cache.demand(0, [(0, 0, 2)], 1.0)
    assert booked(cache.counters) == {"demanded": 2}


def test_prediction_is_booked_to_the_phase_that_made_it() -> None:
    cache = made()
    first, second = cache.counters, PhaseOutcome(2)
    cache.retarget([Target(0, 0, 1), Target(0, 1, 1), Target(0, 2, 2)], predicted=True)
    cache.update(0.0)
    cache.counters = second
    cache.advance(15.0)
    cache.used((0, 0), 4)
    cache.retarget([Target(0, 1, 0)])
    assert booked(first) == {"predicted": 3, "useful": 1, "wasted": 1}
    cache.demand(0, [(2, 1, 2)], 15.0)
    assert booked(second) == {"demanded": 1, "late": 1}
    assert (first.link_busy, second.link_busy) == (0.0, 20.0)


def test_demand_takes_its_own_tile_from_the_link_first() -> None:
    """Of (0, 0) the first tile lands at 5; the others follow, all on demand, and none moves twice."""
    cache = made()
    cache.retarget([Target(0, 0, 4)], predicted=True)
    cache.update(0.0)
    landings = cache.demand(0, [(0, 0, 4), (3, 2, 4)], 2.0)
    assert landings == [(0, 5.0), (0, 10.0), (0, 15.0), (0, 20.0), (3, 25.0), (3, 30.0)]
    assert cache.residency[0].tolist() == [4, 0, 0, 0, 0, 0], "tiles beyond a target are not kept"
    assert booked(cache.counters) == {"demanded": 6, "late": 4}
    assert (cache.counters.link_busy, cache.free, cache.unused) == (30.0, 30.0, 0)
    cache.update(100.0)
    cache.advance(200.0)
    assert cache.counters.link_busy == 30.0


def test_demand_follows_another_experts_tile() -> None:
    """The tile that moves lands first, at 5; the rest of its order waits for the demanded tiles."""
    cache = made()
    cache.retarget([Target(1, 5, 2), Target(0, 3, 1)])
    cache.update(0.0)
    cache.advance(6.0)  # (0, 3) has landed, the first tile of (1, 5) moves until 10
    assert cache.demand(1, [(0, 0, 1), (2, 3, 4)], 6.0) == [(0, 15.0), (2, 20.0)]
    assert cache.residency[1, 5] == 1
    cache.advance(24.9)
    assert cache.residency[1, 5] == 1
    cache.advance(25.0)
    assert cache.residency[1, 5] == 2
    assert booked(cache.counters) == {"demanded": 2, "placed": 3}


def test_idle_link_moves_demanded_tiles_from_now_on() -> None:
    cache = made()
    assert cache.demand(0, [(0, 0, 1)], 7.0) == [(0, 12.0)]
    assert cache.demand(0, [(1, 0, 1)], 8.0) == [(1, 17.0)], "behind the one before"


def test_prediction_extends_a_resident_part_and_is_counted_in_tiles() -> None:
    """Of (0, 0) tiles [0, 1) stay, [1, 4) are predicted; the device computes [0, 3), then one is evicted."""
    cache, target = made(), np.zeros((2, 6), np.int32)
    target[0, 0] = 1
    cache.place(target)
    cache.retarget([Target(0, 0, 4)], predicted=True)
    cache.update(0.0)
    assert cache.ordered[0, 0] == 4
    assert (cache.counters.wanted_experts, cache.counters.issued_experts) == (1, 1)
    cache.advance(15.0)
    cache.used((0, 0), 1)
    assert (cache.unused, booked(cache.counters)) == (3, {"predicted": 3}), "none of them was computed"
    cache.used((0, 0), 3)
    assert (cache.unused, booked(cache.counters)) == (1, {"predicted": 3, "useful": 2})
    cache.retarget([Target(0, 0, 1)])
    assert (cache.unused, booked(cache.counters)) == (0, {"predicted": 3, "useful": 2, "wasted": 1})
    cache.retarget([Target(0, 0, 2)])  # another target's tile is no prediction's
    cache.update(15.0)
    cache.advance(20.0)
    assert booked(cache.counters) == {"predicted": 3, "useful": 2, "wasted": 1, "placed": 1}
    cache.retarget([Target(0, 0, 2), Target(0, 0, 1)], predicted=True)  # no tile beyond the target
    assert (cache.counters.wanted_experts, cache.counters.issued_experts) == (1, 1)


def test_only_predicted_tiles_are_late() -> None:
    """Tiles [1, 3) were predicted and are under way; [1, 4) are demanded."""
    cache, target = made(), np.zeros((2, 6), np.int32)
    target[0, 0] = 1
    cache.place(target)
    cache.retarget([Target(0, 0, 3)], predicted=True)
    cache.update(0.0)
    assert cache.demand(0, [(0, 1, 4)], 1.0) == [(0, 5.0), (0, 10.0), (0, 15.0)]
    assert booked(cache.counters) == {"demanded": 3, "late": 2}


def test_prediction_that_shrinks_to_what_is_resident_ends() -> None:
    cache, target = made(), np.zeros((2, 6), np.int32)
    target[0, 0] = 2
    cache.place(target)
    cache.retarget([Target(0, 0, 4)], predicted=True)
    cache.retarget([Target(0, 0, 2)])
    cache.retarget([Target(0, 0, 3)])
    cache.update(0.0)
    cache.advance(5.0)
    assert (cache.counters.issued_experts, booked(cache.counters)) == (0, {"placed": 1})


def test_landing_of_a_dropped_prediction_that_another_target_keeps_is_a_placed_one() -> None:
    cache = made()
    cache.retarget([Target(0, 0, 4)], predicted=True)
    cache.update(0.0)
    cache.advance(1.0)
    cache.retarget([Target(0, 0, 0), Target(0, 0, 2)])
    cache.advance(5.0)
    assert (cache.residency[0, 0], booked(cache.counters)) == (1, {"placed": 1})


def test_each_order_begins_with_its_fetch() -> None:
    """2 seconds before the first tile of an order, also of a demanded one, and once for an order that waits
    behind another."""
    cache = made(fetch=2.0)
    cache.retarget([Target(0, 0, 2), Target(1, 0, 3)])
    cache.update(0.0)
    cache.advance(7.0)
    assert cache.residency[0, 0] == 1
    assert cache.demand(1, [(0, 0, 4), (3, 2, 4)], 8.0) == [
        *((0, 19.0), (0, 24.0), (0, 29.0)),  # behind the second tile of (0, 0), which lands at 12
        (0, 36.0),  # beyond its target: an order of its own
        *((3, 43.0), (3, 48.0)),
    ]
    assert cache.counters.link_busy == 8 * 5.0 + 4 * 2.0


def test_what_is_ordered_and_when_it_lands() -> None:
    """At 1, the first tile of (0, 2) is on the link until 7; the predicted order goes before its second."""
    cache = made(fetch=2.0)
    cache.retarget([Target(0, 2, 2), Target(1, 1, 1)])
    cache.update(0.0)
    cache.advance(1.0)
    cache.retarget([Target(0, 4, 1)], predicted=True)
    cache.update(1.0)
    assert cache.ordered.tolist() == [[0, 0, 2, 0, 1, 0], [0, 1, 0, 0, 0, 0]]
    assert cache.landing(0, 1.0) == [Landing(4, 1, 13.0), Landing(2, 2, 18.0)]
    assert cache.landing(1, 1.0) == [Landing(1, 1, 25.0)]
    assert cache.link_seconds(1.0) == 25.0
    cache.advance(26.0)
    assert (cache.landing(0, 26.0), cache.landing(1, 25.0)) == ([], [])
    assert (cache.link_seconds(26.0), cache.residency[1, 1]) == (0.0, 1)


def test_last_tile_on_the_link_lands_before_what_overtakes_the_rest() -> None:
    cache = made()
    cache.retarget([Target(0, 2, 1)])
    cache.update(0.0)
    cache.advance(1.0)
    cache.retarget([Target(0, 4, 1)], predicted=True)
    cache.update(1.0)
    assert cache.landing(0, 2.0) == [Landing(2, 1, 3.0), Landing(4, 1, 8.0)]


def test_what_a_lowered_target_drops_is_not_on_order() -> None:
    cache = made()
    cache.retarget([Target(0, 0, 4)])
    cache.update(0.0)
    cache.advance(7.0)
    cache.retarget([Target(0, 0, 2)])  # the second tile is on the link, and the order ends behind it
    assert (cache.ordered[0, 0], cache.landing(0, 7.0), cache.link_seconds(7.0)) == (1, [], 3.0)
    cache.demand(0, [(0, 1, 3)], 8.0)
    assert cache.ordered[0, 0] == cache.residency[0, 0] == 2


def state(cache: AnyCache, now: float) -> list[object]:
    arrays = [array.tolist() for array in (cache.residency, cache.target, cache.ordered)]
    landing = [cache.landing(layer, now) for layer in range(SHAPE.layers)]
    return [arrays, landing, cache.free, cache.unused, cache.predicted, cache.link_seconds(now)]


@needs_library
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), fetch=st.sampled_from([0.0, 2.0]), steps=st.integers(1, 60))
def test_library_does_the_same_call_by_call(seed: int, fetch: float, steps: int) -> None:
    """Also the exceptions, and the counts of the phase that predicted."""
    rng = np.random.default_rng(seed)
    both: list[AnyCache] = [SimulatedCache(SHAPE, 40, 5.0, fetch), CompiledCache(SHAPE, 40, 5.0, fetch)]
    phases = [[PhaseOutcome(2), PhaseOutcome(2)] for _ in both]
    placement, now = rng.integers(0, 4, (2, 6)).astype(np.int32), 0.0
    for cache, counters in zip(both, phases, strict=True):
        cache.counters = counters[0]
        cache.place(placement)
    for _ in range(steps):
        now += float(rng.exponential(6.0))
        phase, call, layer = (int(number) for number in rng.integers((2, 6, 2)))
        changes = [Target(*map(int, rng.integers((2, 6, 5)))) for _ in range(rng.integers(4))]
        experts = [int(expert) for expert in rng.permutation(6)[: rng.integers(1, 4)]]
        limits = [sorted(map(int, rng.integers(0, 5, 2))) for _ in experts]
        missing = [(e, lo, hi) for e, (lo, hi) in zip(experts, limits, strict=True) if lo < hi]
        answers: list[object] = []
        for cache, counters in zip(both, phases, strict=True):
            cache.counters = counters[phase]
            answer: object = None
            with suppress(PlanError):
                if call == 0:
                    answer = cache.demand(layer, missing, now)
                elif call == 1:
                    cache.used((layer, experts[0]), limits[0][1])
                elif call == 2:
                    cache.advance(now)
                elif call == 5:
                    cuts, rows = [hi for _, hi in limits], list(range(1, 1 + len(experts)))
                    seconds = {row: (9.0, 0.7 * row, 9.0) for row in rows}
                    assert cache.host_seconds(rows, cuts, seconds) == 9.0 * (4 * len(cuts) - sum(cuts))
                    answer = cache.compute(layer, experts, rows, cuts, seconds, 0.3, now, 1.0, 2.0)
                else:
                    cache.retarget(changes, predicted=call == 3)
                    answer = "no exception"
                cache.update(now)
            answers += [answer, state(cache, now)]
        assert answers[:2] == answers[2:]
        assert phases[0] == phases[1]
