"""The prefetcher as a real process, on a real store and a real slab."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest
from child_harness import SHAPE, Child, Surroundings, surroundings

from protocol.messages import (
    AttachSlab,
    CancelFetch,
    DemandFetch,
    Fetch,
    Fetched,
    Gather,
    I32Vector,
    SlabAttached,
)
from shm.layout import Bytes
from shm.segment import unlink
from shm.slab import Slab
from shm.store import Store, store_name
from workers import prefetcher
from workers.child_endpoint import ChildEndpoint
from workers.lifetime import EXIT_PARENT_GONE
from workers.prefetcher import CopyLoop

SLOTS = 3 * SHAPE.tiles
UNTOUCHED = 0xAB
TILE_SECONDS = 0.02  # one tile over the paced link


@dataclass(frozen=True)
class Link:
    """A prefetcher with its slab attached."""

    place: Surroundings
    child: Child
    store: Store
    slab: Slab

    def send(self, *messages: object) -> None:
        for message in messages:
            self.place.send(self.child, message)

    def reports(self, *orders: int) -> list[Fetched]:
        """All reports until the final ones of these orders."""
        reports: list[Fetched] = []
        while {f.id for f in reports if f.final} != set(orders):
            reports.append(self.place.expect(Fetched))
            assert reports[-1].incarnation == self.child.incarnation
        return reports

    def holds(self, order: Fetch, landed: int | None = None) -> bool:
        """Whether the first `landed` tiles of an order (all of them) are in their slots, and no others."""
        landed = len(order.slots) if landed is None else landed
        for index, slot in enumerate(order.slots):
            tile = order.lo + index
            expected = self.store.tiles(order.layer, order.expert, tile, tile + 1)
            if index >= landed:
                expected = np.full_like(expected, UNTOUCHED)
            if not np.array_equal(self.slab.slot(slot), expected):
                return False
        return True


@pytest.fixture
def slab(fingerprint: str) -> Iterator[Slab]:
    name = f"/tandem-test-slab-{uuid.uuid4().hex[:12]}"
    with Store.attach(store_name(fingerprint)) as store:
        slab = Slab.create(name, SLOTS, store.layout.tile_bytes)
    slab.segment.array[:] = UNTOUCHED
    yield slab
    slab.close()
    unlink(name)


@pytest.fixture
def place(fingerprint: str) -> Iterator[Surroundings]:
    with surroundings("prefetcher", fingerprint) as place:
        yield place


@pytest.fixture
def link(place: Surroundings, slab: Slab, request: pytest.FixtureRequest) -> Iterator[Link]:
    """Unpaced, or with the mark `paced` one tile in TILE_SECONDS."""
    gbps = slab.slot_bytes / TILE_SECONDS / 1e9 if getattr(request, "param", False) else None
    child = place.start(link_gbps=gbps)
    (ready,) = place.ready().values()
    assert (ready.role, ready.pid, ready.fingerprint) == ("prefetcher", child.process.pid, place.fingerprint)
    place.send(child, AttachSlab("shm", slab.segment.name.encode(), 0, slab.slots, slab.slot_bytes))
    assert place.expect(SlabAttached) == SlabAttached(child.incarnation, ())
    with Store.attach(store_name(place.fingerprint)) as store:
        yield Link(place, child, store, slab)


paced = pytest.mark.parametrize("link", [True], indirect=True, ids=["paced"])


def test_tiles_land_in_order_and_progressively(link: Link) -> None:
    slots = tuple(np.random.default_rng(0).permutation(SLOTS)[: SHAPE.tiles - 4].tolist())
    order = Fetch(7, layer=1, expert=2, lo=3, slots=slots, urgency=0)
    link.send(order)
    reports = link.reports(7)
    assert [f.landed for f in reports] == list(range(1, len(slots) + 1))
    assert [f.final for f in reports] == [False] * (len(slots) - 1) + [True]
    assert sorted(f.seconds for f in reports) == [f.seconds for f in reports]
    assert reports[0].seconds > 0
    assert link.holds(order)
    others = [link.slab.slot(slot) for slot in range(SLOTS) if slot not in slots]
    assert all((other == UNTOUCHED).all() for other in others)


def test_orders_of_the_first_and_last_tile_and_of_no_tile(link: Link) -> None:
    orders = [
        Fetch(1, 0, 0, 0, (5,), 2),
        Fetch(2, SHAPE.layers - 1, SHAPE.experts - 1, SHAPE.tiles - 1, (SLOTS - 1,), 1),
        Fetch(3, 0, 0, 0, (), 0),
    ]
    link.send(*orders)
    reports = link.reports(1, 2, 3)
    assert [(f.landed, f.final) for f in reports if f.id == 3] == [(0, True)]
    assert all(link.holds(order) for order in orders)


def test_reported_tiles_are_copied_completely(link: Link) -> None:
    link.send(Fetch(1, 0, 1, 0, tuple(range(SHAPE.tiles)), 0))
    for index in range(SHAPE.tiles):
        assert link.place.expect(Fetched).landed == index + 1
        tile = link.store.tiles(0, 1, index, index + 1)
        np.testing.assert_array_equal(link.slab.slot(index), tile)


def channels(*counts: int) -> list[I32Vector]:
    """So many channels of an expert, for each number."""
    random = np.random.default_rng(len(counts))
    return [np.sort(random.permutation(SHAPE.padded)[:count]).astype(np.int32) for count in counts]


def gathered(link: Link, order: Gather, landed: int | None = None) -> bool:
    """Whether the records of an order's first `landed` channels (all of them) are in their slots, and nothing
    else."""
    landed = len(order.channels) if landed is None else landed
    tiles = link.store.tiles(order.layer, order.expert, 0, SHAPE.tiles)
    expected = np.full((len(order.slots), link.slab.slot_bytes), UNTOUCHED, np.uint8)
    records = tiles.reshape(SHAPE.padded, -1)[order.channels[:landed]]
    expected.reshape(-1)[: records.size] = records.reshape(-1)
    return all(
        np.array_equal(link.slab.slot(slot), row) for slot, row in zip(order.slots, expected, strict=True)
    )


def test_channels_are_gathered_into_their_slots(link: Link) -> None:
    """From all tiles of the expert, the first and the last; none, one and all of its channels."""
    several, one, every = channels(37, 1, SHAPE.padded)
    ends = np.array([0, SHAPE.padded - 1], np.int32)
    orders = [
        Gather(1, 0, 1, several, (9, 4, 7), 0),
        Gather(2, 1, 2, one, (1,), 1),
        Gather(3, 1, 3, every, tuple(range(10, 10 + SHAPE.tiles)), 0),
        Gather(4, 0, 0, ends, (0,), 2),
        Gather(5, 0, 0, ends[:0], (), 0),
    ]
    link.send(*orders)
    reports = link.reports(1, 2, 3, 4, 5)
    assert [(f.landed, f.final) for f in reports if f.id == 1] == [(16, False), (32, False), (37, True)]
    assert [(f.landed, f.final) for f in reports if f.id == 5] == [(0, True)]
    assert [f.landed for f in reports if f.id == 3] == list(range(16, SHAPE.padded + 1, 16))
    assert all(gathered(link, order) for order in orders)


@paced
def test_demanded_channels_overtake_others_between_two_chunks(link: Link) -> None:
    every, few = channels(SHAPE.padded, 5)
    predicted = Gather(1, 0, 0, every, tuple(range(SHAPE.tiles)), 1)
    waiting = Gather(2, 0, 1, every, tuple(range(SHAPE.tiles, 2 * SHAPE.tiles)), 1)
    demanded = Gather(3, 1, 1, few, (SLOTS - 1,), 0)
    link.send(predicted, waiting)
    assert link.place.expect(Fetched).id == 1
    link.send(DemandFetch(2, 20), demanded, CancelFetch(1))
    reports = link.reports(1, 2, 3)
    assert [f.id for f in reports if f.id != 1] == [2, 2, 3]
    assert [f.landed for f in reports if f.id == 2] == [16, 20]  # and no channel that is not demanded
    landed = reports[[f.id for f in reports].index(1)].landed
    assert 0 < landed < SHAPE.padded // 2
    assert gathered(link, predicted, [f.landed for f in reports if f.id == 1][-1])
    assert gathered(link, waiting, 20)
    assert gathered(link, demanded)


def test_order_of_channels_that_do_not_exist_ends_the_prefetcher(link: Link) -> None:
    """Only a defect of the coordinator sends one: nothing is written and the supervisor hears of it."""
    link.send(Gather(1, 0, 0, np.array([SHAPE.padded], np.int32), (0,), 0))
    assert link.child.ended() != 0
    assert (link.slab.segment.array == UNTOUCHED).all()


@paced
def test_demanded_overtakes_predicted_between_two_tiles(link: Link) -> None:
    slots = list(range(SLOTS))
    predicted = Fetch(1, 0, 0, 0, tuple(slots[: SHAPE.tiles]), urgency=1)
    placed = Fetch(2, 0, 1, 0, tuple(slots[SHAPE.tiles : SHAPE.tiles + 2]), urgency=2)
    later = Fetch(3, 0, 2, 0, tuple(slots[-9:-7]), urgency=1)
    demanded = Fetch(4, 1, 3, 2, tuple(slots[-3:]), urgency=0)
    link.send(predicted, placed, later)
    first = link.place.expect(Fetched)
    assert (first.id, first.landed) == (1, 1)
    link.send(demanded)
    reports = [f.id for f in link.reports(1, 2, 3, 4)]
    start = reports.index(4)
    assert start < SHAPE.tiles // 2  # long before the predicted one was done
    assert reports[start : start + 3] == [4, 4, 4]  # without another report in between
    others = reports[:start] + reports[start + 3 :]
    assert others == [1] * (SHAPE.tiles - 1) + [3, 3, 2, 2]  # urgency, then age
    assert all(link.holds(order) for order in (predicted, placed, later, demanded))


@paced
def test_cancelled_order_lands_a_prefix_of_its_tiles(link: Link) -> None:
    order = Fetch(1, 1, 0, 0, tuple(reversed(range(SHAPE.tiles))), urgency=1)
    link.send(order)
    assert not link.place.expect(Fetched).final
    link.send(CancelFetch(1))
    last = link.reports(1)[-1]
    assert 1 <= last.landed < SHAPE.tiles // 2
    assert link.place.quiet(3 * TILE_SECONDS)
    assert link.holds(order, last.landed)
    again = Fetch(2, 1, 0, last.landed, order.slots[last.landed :], urgency=0)
    link.send(again)
    assert link.reports(2)[-1].landed == SHAPE.tiles - last.landed
    assert link.holds(order)


@paced
def test_waiting_order_is_final_as_soon_as_it_is_cancelled(link: Link) -> None:
    """The coordinator waits for its report, which must not wait for the orders before it."""
    running = Fetch(1, 0, 0, 0, tuple(range(SHAPE.tiles)), urgency=1)
    waiting = Fetch(2, 0, 1, 0, tuple(range(SHAPE.tiles, 2 * SHAPE.tiles)), urgency=1)
    link.send(running, waiting)
    assert link.place.expect(Fetched).id == 1
    link.send(CancelFetch(2))
    reports = link.reports(1, 2)
    finals = [(f.id, f.landed) for f in reports if f.final]
    assert finals == [(2, 0), (1, SHAPE.tiles)]
    assert [f.id for f in reports].index(2) < SHAPE.tiles // 2
    assert link.holds(waiting, 0)
    assert link.holds(running)


def test_cancelling_an_unknown_or_finished_order_has_no_effect(link: Link) -> None:
    order = Fetch(1, 0, 3, 0, (1, 2), 0)
    link.send(CancelFetch(1), CancelFetch(-5), order)
    assert [f.final for f in link.reports(1)] == [False, True]
    link.send(CancelFetch(1), CancelFetch(1))
    assert link.place.quiet()
    after = Fetch(2, 0, 2, 0, (3,), 0)
    link.send(after)
    assert [f.id for f in link.reports(2)] == [2]
    assert link.holds(order)
    assert link.holds(after)


@paced
def test_paced_link_takes_as_long_as_its_bandwidth_implies(link: Link) -> None:
    orders = [Fetch(n, 0, n, 0, tuple(range(n * 8, n * 8 + 8)), n) for n in range(3)]
    began = time.perf_counter()
    link.send(*orders)
    reports = link.reports(0, 1, 2)
    assert time.perf_counter() - began >= 24 * TILE_SECONDS
    # Each order's own time is that of its tiles, and no tile's is counted twice.
    seconds = [f.seconds for f in reports if f.final]
    assert all(s >= 7 * TILE_SECONDS for s in seconds)
    assert sum(seconds) <= time.perf_counter() - began
    assert all(link.holds(order) for order in orders)


@paced
def test_paced_link_saves_up_no_bandwidth_while_it_is_idle(link: Link) -> None:
    for number in range(2):
        began = time.perf_counter()
        link.send(Fetch(number, 0, number, 0, tuple(range(8)), 0))
        link.reports(number)
        assert time.perf_counter() - began >= 8 * TILE_SECONDS
        assert link.place.quiet(10 * TILE_SECONDS)


class TwoCopies:
    """A copier with two copies under way, as over a GPU's link, of which none is complete before `finish`."""

    depth = gather_depth = 2
    flags, locked = False, (0, 0)
    notes: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.started = self.finished = 0
        self.sizes: list[int] = []  # of chunks of channels
        self.closed = False

    def start(self, tile: Bytes, slot: int, number: int = 0) -> None:
        self.started += 1
        assert self.started - self.finished <= self.depth

    def gather(self, records: Bytes, chosen: I32Vector, slot: int, place: int) -> None:
        self.sizes.append(len(chosen))
        self.start(records[chosen].reshape(-1), slot)

    def finish(self) -> int:
        assert self.finished < self.started
        self.finished += 1
        return 1

    def close(self) -> None:
        assert self.finished == self.started
        self.closed = True


