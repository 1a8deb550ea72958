"""The coordinator's link to its prefetcher: when it is up, what becomes of its orders, and when it hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from moving_parts import control_segment, peer_socket
from peer_words import LIMIT, PRINT, death, received

from pipeline.experts.fetch_link import PLACED, FetchLink
from protocol.messages import AttachSlab, CancelFetch, Fetch, Fetched, Hung, SlabAttached, WorkerUp

SLAB = AttachSlab("shm", b"/x", 0, 1, 1)


class Scene:
    """A link, the lines of its prefetcher, and prefetchers that do as the test says."""

    def __init__(self, link, control, make, deaths, said) -> None:
        self.link, self.line, self.said = link, control.line("prefetcher", 0), said
        self._make, self._deaths = make, deaths

    def announce(self, incarnation: int):
        """A prefetcher that has announced itself."""
        return self._make(0, incarnation, role="prefetcher", socket="fetch.sock")

    def come(self, incarnation: int):
        """And was told of the slab."""
        peer = self.announce(incarnation)
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            self.link.update(20)
            told = list(peer.receive(wait=False))
            if told:
                assert told == [SLAB]
                return peer
        raise AssertionError("it was not told of the slab")

    def attach(self, incarnation: int):
        peer = self.come(incarnation)
        peer.send(SlabAttached(incarnation, ("a note",)))
        assert self.link.wait_up(LIMIT)
        return peer

    def die(self, incarnation: int) -> None:
        self._deaths.put(death(incarnation, role="prefetcher"))
        self.link.update(50)


@pytest.fixture
def scene(runtime, make_peer, deaths, said) -> Iterator[Scene]:
    with (
        peer_socket(runtime, "fetch.sock", "prefetcher", PRINT, deaths, said) as socket,
        control_segment(1) as control,
    ):
        link = FetchLink(socket, SLAB, control.line("prefetcher", 0))
        yield Scene(link, control, make_peer, deaths, said)


def test_a_link_is_up_once_the_slab_is_mapped(scene) -> None:
    assert not scene.link.wait_up(0.2)
    peer = scene.come(0)
    assert not scene.link.wait_up(0.2)
    assert scene.said == []
    peer.send(SlabAttached(0, ("a note",)))
    assert scene.link.wait_up(LIMIT)
    assert scene.link.notes == ("a note",)
    assert scene.said == [WorkerUp("prefetcher", 0, 0)]


def test_orders_their_landings_and_their_end(scene) -> None:
    peer, link = scene.attach(0), scene.link
    order = link.order(0, 1, 2, [5, 6], PLACED)
    link.cancel(order)
    link.cancel(order)  # asked once only
    fetch, _ = received(peer, Fetch, CancelFetch)
    assert fetch == Fetch(order.id, 0, 1, 2, (5, 6), PLACED)
    peer.send(Fetched(order.id, 0, 1, True, 0.5))
    link.wait(order, 2)  # final with one tile: nothing more comes
    assert (order.landed, order.final) == (1, True)
    peer.send(Fetched(order.id, 0, 2, True, 0.5))
    link.update(200)  # an order that is over hears nothing
    assert order.landed == 1


def test_a_dead_prefetchers_orders_end_where_they_stood(scene) -> None:
    peer, link = scene.attach(0), scene.link
    begun, waiting = link.order(0, 1, 0, [5, 6, 7], PLACED), link.order(0, 2, 0, [8], PLACED)
    received(peer, Fetch, Fetch)
    peer.send(Fetched(begun.id, 0, 2, False, 0.5))
    link.wait(begun, 2)
    scene.die(0)
    assert not link.up
    link.wait(begun, 3)  # returns at once
    link.wait(waiting, 1)
    assert [(o.landed, o.final) for o in (begun, waiting)] == [(2, True), (0, True)]
    peer.send(Fetched(begun.id, 0, 3, True, 0.5))  # late
    link.update(200)
    assert begun.landed == 2

    successor = scene.attach(1)
    again = link.order(0, 1, 2, [7], PLACED)
    assert received(successor, Fetch)[0].id not in (begun.id, waiting.id)
    peer.send(Fetched(again.id, 0, 1, True, 0.5))  # the dead one's word
    link.update(200)
    assert not again.final
    successor.send(Fetched(again.id, 1, 1, True, 0.5))
    link.wait(again, 1)
    assert (again.landed, again.final) == (1, True)


def test_a_prefetcher_that_dies_before_it_has_mapped_the_slab(scene) -> None:
    scene.come(0)
    scene.die(0)
    scene.attach(1)
    assert scene.said == [WorkerUp("prefetcher", 0, 1)]


def test_a_prefetcher_that_makes_no_progress_is_reported_once(scene, monkeypatch) -> None:
    monkeypatch.setattr("pipeline.experts.fetch_link.STALL_LIMIT", 0.3)
    monkeypatch.setattr("pipeline.experts.fetch_link.ATTACH_LIMIT", 0.6)

    def watch(seconds: float, ticking: bool = False) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if ticking:
                scene.line.tick()
            scene.link.update(20)

    def said_in_the_end(count: int) -> None:
        """So much is said, and no more."""
        end = time.monotonic() + LIMIT
        while len(scene.said) < count and time.monotonic() < end:
            scene.link.update(20)
        watch(0.5)
        assert len(scene.said) == count

    scene.come(0)
    watch(0.4)
    assert scene.said == []
    said_in_the_end(1)  # it never mapped the slab
    scene.die(0)
    watch(0.1)
    peer = scene.attach(1)
    watch(0.6)  # it has nothing to do
    order = scene.link.order(0, 0, 0, [1, 2], PLACED)
    watch(0.6, ticking=True)
    assert scene.said[1:] == [WorkerUp("prefetcher", 0, 1)]
    said_in_the_end(3)
    peer.send(Fetched(order.id, 1, 2, True, 0.5))
    said_in_the_end(3)
    assert [scene.said[0], scene.said[2]] == [Hung("prefetcher", 0, 0), Hung("prefetcher", 0, 1)]


def test_a_successor_is_not_blamed_for_the_life_before_it(scene, monkeypatch) -> None:
    """Of an engine that has nothing to wait for, so that it only looks now and then."""
    monkeypatch.setattr("pipeline.experts.fetch_link.ATTACH_LIMIT", 0.4)

    def look_until(count: int) -> None:
        end = time.monotonic() + LIMIT
        while len(scene.said) < count and time.monotonic() < end:
            scene.link.update(0)
            time.sleep(0.005)

    scene.come(0)
    look_until(1)
    assert scene.said == [Hung("prefetcher", 0, 0)]
    scene.die(0)
    peer = scene.announce(1)
    for _ in range(30):  # it takes its time, and not too much of it
        scene.link.update(0)
        time.sleep(0.005)
    peer.send(SlabAttached(1))
    look_until(2)
    assert scene.said[1:] == [WorkerUp("prefetcher", 0, 1)]
