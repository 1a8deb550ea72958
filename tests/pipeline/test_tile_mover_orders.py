"""The tile mover's orders, their sequence, and its counts of landed tiles, on a link on which the test lands
the tiles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pipeline.experts.demand_stream import DemandStream
from pipeline.experts.expert_cache import ExpertCache
from pipeline.experts.fetch_link import DEMANDED, PLACED, PREDICTED, Order
from pipeline.experts.tile_mover import RESTART_LIMIT, TileMover

from pipeline.counters import PhaseCounters
from pipeline.device.cpu import CpuDevice
from pipeline.experts import tile_mover
from pipeline.experts.shares import Missing
from pipeline.policies.view import Target

LAYERS, EXPERTS, TILES = 2, 4, 4


class ManualLink:
    """A fetch link on which the test lands tiles; a wait lands all ordered tiles."""

    up = True
    landings = None  # all are reported

    def __init__(self) -> None:
        self.sent: list[Order] = []
        self.tiles: dict[int, int] = {}  # of an order that was demanded: so many of its tiles
        self.check: Callable[[list[int]], None] = lambda slots: None  # called with the slots of each order

    def order(self, layer: int, expert: int, lo: int, slots: list[int], urgency: int) -> Order:
        self.check(slots)
        self.sent.append(Order(len(self.sent), layer, expert, lo, slots, urgency))
        return self.sent[-1]

    def land(self, order: Order, tiles: int) -> None:
        """So many more tiles of the order land."""
        order.landed += tiles
        order.final = order.landed >= self.tiles.get(order.id, len(order.slots))

    def demand(self, order: Order, tiles: int) -> None:
        order.urgency, order.reach = DEMANDED, tiles
        self.tiles[order.id] = tiles
        self.land(order, 0)

    def cancel(self, order: Order) -> None:
        """The prefetcher acknowledges at once."""
        order.cancelled = order.final = True
        order.reach = order.landed

    def update(self, wait_ms: int) -> None:
        """Landings are set by the test."""

    def wait(self, order: Order, landed: int) -> None:
        if not order.final:
            self.land(order, self.tiles.get(order.id, len(order.slots)) - order.landed)

    def expert_orders(self) -> list[tuple[int, int]]:
        """(expert, urgency) of each order."""
        return [(order.expert, order.urgency) for order in self.sent]


class FencingDevice(CpuDevice):
    """Records the fences that were waited for."""

    def __init__(self) -> None:
        self.fences = 0
        self.waited: set[object] = {None}  # no fence: the slot has had no reader

    def fence(self) -> int:
        self.fences += 1
        return self.fences

    def wait(self, fence: object) -> None:
        self.waited.add(fence)


class RecordingCache(ExpertCache):
    """Tracks the fence with which each slot was taken."""

    def take(self, count: int) -> list[tuple[int, object]]:
        taken = super().take(count)
        self.taken_with = getattr(self, "taken_with", {}) | dict(taken)
        return taken


def mover_of(capacity: int, staging: int) -> tuple[TileMover, ManualLink, FencingDevice]:
    link, device = ManualLink(), FencingDevice()
    cache = RecordingCache(LAYERS, EXPERTS, TILES, capacity, capacity + staging, device.fence)
    return TileMover(cache, link, device), link, device


def stream(mover: TileMover, layer: int, *missing: Missing) -> list[tuple[int, int]]:
    unfetched: list[Missing] = []
    streamed = [tile for group in DemandStream(mover, layer, missing, unfetched).groups() for tile in group]
    assert unfetched == []
    return streamed


def held(mover: TileMover) -> int:
    """Resident prefetched tiles that were neither used nor evicted."""
    return sum(len(prediction.unused) for prediction in mover._predicted.values())


def counted(counters: PhaseCounters) -> tuple[int, int, int]:
    return counters.predicted_tiles, counters.useful_tiles, counters.wasted_tiles


# --- order ----------------------------------------------------------------------------------------------


def test_predicted_tiles_are_ordered_before_placed_ones() -> None:
    mover, link, _ = mover_of(3 * TILES, 1)
    mover.retarget([Target(0, 0, TILES), Target(0, 1, TILES)])
    mover.retarget([Target(1, 2, TILES)], predicted=True)
    mover.fetch_missing()
    assert link.expert_orders() == [(2, PREDICTED), (0, PLACED), (1, PLACED)]


def test_predicted_tiles_get_the_slots_before_placed_ones() -> None:
    """Where both are waiting and too few slots are free."""
    mover, link, _ = mover_of(2 * TILES, 1)
    mover.retarget([Target(0, 0, TILES), Target(0, 1, TILES)])
    mover.fetch_missing()
    first, second = link.sent
    link.land(first, TILES)
    mover.retarget([Target(0, 0, 0), Target(0, 1, 0)])  # the second order still has its slots
    mover.retarget([Target(0, 2, TILES)])
    mover.retarget([Target(0, 3, TILES)], predicted=True)
    assert second.cancelled
    mover.update()
    assert link.expert_orders()[2:] == [(3, PREDICTED), (2, PLACED)]


def test_demand_takes_over_a_background_order() -> None:
    mover, link, _ = mover_of(TILES, 1)
    mover.retarget([Target(0, 1, TILES)])
    mover.fetch_missing()
    (background,) = link.sent
    link.land(background, 3)
    assert stream(mover, 0, Missing(1, 0, TILES)) == [(1, slot) for slot in background.slots]
    assert (link.sent, background.urgency, link.tiles) == ([background], DEMANDED, {0: TILES})
    assert (mover.cache.residency[0, 1], mover.idle) == (TILES, True)


def groups(mover: TileMover, *missing: Missing) -> list[list[int]]:
    """The experts of the tiles that come together."""
    return [[expert for expert, _ in group] for group in DemandStream(mover, 0, missing, []).groups()]


@pytest.mark.parametrize(
    ("staging", "expected"), [(8, [[0] * 4 + [1, 1], [1, 1]]), (2, [[0, 0]] * 2 + [[1, 1]] * 2)]
)
def test_a_gpu_gets_landed_tiles_together(monkeypatch, staging: int, expected: list[list[int]]) -> None:
    """Three quarters and then the rest; each by itself on the device `cpu`; where other tiles wait for their
    slots, all that have landed. A slot is free once its group was computed, and not before."""
    mover, _, device = mover_of(0, staging)
    wanted = Missing(0, 0, TILES), Missing(1, 0, TILES)
    assert groups(mover, *wanted) == [[0]] * TILES + [[1]] * TILES
    monkeypatch.setattr(device, "on_host", False)
    before = device.fences
    assert groups(mover, *wanted) == expected
    assert device.fences - before == 2 * TILES
    for group in DemandStream(mover, 0, wanted, []).groups():
        assert mover.cache.free <= staging - len(group)
    mover.cache.audit(idle=True)


# --- fences ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0, TILES])
def test_slot_is_ordered_only_after_its_last_readers_fence(capacity: int) -> None:
    """Slots of streamed tiles, evicted tiles and unwritten tiles, on demand and in the background."""
    mover, link, device = mover_of(capacity, 1)
    ordered: list[int] = []

    def check(slots: list[int]) -> None:
        ordered.extend(slots)
        assert {mover.cache.taken_with[slot] for slot in slots} <= device.waited

    link.check = check
    for _ in range(2):
        stream(mover, 0, Missing(0, 0, TILES), Missing(1, 0, TILES))  # streamed
        if capacity:
            mover.retarget([Target(1, 2, TILES)])
            mover.update()
            link.land(link.sent[-1], 2)
            mover.retarget([Target(1, 2, 1)])  # cancelled: one tile unwritten, one not wanted
            mover.update()
            mover.retarget([Target(1, 2, 0)])  # evicted
    mover.cache.audit(idle=True)
    assert len(ordered) > 3 * mover.cache.slots
    assert len(device.waited) > len(ordered) - mover.cache.slots  # every slot but the first time


# --- predictions ----------------------------------------------------------------------------------------


def test_landed_tiles_beyond_the_demand_stay_as_the_target_keeps_them() -> None:
    """Of 4 predicted tiles 3 have landed when [0, 2) is demanded."""
    mover, link, _ = mover_of(TILES, 1)
    mover.retarget([Target(0, 1, TILES)], predicted=True)
    mover.fetch_missing()
    link.land(link.sent[0], 3)
    stream(mover, 0, Missing(1, 0, 2))
    assert (mover.demanded, mover.counters.late_tiles, held(mover)) == (2, 2, 0)
    mover.collect_landings()
    assert (mover.cache.residency[0, 1], mover.idle) == (3, True)
    assert counted(mover.counters) == (0, 0, 0)


def test_predicted_tiles_are_useful_wasted_or_held() -> None:
    """3 of 4 predicted tiles have landed and were booked; one is evicted, the others are used."""
    mover, link, _ = mover_of(TILES, 1)
    mover.retarget([Target(0, 1, TILES)], predicted=True)
    mover.fetch_missing()
    link.land(link.sent[0], 3)
    mover.collect_landings()
    assert (counted(mover.counters), held(mover)) == ((3, 0, 0), 3)
    mover.retarget([Target(0, 1, 2)])
    assert (counted(mover.counters), held(mover)) == ((3, 0, 1), 2)
    mover.used(0, 1, TILES)
    assert (counted(mover.counters), held(mover)) == ((3, 2, 1), 0)
    mover.retarget([Target(0, 1, 0)])
    assert counted(mover.counters) == (3, 2, 1)


def test_landings_of_a_dropped_prediction_are_wasted_in_its_phase() -> None:
    mover, link, _ = mover_of(TILES, 1)
    before, after = mover.counters, PhaseCounters(LAYERS)
    mover.retarget([Target(0, 1, TILES)], predicted=True)
    mover.fetch_missing()
    mover.counters = after
    link.land(link.sent[0], 3)
    mover.retarget([Target(0, 1, 0)])
    mover.collect_landings()
    assert (counted(before), counted(after), mover.placed) == ((3, 0, 3), (0, 0, 0), 3)


def test_dropped_predictions_tiles_that_another_target_keeps_are_not_predicted() -> None:
    mover, link, _ = mover_of(TILES, 1)
    mover.retarget([Target(0, 1, TILES)], predicted=True)
    mover.fetch_missing()
    mover.retarget([Target(0, 1, 0)])
    mover.retarget([Target(0, 1, TILES)])
    link.sent[0].landed = 2  # before the prefetcher received the cancel
    mover.collect_landings()
    assert mover.cache.residency[0, 1] == 2
    assert (counted(mover.counters), held(mover)) == ((0, 0, 0), 0)


def test_prediction_extends_a_resident_part_and_is_counted_in_tiles() -> None:
    """Of (0, 1) tile 0 stays; [1, 4) are predicted, [0, 3) computed, and [1, 4) evicted."""
    mover, link, _ = mover_of(TILES, 1)
    mover.retarget([Target(0, 1, 1)])
    mover.update()
    link.land(link.sent[0], 1)
    mover.collect_landings()
    mover.retarget([Target(0, 1, TILES)], predicted=True)
    mover.fetch_missing()
    assert link.sent[1].lo == mover.cache.residency[0, 1] == 1
    assert mover.ordered[0, 1] == TILES
    assert (mover.counters.wanted_experts, mover.counters.issued_experts) == (1, 1)
    link.land(link.sent[1], 3)
    mover.collect_landings()
    mover.used(0, 1, 1)
    assert (counted(mover.counters), held(mover)) == ((3, 0, 0), 3)
    mover.used(0, 1, 3)
    assert (counted(mover.counters), held(mover)) == ((3, 2, 0), 1)
    mover.retarget([Target(0, 1, 1)])
    assert (counted(mover.counters), held(mover)) == ((3, 2, 1), 0)
    mover.retarget([Target(0, 1, 2)])  # another target's tile is no prediction's
    mover.fetch_missing()
    assert link.expert_orders()[2:] == [(1, PLACED)]
    mover.retarget([Target(0, 1, 2), Target(0, 2, 0)], predicted=True)  # no tile beyond the target
    assert (mover.counters.wanted_experts, mover.counters.issued_experts) == (1, 1)


def test_only_predicted_tiles_are_late() -> None:
    """Tiles [0, 2) are predicted and under way; [0, 3) are demanded."""
    mover, _, _ = mover_of(TILES, TILES)
    mover.retarget([Target(0, 1, 2)], predicted=True)
    mover.fetch_missing()
    stream(mover, 0, Missing(1, 0, 3))
    assert (mover.demanded, mover.counters.late_tiles) == (3, 2)
    assert mover.ordered[0, 1] == mover.cache.residency[0, 1] == 2


def test_tiles_behind_an_earlier_demand_are_ordered_anew() -> None:
    """A demand of [0, 2) ends the order of [0, 4): the next demand does not wait for its other tiles."""
    mover, link, _ = mover_of(TILES, TILES)
    mover.retarget([Target(0, 1, TILES)])
    mover.update()
    assert len(stream(mover, 0, Missing(1, 0, 2))) == 2
    assert mover.ordered[0, 1] == 2
    assert len(stream(mover, 0, Missing(1, 2, 4))) == 2
    assert [(order.lo, len(order.slots)) for order in link.sent] == [(0, 4), (2, 2)]


def test_ordered_follows_orders_cancellations_and_demands() -> None:
    mover, link, _ = mover_of(2 * TILES, TILES)
    mover.retarget([Target(0, 1, 3), Target(1, 2, 2)])
    assert not mover.ordered.any()
    mover.update()
    assert (mover.ordered[0, 1], mover.ordered[1, 2], mover.ordered.sum()) == (3, 2, 5)
    link.land(link.sent[0], 1)
    mover.collect_landings()
    mover.retarget([Target(0, 1, 2)])  # the order would bring a tile too many: it ends
    assert mover.ordered[0, 1] == mover.cache.residency[0, 1] == 1
    streaming = DemandStream(mover, 1, [Missing(2, 0, 3), Missing(3, 0, 1)], []).groups()
    assert mover.ordered[1].tolist() == [0, 0, 2, 0]
    list(streaming)
    assert mover.ordered[1].tolist() == mover.cache.residency[1].tolist() == [0, 0, 2, 0]


# --- limits and restarts --------------------------------------------------------------------------------


def test_order_is_cancelled_only_where_it_fetches_beyond_the_target() -> None:
    mover, link, _ = mover_of(2 * TILES, 1)
    mover.retarget([Target(0, 1, 3)])
    mover.fetch_missing()
    (order,) = link.sent
    for tiles in (TILES, 3):
        mover.retarget([Target(0, 1, tiles)])
        assert not order.cancelled
    mover.retarget([Target(0, 2, 0)])  # another expert's
    assert not order.cancelled
    mover.retarget([Target(0, 1, 2)])
    assert order.cancelled


def test_so_many_background_orders_are_under_way_and_the_next_follows_one_that_ends(monkeypatch) -> None:
    monkeypatch.setattr(tile_mover, "BACKGROUND_ORDERS", 3)
    mover, link, _ = mover_of(LAYERS * EXPERTS, 1)
    mover.retarget([Target(layer, expert, 1) for layer in range(LAYERS) for expert in range(EXPERTS)])
    mover.update()
    mover.update()
    assert [(order.layer, order.expert) for order in link.sent] == [(0, 0), (0, 1), (0, 2)]
    link.land(link.sent[1], 1)
    mover.fetch_missing()
    assert len(link.sent) == 3  # its landing is not booked
    mover.update()
    assert [(order.layer, order.expert) for order in link.sent[3:]] == [(0, 3)]
    assert mover.placed == 1


@pytest.mark.parametrize("limit", [None, 0.25])
def test_wait_for_a_restart_has_the_movers_limit(limit: float | None) -> None:
    link, device = ManualLink(), FencingDevice()
    cache = ExpertCache(LAYERS, EXPERTS, TILES, TILES, TILES + 1, device.fence)
    limits = {} if limit is None else {"restart_limit": limit}
    mover = TileMover(cache, link, device, **limits)
    waited: list[float] = []

    def wait_up(seconds: float) -> bool:
        waited.append(seconds)
        link.up = len(waited) == 2
        return link.up

    link.up, link.wait_up = False, wait_up
    mover.retarget([Target(0, 1, TILES)])
    assert not mover.wait_idle()
    assert mover.wait_idle()  # the prefetcher starts within the limit
    assert waited == [RESTART_LIMIT if limit is None else limit] * 2
    assert (mover.idle, mover.placed, cache.residency[0, 1]) == (True, TILES, TILES)


def test_nothing_is_ordered_while_the_prefetcher_is_down_and_all_after_it() -> None:
    mover, link, _ = mover_of(TILES, 2)
    link.up = False
    mover.retarget([Target(0, 1, 2)])
    mover.update()
    unfetched: list[Missing] = []
    assert list(DemandStream(mover, 0, [Missing(1, 0, 3), Missing(2, 1, 2)], unfetched).groups()) == []
    assert (unfetched, link.sent) == ([Missing(1, 0, 3), Missing(2, 1, 2)], [])
    link.up = True
    mover.poll_prefetcher()
    assert link.expert_orders() == [(1, PLACED)]  # nothing of the demand is left


def test_tiles_behind_lost_ones_are_not_given_where_a_new_prefetcher_brings_them(monkeypatch) -> None:
    """What is computed of an expert is a prefix of its tiles; other experts' tiles are given."""
    mover, link, _ = mover_of(0, 2)
    wait = link.wait

    def lost(order: Order, landed: int) -> None:
        if order is link.sent[0]:
            order.final = True  # its prefetcher has exited, and the next one is up at once
        wait(order, landed)

    monkeypatch.setattr(link, "wait", lost)
    unfetched: list[Missing] = []
    given = [
        expert
        for group in DemandStream(mover, 0, [Missing(1, 0, TILES), Missing(2, 1, 3)], unfetched).groups()
        for expert, _ in group or ()
    ]
    assert given == [2, 2]
    assert unfetched == [Missing(1, 0, 2), Missing(1, 2, TILES)]
    mover.cache.audit(idle=True)
