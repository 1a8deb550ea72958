"""The prefetcher as a real process, on a real store and a real slab."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest
from child_harness import SHAPE, UNTOUCHED, Child, Surroundings, surroundings

from protocol.messages import AttachSlab, CancelFetch, Fetch, Fetched, I32Vector, SlabAttached
from shm.control import IDLE, ControlSegment
from shm.slab import Slab
from shm.store import Store, store_name
from workers import prefetcher
from workers.child_endpoint import ChildEndpoint
from workers.copiers import TileCopy
from workers.prefetcher import CopyLoop

SLOTS = 3 * SHAPE.tiles
NO_CHANNELS = np.zeros(0, np.int32)
TILE_SECONDS = 0.02  # one tile over the paced link


def fetch(id: int, layer: int, expert: int, lo: int, slots: tuple[int, ...], urgency: int) -> Fetch:
    """An order of whole tiles."""
    return Fetch(id, layer, expert, lo, slots, urgency, NO_CHANNELS)


def gather(
    id: int, layer: int, expert: int, channels: I32Vector, slots: tuple[int, ...], urgency: int
) -> Fetch:
    """An order of channels."""
    return Fetch(id, layer, expert, 0, slots, urgency, channels)


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
            assert reports[-1].generation == self.child.generation
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
    assert place.expect(SlabAttached) == SlabAttached(child.generation)
    with Store.attach(store_name(place.fingerprint)) as store:
        yield Link(place, child, store, slab)


paced = pytest.mark.parametrize("link", [True], indirect=True, ids=["paced"])


def test_tiles_land_in_order_and_progressively(link: Link) -> None:
    slots = tuple(np.random.default_rng(0).permutation(SLOTS)[: SHAPE.tiles - 4].tolist())
    order = fetch(7, layer=1, expert=2, lo=3, slots=slots, urgency=0)
    link.send(order)
    reports = link.reports(7)
    assert [f.landed for f in reports] == list(range(1, len(slots) + 1))
    assert [f.final for f in reports] == [False] * (len(slots) - 1) + [True]
    assert sorted(f.seconds for f in reports) == [f.seconds for f in reports]
    assert reports[0].seconds > 0
    assert link.holds(order)
    others = [link.slab.slot(slot) for slot in range(SLOTS) if slot not in slots]
    assert all((other == UNTOUCHED).all() for other in others)


def channels(*counts: int) -> list[I32Vector]:
    """So many channels of an expert, for each number."""
    random = np.random.default_rng(len(counts))
    return [np.sort(random.permutation(SHAPE.padded)[:count]).astype(np.int32) for count in counts]


def gathered(link: Link, order: Fetch, landed: int | None = None) -> bool:
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
        gather(1, 0, 1, several, (9, 4, 7), 0),
        gather(2, 1, 2, one, (1,), 1),
        gather(3, 1, 3, every, tuple(range(10, 10 + SHAPE.tiles)), 0),
        gather(4, 0, 0, ends, (0,), 2),
        gather(5, 0, 0, ends[:0], (), 0),
    ]
    link.send(*orders)
    reports = link.reports(1, 2, 3, 4, 5)
    assert [(f.landed, f.final) for f in reports if f.id == 1] == [(16, False), (32, False), (37, True)]
    assert [(f.landed, f.final) for f in reports if f.id == 5] == [(0, True)]
    assert [f.landed for f in reports if f.id == 3] == list(range(16, SHAPE.padded + 1, 16))
    assert all(gathered(link, order) for order in orders)


def test_order_of_channels_that_do_not_exist_ends_the_prefetcher(link: Link) -> None:
    """Only a defect of the coordinator sends one: nothing is written and the supervisor hears of it."""
    link.send(gather(1, 0, 0, np.array([SHAPE.padded], np.int32), (0,), 0))
    assert link.child.ended() != 0
    assert (link.slab.segment.array == UNTOUCHED).all()


@paced
def test_predicted_overtakes_placed_between_two_tiles(link: Link) -> None:
    """And the line of the control segment says which order moves."""
    slots = list(range(SLOTS))
    placed = fetch(1, 0, 0, 0, tuple(slots[: SHAPE.tiles]), urgency=2)
    later = fetch(2, 0, 2, 0, tuple(slots[-6:-4]), urgency=2)
    predicted = fetch(3, 1, 3, 2, tuple(slots[-3:]), urgency=1)
    line = link.place.progress.line("prefetcher", 0)
    link.send(placed, later)
    first = link.place.expect(Fetched)
    assert (first.id, first.landed) == (1, 1)
    link.send(predicted)
    while (report := link.place.expect(Fetched)).id == 1:
        assert report.landed < SHAPE.tiles  # long before the placed one was done
    assert line.seq == 3
    reports = [report.id, *(f.id for f in link.reports(1, 2, 3))]
    assert reports[:3] == [3, 3, 3]
    assert reports[-2:] == [2, 2]
    assert line.seq == IDLE
    assert all(link.holds(order) for order in (placed, later, predicted))


@paced
def test_nothing_moves_while_demanded_tiles_occupy_the_link(link: Link) -> None:
    """Those of the coordinator; an order may be cancelled meanwhile."""
    coordinator = link.place.progress.line("coordinator", 0)
    until = time.perf_counter() + 0.3
    coordinator.link_until = int(until * 1e9)
    link.send(fetch(1, 0, 0, 0, (0, 1), 1), fetch(2, 0, 1, 0, (2,), 1), CancelFetch(1))
    cancelled, moved = link.place.expect(Fetched), link.place.expect(Fetched)
    assert (cancelled.id, cancelled.landed, moved.id) == (1, 0, 2)
    assert time.perf_counter() >= until + TILE_SECONDS
    assert link.place.progress.line("prefetcher", 0).link_until / 1e9 >= until + TILE_SECONDS


@paced
def test_cancelled_order_lands_a_prefix_of_its_tiles(link: Link) -> None:
    order = fetch(1, 1, 0, 0, tuple(reversed(range(SHAPE.tiles))), urgency=1)
    link.send(order)
    assert not link.place.expect(Fetched).final
    link.send(CancelFetch(1))
    last = link.reports(1)[-1]
    assert 1 <= last.landed < SHAPE.tiles // 2
    assert link.place.quiet(3 * TILE_SECONDS)
    assert link.holds(order, last.landed)
    again = fetch(2, 1, 0, last.landed, order.slots[last.landed :], urgency=0)
    link.send(again)
    assert link.reports(2)[-1].landed == SHAPE.tiles - last.landed
    assert link.holds(order)


@paced
def test_waiting_order_is_final_as_soon_as_it_is_cancelled(link: Link) -> None:
    """The coordinator waits for its report, which must not wait for the orders before it."""
    running = fetch(1, 0, 0, 0, tuple(range(SHAPE.tiles)), urgency=1)
    waiting = fetch(2, 0, 1, 0, tuple(range(SHAPE.tiles, 2 * SHAPE.tiles)), urgency=1)
    link.send(running, waiting)
    assert link.place.expect(Fetched).id == 1
    link.send(CancelFetch(2))
    reports = link.reports(1, 2)
    finals = [(f.id, f.landed) for f in reports if f.final]
    assert finals == [(2, 0), (1, SHAPE.tiles)]
    assert [f.id for f in reports].index(2) < SHAPE.tiles // 2
    assert link.holds(waiting, 0)
    assert link.holds(running)


class TwoCopies:
    """A copier with two copies under way, as over a GPU's link, of which none is complete before `ready`."""

    ahead = 2
    copied = 0, 0.0

    def __init__(self) -> None:
        self.sizes: list[int] = []  # tiles or channels
        self.finished = 0
        self.closed = False

    def begin(self, copies: Sequence[TileCopy]) -> TileCopy:
        (copy,) = copies
        self.sizes.append(1 if copy.channels is None else len(copy.channels))
        assert len(self.sizes) - self.finished <= self.ahead
        return copy

    def ready(self, begun: TileCopy) -> None:
        assert self.finished < len(self.sizes)
        self.finished += 1

    def close(self) -> None:
        assert self.finished == len(self.sizes)
        self.closed = True


