"""The coordinator's link to its prefetcher: when it is up, how its orders end, and when the prefetcher is
hung."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from child_messages import LIMIT, PRINT, child_socket, control_segment, exit_of, received

from pipeline.experts.link import ATTACH_LIMIT, STALL_LIMIT, PrefetchLink
from pipeline.experts.mover import PLACED, PREDICTED
from pipeline.experts.peers import STALL_SLICE, ChildServerSocket
from protocol.messages import AttachSlab, CancelFetch, Fetch, Fetched, Hung, SlabAttached, WorkerUp
from shm.control import ControlSegment

SLAB = AttachSlab("shm", b"/x", 0, 1, 1)


class LinkHarness:
    """A link, its prefetcher's progress counter, and prefetchers that the test drives."""

    def __init__(
        self, socket: ChildServerSocket, control: ControlSegment, make: Callable, exits, reports
    ) -> None:
        self.line, self.reports = control.line("prefetcher", 0), reports
        self._make, self._exits = make, exits
        self.link = PrefetchLink(socket, SLAB, self.line)

    def start(self, generation: int):
        """A prefetcher that has got the slab's address."""
        endpoint = self._make(0, generation, role="prefetcher", socket="fetch.sock")
        messages: list[object] = []

        def arrived() -> list[object]:
            messages.extend(endpoint.receive(wait=False))
            return messages

        self.update_until(arrived)
        assert messages == [SLAB]
        return endpoint

    def attach(self, generation: int):
        """A prefetcher that has also mapped the slab."""
        endpoint = self.start(generation)
        endpoint.send(SlabAttached(generation))
        assert self.link.wait_up(LIMIT)
        return endpoint

    def exit(self, generation: int) -> None:
        self._exits.put(exit_of(generation, role="prefetcher"))
        self.link.update(50)

    def update_until(self, condition: Callable[[], object], wait_ms: int = 20) -> None:
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < deadline
            self.link.update(wait_ms)


@pytest.fixture
def harness(runtime, make_child, exits, reports) -> Iterator[LinkHarness]:
    with (
        child_socket(runtime, "fetch.sock", "prefetcher", PRINT, exits, reports) as socket,
        control_segment(1) as control,
    ):
        yield LinkHarness(socket, control, make_child, exits, reports)


@pytest.fixture
def slices(harness, pool_clock) -> Callable[..., None]:
    """Lets slices of time pass by the link's clock, with an update after each."""

    def let_pass(count: int) -> None:
        for _ in range(count):
            pool_clock.now += STALL_SLICE
            harness.link.update(0)

    return let_pass


def test_link_is_up_once_the_slab_is_mapped(harness) -> None:
    assert not harness.link.wait_up(0.2)
    endpoint = harness.start(0)
    assert not harness.link.wait_up(0.2)
    assert harness.reports == []
    endpoint.send(SlabAttached(0))
    assert harness.link.wait_up(LIMIT)
    assert harness.reports == [WorkerUp("prefetcher", 0, 0)]


def test_order_lands_and_is_final_after_a_cancel(harness) -> None:
    endpoint, link = harness.attach(0), harness.link
    order = link.order(0, 1, 2, [5, 6], PLACED)
    link.cancel(order)
    fetch, cancel = received(endpoint, Fetch, CancelFetch)
    assert (fetch.id, fetch.layer, fetch.expert, fetch.lo, fetch.slots) == (order.id, 0, 1, 2, (5, 6))
    assert (fetch.urgency, len(fetch.channels), cancel) == (PLACED, 0, CancelFetch(order.id))
    endpoint.send(Fetched(order.id, 0, 1, True, 0.5))
    link.wait(order, 2)  # returns: it is final with one tile
    assert (order.landed, order.final) == (1, True)
    endpoint.send(Fetched(order.id, 0, 2, True, 0.5))
    link.update(200)  # a report after the final one changes nothing
    assert order.landed == 1
    link.cancel(order)
    later = link.order(0, 1, 3, [6], PREDICTED)
    (fetch,) = received(endpoint, Fetch)  # and no CancelFetch before it
    assert (fetch.id, fetch.urgency) == (later.id, PREDICTED)


