"""The mover's orders, their sequence, and its counts of landed tiles, on a link on which the test lands the
tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pipeline.arrays import IntArray
from pipeline.counters import PhaseCounters
from pipeline.experts import mover as mover_module
from pipeline.experts.cache import ExpertCache
from pipeline.experts.mover import PLACED, PREDICTED, Mover, Order, Wanted
from pipeline.policies.view import Target
from workers.copiers import TileCopy

LAYERS, EXPERTS, TILES = 2, 4, 4


class ManualLink:
    """A link on which the test lands tiles, or says which order moves; a wait lands what moves."""

    up = True

    def __init__(self) -> None:
        self.sent: list[Order] = []
        self.moves: Order | None = None
        self.waits = 0
        self.check: Callable[[list[int]], None] = lambda slots: None  # called with the slots of each order

    def order(
        self, layer: int, expert: int, lo: int, slots: list[int], urgency: int, channels: IntArray | None
    ) -> Order:
        self.check(slots)
        self.sent.append(Order(len(self.sent), layer, expert, lo, slots, urgency, channels))
        return self.sent[-1]

    def land(self, order: Order, tiles: int) -> None:
        """So many more tiles of the order land."""
        order.landed += tiles
        order.final = order.landed >= order.size

    def moving(self, order: Order) -> bool:
        return order is self.moves and not order.final

    def cancel(self, order: Order) -> None:
        """The prefetcher acknowledges at once, unless a tile moves."""
        order.final = order is not self.moves

    def update(self, wait_ms: int) -> None:
        """Landings are set by the test."""

    def wait(self, order: Order, landed: int) -> None:
        self.waits += 1
        if not order.final:
            self.land(order, 1 if order.cancelled else order.size - order.landed)
            order.final = True

    def expert_orders(self) -> list[tuple[int, int]]:
        """(expert, urgency) of each order."""
        return [(order.expert, order.urgency) for order in self.sent]


class RecordingCopier:
    """Copies nothing. A copy's fence has been waited for by its stream."""

    def __init__(self, waited: set[object]) -> None:
        self.begun: list[list[TileCopy]] = []
        self.waiting: list[list[TileCopy]] = []
        self._waited = waited

    def begin(self, copies: Sequence[TileCopy]) -> list[TileCopy]:
        self.begun.append(list(copies))
        self._waited |= {copy.fence for copy in copies}
        return self.begun[-1]

    def ready(self, begun: list[TileCopy]) -> None:
        self.waiting.append(begun)

    def tiles(self) -> list[tuple[int, int]]:
        """(expert, tile) of each copy."""
        return [(copy.expert, copy.tile) for copies in self.begun for copy in copies]


class RecordingCache(ExpertCache):
    """Tracks the fence with which each slot was taken."""

    def take(self, count: int) -> list[tuple[int, object]]:
        taken = super().take(count)
        self.taken_with = getattr(self, "taken_with", {}) | dict(taken)
        return taken


class Parts:
    """A mover and what it uses."""

    def __init__(self, capacity: int, staging: int, each: bool = True) -> None:
        self.fences = 0
        self.waited: set[object] = {None}  # no fence: the slot has had no reader
        self.link, self.copier = ManualLink(), RecordingCopier(self.waited)
        cache = RecordingCache(LAYERS, EXPERTS, TILES, capacity, capacity + staging, self._fence)
        self.mover = Mover(cache, self.link, self.copier, wait=self.waited.add, each=each)

    def _fence(self) -> int:
        self.fences += 1
        return self.fences


def mover_of(capacity: int, staging: int) -> tuple[Mover, ManualLink, RecordingCopier]:
    parts = Parts(capacity, staging)
    return parts.mover, parts.link, parts.copier


def stream(mover: Mover, layer: int, *wanted: Wanted) -> list[tuple[int, int]]:
    return [(one.expert, one.tile) for group in mover.demand(layer, wanted) for one in group]


def held(mover: Mover) -> int:
    """Resident prefetched tiles that were neither used nor evicted."""
    return sum(len(prediction.unused) for prediction in mover._predicted.values())


def counted(counters: PhaseCounters) -> tuple[int, int, int]:
    return counters.predicted_tiles, counters.useful_tiles, counters.wasted_tiles


# --- order ----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("lost", [False, True])
def test_tile_that_moves_is_awaited_and_the_others_are_copied(monkeypatch, lost: bool) -> None:
    """Other experts' copies have begun meanwhile. Where the prefetcher exits it is copied, too."""
    mover, link, copier = mover_of(TILES, 4)
    mover.retarget([Target(0, 1, TILES)])
    mover.fetch_missing()
    link.moves = link.sent[0]
    if lost:
        monkeypatch.setattr(link, "wait", lambda order, landed: setattr(order, "final", True))
    tiles = mover.demand(0, [Wanted(1, 0, TILES), Wanted(2, 0, 1)])
    assert copier.tiles() == [(2, 0)]
    given = [(one.expert, one.tile) for group in tiles for one in group]
    first = [] if lost else [(1, 0)]
    rest = [(1, tile) for tile in range(len(first), TILES)]
    assert (given, copier.tiles()) == ([*first, (2, 0), *rest], [(2, 0), *rest])
    assert (mover.demanded, mover.cache.residency[0, 1]) == (TILES + 1, TILES)
    mover.cache.audit(idle=True)