class Coordinator:
    """The endpoint of a prefetcher in this thread: sends one order, cancels it once `cancel_at` of its tiles
    have landed, and stops the prefetcher when it waits for messages."""

    incarnation = 0

    def __init__(self, order: Fetch | Gather, copier: TwoCopies, cancel_at: int | None) -> None:
        self.stopped = False
        self.reports: list[Fetched] = []
        self._copier, self._cancel_at = copier, cancel_at
        self._inbox: list[object] = [order]

    def receive(self, wait: bool) -> list[object]:
        messages, self._inbox = self._inbox, []
        self.stopped = wait and not messages
        return messages

    def send(self, report: Fetched) -> None:
        self.reports.append(report)
        sizes = self._copier.sizes or [1] * self._copier.started
        assert report.landed == sum(sizes[: self._copier.finished])
        assert report.final == (self._copier.started == self._copier.finished)
        if report.landed == self._cancel_at and not report.final:
            self._inbox.append(CancelFetch(report.id))


@pytest.mark.parametrize("cancel_at", [None, 1, 4])
def test_order_with_a_copy_under_way_is_not_final(fingerprint: str, cancel_at: int | None) -> None:
    copier = TwoCopies()
    coordinator = Coordinator(Fetch(1, 0, 0, 0, tuple(range(6)), 0), copier, cancel_at)
    ticks: list[int] = []
    with Store.attach(store_name(fingerprint)) as store:
        loop = CopyLoop(cast(ChildEndpoint, coordinator), store, None, lambda: ticks.append(copier.finished))
        loop.attach(copier)
        loop.serve()
    assert [report.final for report in coordinator.reports].count(True) == 1
    assert copier.started == (6 if cancel_at is None else cancel_at + 1)
    assert copier.closed
    assert ticks == list(range(copier.finished + 1))  # progress is counted with every copy


