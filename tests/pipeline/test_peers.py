"""The coordinator's ends of its peers' sockets: who is heard, who is not, and when a wait ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from moving_parts import peer_of, peer_socket

from pipeline.errors import PeerLost, PipelineError
from pipeline.fetch_link import PLACED, FetchLink
from pipeline.peers import PeerSocket
from pipeline.runs import Run
from pipeline.worker_pool import WorkerPool
from protocol.messages import AttachSlab, CancelFetch, Fetch, Fetched, Partial, Work, WorkFailed

PRINT = "f" * 64
ONE = Run(
    np.array([[0, 0, 1]], np.int32),
    np.array([0, 1], np.int32),
    np.zeros(1, np.int32),
    np.ones(1, np.float32),
    np.zeros(1, np.intp),
)
X = np.ones((1, 4), np.float32)


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def workers(runtime) -> Iterator[PeerSocket]:
    with peer_socket(runtime, "w", "worker", PRINT) as socket:
        yield socket


@pytest.fixture
def make_worker(runtime):
    """`make_worker(index, incarnation)`: a peer that has announced itself, and answers as the test says."""
    made = []

    def make(index=0, incarnation=0, fingerprint=PRINT):
        made.append(peer_of(runtime, "worker", "w", fingerprint, index, incarnation))
        made[-1].announce()
        return made[-1]

    yield make
    for peer in made:
        peer.close()


def received(peer, *kinds):
    """The next messages of a peer, one of each kind in this order."""
    messages = []
    deadline = time.monotonic() + 5
    while len(messages) < len(kinds) and time.monotonic() < deadline:
        messages += list(peer.receive(wait=True))
    assert tuple(type(m) for m in messages) == kinds
    return messages


def drain(socket: PeerSocket, seconds: float = 0.3) -> list[object]:
    until = time.monotonic() + seconds
    messages = []
    while time.monotonic() < until:
        messages += [message for _, message in socket.receive(20)]
    return messages


def test_partials_are_added_in_run_order_whoever_answers_first(workers, make_worker) -> None:
    """In float32 (1e8 - 1e8) + 1 is 1 and (1 - 1e8) + 1e8 is 0."""
    pool = WorkerPool(workers, 3)
    peers = [make_worker(i) for i in range(3)]
    pool.wait_ready(5)
    ticket = pool.submit_runs(0, [ONE, ONE, ONE], X)
    work = [received(peer, Work)[0] for peer in peers]
    for i in (2, 0, 1):
        value = np.full((1, 4), (1e8, -1e8, 1.0)[i], np.float32)
        peers[i].send(Partial(work[i].seq, 0, 0.1 * i, value))
        drain(workers, 0.05) if ticket.complete else pool.update(1000)
    assert pool.result(ticket).tolist() == [[1.0] * 4]
    assert ticket.busy == pytest.approx(0.2)


def test_only_the_newest_incarnation_is_heard(workers, make_worker) -> None:
    old = make_worker(0, 1)
    workers.wait_ready(1, 5)
    new = make_worker(0, 2)
    drain(workers)
    old.send(Partial(7, 1, 0.0, X))
    new.send(Partial(8, 2, 0.0, X))
    assert [message.seq for message in drain(workers)] == [8]
    workers.send(0, Work(1, 0, ONE.items, ONE.offsets, ONE.rows, ONE.weights, X))
    received(new, Work)


def test_a_partial_that_nobody_waits_for_is_dropped(workers, make_worker) -> None:
    pool = WorkerPool(workers, 1)
    peer = make_worker()
    pool.wait_ready(5)
    ticket = pool.submit_runs(0, [ONE], X)
    seq = received(peer, Work)[0].seq
    peer.send(Partial(seq + 99, 0, 0.0, 5 * X))
    peer.send(Partial(seq, 0, 0.0, 2 * X))
    peer.send(Partial(seq, 0, 0.0, 3 * X))  # a second answer changes nothing
    assert pool.result(ticket).tolist() == [[2.0] * 4]
    pool.update(200)
    assert pool.result(ticket).tolist() == [[2.0] * 4]


def test_a_refused_work_is_an_error_that_says_why(workers, make_worker) -> None:
    pool = WorkerPool(workers, 1)
    peer = make_worker()
    pool.wait_ready(5)
    ticket = pool.submit_runs(0, [ONE], X)
    peer.send(WorkFailed(received(peer, Work)[0].seq, 0, "no layer 9"))
    with pytest.raises(PipelineError, match="no layer 9"):
        pool.result(ticket)


def test_a_dead_worker_ends_the_wait(workers, make_worker) -> None:
    pool = WorkerPool(workers, 1)
    make_worker()
    pool.wait_ready(5)
    ticket = pool.submit_runs(0, [ONE], X)
    workers.bury(0, 5)  # another life's
    assert not pool.update(50)
    workers.bury(0, 0)
    with pytest.raises(PeerLost, match="worker 0 died"):
        pool.result(ticket)


def test_who_does_not_come_is_lost(workers, make_worker) -> None:
    make_worker(1)
    with pytest.raises(PeerLost, match="1 of 2 workers were ready"):
        workers.wait_ready(2, 0.4)
    with pytest.raises(PeerLost, match="worker 0 cannot be reached"):
        workers.send(0, CancelFetch(1))


def test_a_peer_of_another_engine_is_refused(workers, make_worker) -> None:
    make_worker(fingerprint="0" * 64)
    with pytest.raises(PeerLost, match="another engine"):
        workers.wait_ready(1, 5)


def test_malformed_frames_are_counted_and_dropped(workers, make_worker) -> None:
    peer = make_worker()
    workers.wait_ready(1, 5)
    for frames in ([b""], [b"\x22\x01", b"\xc1"], [b"\xff\x01", b"\x80"], [b"\x22\x01", b"\x80", b"x"]):
        peer._work.send_multipart(frames)
    peer.send(Partial(3, 0, 0.0, X))
    assert [message.seq for message in drain(workers)] == [3]
    assert workers.malformed == 4


def test_a_prefetcher_that_copies_nothing_is_given_up(runtime) -> None:
    with peer_socket(runtime, "fetch.sock", "prefetcher", PRINT) as socket:
        link = FetchLink(socket)
        peer = peer_of(runtime, "prefetcher", "fetch.sock", PRINT)
        peer.announce()
        link.wait_ready(5)
        with pytest.raises(PeerLost, match="did not attach the slab"):
            link.attach(AttachSlab("shm", b"/x", 0, 1, 1), 0.2)
        order = link.order(0, 1, 2, [5, 6], PLACED)
        with pytest.raises(PeerLost, match="copied nothing"):
            link.wait(order, 1, 0.2)
        link.cancel(order)
        link.cancel(order)  # asked once only
        _, fetch, _ = received(peer, AttachSlab, Fetch, CancelFetch)
        assert fetch == Fetch(order.id, 0, 1, 2, (5, 6), PLACED)
        peer.send(Fetched(order.id, 0, 1, True, 0.5))
        link.wait(order, 2, 5)  # final with one tile: nothing more comes
        assert (order.landed, order.final) == (1, True)
        peer.send(Fetched(order.id, 0, 2, True, 0.5))
        link.update(200)  # an order that is over hears nothing
        assert order.landed == 1
        peer.close()