@pytest.mark.parametrize(
    ("staging", "expected"), [(8, [6, 2]), (5, [3, 2, 3]), (4, [2, 2, 2, 2]), (2, [1] * 8), (1, [1] * 8)]
)
def test_a_gpu_gets_tiles_in_few_groups(staging: int, expected: list[int]) -> None:
    """Three quarters of those that wait, and so on; where these are more than slots are free, half as many as
    slots. A slot is free once its group was computed, and not before; of two slots or more, others are being
    filled meanwhile. On the device `cpu` each tile comes by itself."""
    parts = Parts(0, staging, each=False)
    wanted = [Wanted(0, 0, TILES), Wanted(1, 0, TILES)]
    sizes = []
    for group in parts.mover.demand(0, wanted):
        assert parts.mover.cache.free <= staging - len(group)
        assert len(parts.copier.waiting) == len(sizes) + 1
        sizes.append(len(group))
        assert len(parts.copier.begun) > len(sizes) or sum(sizes) == 2 * TILES or staging == 1
    assert (sizes, parts.fences) == (expected, 2 * TILES)
    one_by_one = Parts(0, staging)
    assert [len(group) for group in one_by_one.mover.demand(0, wanted)] == [1] * 2 * TILES
    parts.mover.cache.audit(idle=True)


# --- fences ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0, TILES])
def test_slot_is_written_only_after_its_last_readers_fence(capacity: int) -> None:
    """Slots of streamed tiles, evicted tiles and unwritten tiles, on demand and in the background."""
    parts = Parts(capacity, 1)
    mover, link = parts.mover, parts.link
    ordered: list[int] = []

    def check(slots: list[int]) -> None:
        ordered.extend(slots)
        assert {mover.cache.taken_with[slot] for slot in slots} <= parts.waited

    link.check = check
    for _ in range(2):
        stream(mover, 0, Wanted(0, 0, TILES), Wanted(1, 0, TILES))  # streamed
        if capacity:
            mover.retarget([Target(1, 2, TILES)])
            mover.update()
            link.land(link.sent[-1], 2)
            mover.retarget([Target(1, 2, 1)])  # cancelled: one tile unwritten, one not wanted
            mover.update()
            mover.retarget([Target(1, 2, 0)])  # evicted
    mover.cache.audit(idle=True)
    for copies in parts.copier.begun:
        check([copy.slot for copy in copies])
    assert len(ordered) > 3 * mover.cache.slots
    assert len(parts.waited) > len(ordered) - mover.cache.slots  # every slot but the first time


# --- predictions ----------------------------------------------------------------------------------------


def test_landed_tiles_beyond_the_demand_stay_as_the_target_keeps_them() -> None:
    """Of 4 predicted tiles 2 have landed and the third moves when [0, 2) is demanded."""
    mover, link, copier = mover_of(TILES, 3)
    mover.retarget([Target(0, 1, TILES)], predicted=True)
    mover.fetch_missing()
    link.land(link.sent[0], 2)
    link.moves = link.sent[0]
    assert stream(mover, 0, Wanted(1, 0, 2)) == [(1, 0), (1, 1)]
    assert (mover.demanded, copier.tiles()) == (2, [])
    assert (mover.counters.late_tiles, held(mover)) == (2, 0)
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


# --- limits and restarts --------------------------------------------------------------------------------


def test_so_many_background_orders_are_under_way_and_the_next_follows_one_that_ends(monkeypatch) -> None:
    monkeypatch.setattr(mover_module, "BACKGROUND_ORDERS", 3)
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


def test_without_a_prefetcher_nothing_is_ordered_and_demands_and_placements_are_copied() -> None:
    mover, link, copier = mover_of(TILES, 2)
    link.up = False
    mover.retarget([Target(0, 1, 2), Target(1, 0, 1)])
    mover.update()
    assert stream(mover, 0, Wanted(1, 0, 3), Wanted(2, 1, 2)) == [(1, 0), (1, 1), (1, 2), (2, 1)]
    mover.wait_idle()
    assert (link.sent, copier.tiles()[4:]) == ([], [(0, 0)])
    mover.retarget([Target(0, 1, 3)])
    link.up = True
    mover.update()
    assert link.expert_orders() == [(1, PLACED)]