class Coordinator:
    """The endpoint of a prefetcher in this thread: sends one order, cancels it once `cancel_at` of its tiles
    have landed, and stops the prefetcher when it waits for messages."""

    generation = 0

    def __init__(self, order: Fetch, copier: TwoCopies, cancel_at: int | None) -> None:
        self.stopped = False
        self.reports: list[Fetched] = []
        self._copier, self._cancel_at = copier, cancel_at
        self._inbox: list[object] = [order]

    def receive(self, wait: bool, limit_ms: int) -> list[object]:
        messages, self._inbox = self._inbox, []
        self.stopped = wait and not messages
        return messages

    def send(self, report: Fetched) -> None:
        self.reports.append(report)
        copier = self._copier
        assert report.landed == sum(copier.sizes[: copier.finished])
        assert report.final == (len(copier.sizes) == copier.finished)
        if report.landed == self._cancel_at and not report.final:
            self._inbox.append(CancelFetch(report.id))


def served(
    control: ControlSegment, fingerprint: str, order: Fetch, copier: TwoCopies, cancel_at: int | None
) -> list[Fetched]:
    """The reports of a prefetcher that copies with this copier."""
    coordinator = Coordinator(order, copier, cancel_at)
    with Store.attach(store_name(fingerprint)) as store:
        line = control.line("prefetcher", 0)
        loop = CopyLoop(cast(ChildEndpoint, coordinator), store, line)
        loop._copier = copier
        loop.serve()
        assert line.ticks > copier.finished  # progress is counted with every copy
        assert (line.seq, copier.closed) == (IDLE, True)
    return coordinator.reports