@pytest.mark.parametrize("cancel_at", [None, 16])
def test_channels_go_in_chunks_and_end_within_a_slot(monkeypatch, fingerprint: str, cancel_at) -> None:
    """The one chunk that is under way when the order is cancelled lands too."""
    copier = TwoCopies()
    order = Gather(1, 0, 0, channels(30)[0], (0, 1), 1)
    coordinator = Coordinator(order, copier, cancel_at)
    with Store.attach(store_name(fingerprint)) as store:
        monkeypatch.setattr(prefetcher, "CHUNK_BYTES", 5 * store.layout.tile_bytes // SHAPE.tile)
        loop = CopyLoop(cast(ChildEndpoint, coordinator), store, None, lambda: None)
        loop.attach(copier)
        loop.serve()
    last = 30 if cancel_at is None else 21
    assert [(f.landed, f.final) for f in coordinator.reports] == [(16, False), (last, True)]
    assert copier.sizes[:5] == [5, 5, 5, 1, 5]  # channels; no chunk lies in two slots


def test_malformed_and_foreign_messages_are_dropped(link: Link) -> None:
    for frames in ([b""], [b"\xff\xff"], [bytes([39, 1]), b"\x80"]):
        link.place.work.send_multipart([link.child.name, *frames])
    link.send(Fetched(1, 1, 0, True, 0.0))
    order = Fetch(1, 0, 0, 0, (0,), 0)
    link.send(order)
    assert [f.final for f in link.reports(1)] == [True]
    assert link.holds(order)


@paced
def test_shutdown_in_the_middle_of_an_order_leaves_whole_tiles(link: Link) -> None:
    order = Fetch(1, 0, 0, 0, tuple(range(SHAPE.tiles)), 1)
    link.send(order)
    link.place.expect(Fetched)
    assert link.place.shut_down(link.child, link.place.control) == 0
    assert any(link.holds(order, landed) for landed in range(1, SHAPE.tiles))
    assert link.child.errors.read_text() == ""


def test_idle_prefetcher_exits_after_a_shutdown_from_the_coordinator(link: Link) -> None:
    assert link.place.shut_down(link.child, link.place.work) == 0


@paced
def test_prefetcher_exits_with_its_lifeline_in_the_middle_of_an_order(link: Link) -> None:
    link.send(Fetch(1, 0, 0, 0, tuple(range(SHAPE.tiles)), 1))
    link.place.expect(Fetched)
    link.child.cut()
    assert link.child.ended(5) == EXIT_PARENT_GONE


@pytest.mark.parametrize("case", ["no slab", "another size", "no store"])
def test_slab_or_store_that_cannot_be_attached_is_reported(place, slab, case) -> None:
    child = place.start(**({"store": "/tandem-store-none"} if case == "no store" else {}))
    if case != "no store":
        place.ready()
        name = b"/tandem-test-none" if case == "no slab" else slab.segment.name.encode()
        place.send(child, AttachSlab("shm", name, 0, slab.slots + 1, slab.slot_bytes))
    assert "/tandem-" in place.failure(child)