def test_exit_makes_orders_final_with_what_has_landed(harness) -> None:
    endpoint, link = harness.attach(0), harness.link
    begun, waiting = link.order(0, 1, 0, [5, 6, 7], PLACED), link.order(0, 2, 0, [8], PLACED)
    received(endpoint, Fetch, Fetch)
    endpoint.send(Fetched(begun.id, 0, 2, False, 0.5))
    link.wait(begun, 2)
    harness.exit(0)
    assert not link.up
    link.wait(begun, 3)  # returns at once
    link.wait(waiting, 1)
    assert [(o.landed, o.final) for o in (begun, waiting)] == [(2, True), (0, True)]
    endpoint.send(Fetched(begun.id, 0, 3, True, 0.5))  # late
    link.update(200)
    assert begun.landed == 2

    restarted = harness.attach(1)
    again = link.order(0, 1, 2, [7], PLACED)
    assert received(restarted, Fetch)[0].id not in (begun.id, waiting.id)
    endpoint.send(Fetched(again.id, 0, 1, True, 0.5))  # from the generation that exited
    link.update(200)
    assert not again.final
    restarted.send(Fetched(again.id, 1, 1, True, 0.5))
    link.wait(again, 1)
    assert (again.landed, again.final) == (1, True)


def test_order_while_the_link_is_down_is_final_and_not_sent(harness) -> None:
    """A new prefetcher that has not mapped the slab must not get an order: its slots may have been reused."""
    endpoint, link = harness.start(0), harness.link
    order = link.order(0, 1, 0, [5], PREDICTED)
    assert (order.landed, order.final) == (0, True)
    endpoint.send(SlabAttached(0))
    assert link.wait_up(LIMIT)
    sent = link.order(0, 1, 0, [6], PREDICTED)
    assert received(endpoint, Fetch)[0].id == sent.id


def test_orders_of_a_prefetcher_that_exited_are_not_expected_of_the_next(harness, slices) -> None:
    harness.attach(0)
    harness.link.order(0, 0, 0, [1], PLACED)
    harness.exit(0)
    harness.attach(1)
    slices(int(STALL_LIMIT / STALL_SLICE) + 3)
    assert harness.reports[1:] == [WorkerUp("prefetcher", 0, 1)]


@pytest.mark.parametrize("landed", [1, 4], ids=["fewer than before", "more than ordered"])
def test_reports_that_contradict_each_other_are_a_hung_prefetcher(harness, landed: int) -> None:
    endpoint, link = harness.attach(0), harness.link
    order = link.order(0, 0, 0, [1, 2, 3], PLACED)
    endpoint.send(Fetched(order.id, 0, 2, False, 0.5))
    endpoint.send(Fetched(order.id, 0, 2, False, 0.5))  # no more than before, and no contradiction
    endpoint.send(Fetched(order.id, 0, landed, True, 0.5))
    harness.update_until(lambda: len(harness.reports) > 1)
    assert (order.landed, order.final) == (2, False)
    assert harness.reports[1:] == [Hung("prefetcher", 0, 0)]


@pytest.mark.parametrize(
    ("mapped", "limit"), [(False, ATTACH_LIMIT), (True, STALL_LIMIT)], ids=["mapping", "copying"]
)
def test_prefetchers_limits(harness, slices, mapped: bool, limit: float) -> None:
    if mapped:
        harness.attach(0)
        harness.link.order(0, 0, 0, [1], PLACED)
    else:
        harness.start(0)
    harness.link.update(1)  # the count begins here at the latest
    before = len(harness.reports)
    slices(int(limit / STALL_SLICE) - 2)
    assert len(harness.reports) == before
    slices(4)
    assert harness.reports[before:] == [Hung("prefetcher", 0, 0)]


def test_order_moves_while_its_prefetcher_says_so(harness) -> None:
    endpoint, link = harness.attach(0), harness.link
    first, second = link.order(0, 1, 0, [5, 6], PREDICTED), link.order(0, 2, 0, [7], PREDICTED)
    assert not link.moving(first)
    harness.line.begin(first.id)
    assert (link.moving(first), link.moving(second)) == (True, False)
    endpoint.send(Fetched(first.id, 0, 2, True, 0.5))
    link.wait(first, 2)
    assert not link.moving(first)
    assert link.copied == (2, 0.5)
    harness.line.begin(second.id)
    harness.exit(0)
    assert not link.moving(second)


def test_slab_that_no_other_process_can_map(harness) -> None:
    """The link stays down, and whoever waits for it is told at once."""
    harness.start(0).send(SlabAttached(0, error="no IPC"))
    assert not harness.link.wait_up(LIMIT)
    assert harness.link.refusal == "no IPC"
    assert harness.link.order(0, 1, 0, [5], PLACED).final