@pytest.mark.parametrize("cancel_at", [None, 1, 4])
def test_order_with_a_copy_under_way_is_not_final(control, fingerprint: str, cancel_at: int | None) -> None:
    copier = TwoCopies()
    reports = served(control, fingerprint, fetch(1, 0, 0, 0, tuple(range(6)), 1), copier, cancel_at)
    assert [report.final for report in reports].count(True) == 1
    assert copier.finished == (6 if cancel_at is None else cancel_at + 1)


@pytest.mark.parametrize("cancel_at", [None, 16])
def test_channels_go_in_chunks_and_end_within_a_slot(
    monkeypatch, control, fingerprint: str, cancel_at
) -> None:
    """The one chunk that is under way when the order is cancelled lands too."""
    copier = TwoCopies()
    with Store.attach(store_name(fingerprint)) as store:
        monkeypatch.setattr(prefetcher, "CHUNK_BYTES", 5 * store.layout.tile_bytes // SHAPE.tile)
    reports = served(control, fingerprint, gather(1, 0, 0, channels(30)[0], (0, 1), 1), copier, cancel_at)
    last = 30 if cancel_at is None else 21
    assert [(f.landed, f.final) for f in reports] == [(16, False), (last, True)]
    assert copier.sizes[:5] == [5, 5, 5, 1, 5]  # channels; no chunk lies in two slots


@paced
def test_shutdown_in_the_middle_of_an_order_leaves_whole_tiles(link: Link) -> None:
    order = fetch(1, 0, 0, 0, tuple(range(SHAPE.tiles)), 1)
    link.send(order)
    link.place.expect(Fetched)
    assert link.place.shut_down(link.child, link.place.control) == 0
    assert any(link.holds(order, landed) for landed in range(1, SHAPE.tiles))
    assert link.child.errors.read_text() == ""


@pytest.mark.parametrize("case", ["no slab", "another size", "no store"])
def test_slab_or_store_that_cannot_be_attached_is_reported(place, slab, case) -> None:
    child = place.start(**({"store": "/tandem-store-none"} if case == "no store" else {}))
    if case != "no store":
        place.ready()
        name = b"/tandem-test-none" if case == "no slab" else slab.segment.name.encode()
        place.send(child, AttachSlab("shm", name, 0, slab.slots + 1, slab.slot_bytes))
    assert "/tandem-" in place.failure(child)
