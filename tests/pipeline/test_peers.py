"""The coordinator's ends of its children's sockets: which messages are accepted, and when a wait ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import zmq
from child_messages import KEY, LIMIT, PRINT, child_socket, exit_of, received
from waiting import Stopwatch

from pipeline.errors import PeerLost
from pipeline.experts import peers
from pipeline.experts.peers import STALL_SLICE, ChildServerSocket, ProgressWatch
from protocol.codec import encode
from protocol.messages import VERSION, CancelFetch, Hung, Partial, Ready, WorkerDied, WorkerUp
from protocol.sockets import Identity, connect_dealer, ipc_endpoint

X = np.ones((1, 4), np.float32)
FLOOD = 20_000  # messages of a foreign process


@pytest.fixture
def workers(runtime, exits, reports) -> Iterator[ChildServerSocket]:
    with child_socket(runtime, "w", "worker", PRINT, exits, reports) as socket:
        yield socket


@pytest.fixture
def foreign(runtime) -> Iterator:
    """`foreign(name)`: a raw socket of that identity, connected to the workers' address."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = []

    def make(name: bytes) -> zmq.Socket[bytes]:
        made.append(connect_dealer(context, ipc_endpoint(runtime, "w"), identity=name))
        return made[-1]

    yield make
    for socket in made:
        socket.close(linger=0)
    context.term()


@pytest.fixture
def child(workers, make_child):
    """Worker 0, which has announced itself."""
    child = make_child()
    workers.wait_ready(1, LIMIT)
    return child


def drain(socket: ChildServerSocket, count: int = 0, refused: int = 0) -> list[object]:
    """The messages until there are `count` and as many were refused, and those that follow soon."""
    deadline = time.monotonic() + LIMIT
    messages = []
    while (len(messages) < count or socket.malformed < refused) and time.monotonic() < deadline:
        messages += [message for _, message in socket.receive(20)]
    for _ in range(5):
        messages += [message for _, message in socket.receive(20)]
    return messages


def until(socket: ChildServerSocket, count: int) -> list[tuple[int, object]]:
    """The next `count` messages."""
    deadline = time.monotonic() + LIMIT
    messages: list[tuple[int, object]] = []
    while len(messages) < count and time.monotonic() < deadline:
        messages += socket.receive(50)
    return messages


def running(socket: ChildServerSocket) -> list[int]:
    return [child["index"] for child in socket.stats()]


def kinds(messages: list[tuple[int, object]]) -> list[tuple[int, type]]:
    return [(index, type(message)) for index, message in messages]


# --- generations ---------------------------------------------------------------------------------------


def test_late_messages_of_an_exited_child_are_dropped(workers, child, make_child, exits) -> None:
    child.send(Partial(1, 0, 0.0, X))
    assert kinds(until(workers, 2)) == [(0, Ready), (0, Partial)]
    exits.put(exit_of(0))
    child.send(Partial(2, 0, 0.0, X))
    assert [type(m) for m in drain(workers, 1)] == [WorkerDied]
    assert running(workers) == []
    assert workers.recovery_stats() == {"deaths": 1, "whole_s": None}
    new = make_child(0, 1)
    assert kinds(until(workers, 1)) == [(0, Ready)]
    child.send(Partial(3, 0, 0.0, X))
    new.send(Partial(4, 1, 0.0, X))
    assert [message.seq for message in drain(workers, 1)] == [4]
    assert workers.stats() == [
        {"role": "worker", "index": 0, "generation": 1, "pid": os.getpid(), "up": False}
    ]


def test_ready_before_the_exit_event_of_the_previous_generation(workers, make_child, exits) -> None:
    """The exit is delivered before the Ready, once; the later event changes nothing."""
    old = make_child(0, 1)
    workers.wait_ready(1, LIMIT)
    new = make_child(0, 2)
    ready, exited, again = until(workers, 3)
    assert kinds([ready, exited, again]) == [(0, Ready), (0, WorkerDied), (0, Ready)]
    assert (exited[1].generation, again[1].generation) == (1, 2)
    old.send(Partial(7, 1, 0.0, X))
    new.send(Partial(8, 2, 0.0, X))
    assert [message.seq for message in drain(workers, 1)] == [8]
    exits.put(exit_of(1))
    assert drain(workers) == []
    assert running(workers) == [0]
    workers.send(0, CancelFetch(1))
    received(new, CancelFetch)
    assert workers.recovery_stats()["deaths"] == 1


def test_exits_of_other_children_are_ignored(workers, child, exits) -> None:
    for other in (exit_of(0, role="prefetcher"), exit_of(0, role="loader"), exit_of(0, index=1), exit_of(9)):
        exits.put(other)
    assert [type(m) for m in drain(workers, 1)] == [Ready]
    assert running(workers) == [0]


def test_messages_to_an_exited_child_are_dropped(workers, child, exits) -> None:
    child.close()  # exited, and not yet reported by the supervisor
    for number in range(2000):  # more than a queue holds
        workers.send(0, CancelFetch(number))
    exits.put(exit_of(0))
    until(workers, 2)
    workers.send(0, CancelFetch(1))
    workers.send(3, CancelFetch(1))  # a child that has not announced itself


def fill(workers: ChildServerSocket, limit: int = 100_000) -> int:
    """Send to worker 0, which reads nothing, until a send waits in vain or drops the message because the
    worker has exited; how many messages were sent before."""
    for count in range(limit):
        try:
            workers.send(0, CancelFetch(count))
        except PeerLost:
            return count
        if not running(workers):
            return count
    raise AssertionError("the queue is never full")


@pytest.mark.parametrize("what", ["a message", "another child's start", "its exit"])
def test_what_arrives_while_a_send_waits_is_received_next(
    workers, child, make_child, exits, monkeypatch, what: str
) -> None:
    assert kinds(until(workers, 1)) == [(0, Ready)]
    monkeypatch.setattr(peers, "SEND_LIMIT", 0.1)
    if what == "a message":
        child.send(Partial(5, 0, 0.0, X))
    elif what == "another child's start":
        make_child(1, 4)
    else:
        exits.put(exit_of(0))
    assert fill(workers) > 100
    if what != "its exit":
        with pytest.raises(PeerLost, match=r"^worker 0 took no message for 0 s$"):
            workers.send(0, CancelFetch(1))
    assert running(workers) == {"a message": [0], "another child's start": [0, 1], "its exit": []}[what]
    expected = {
        "a message": [(0, Partial)],
        "another child's start": [(1, Ready)],
        "its exit": [(0, WorkerDied)],
    }
    watch = Stopwatch()
    assert kinds(workers.receive(3000)) == expected[what]
    assert watch.shows(0.0, 2.0)  # at once
    assert workers.receive(0) == []  # each once


def test_second_ready_of_a_running_child_changes_nothing(workers, child, exits) -> None:
    workers.mark_up(0, 0)
    child.announce()
    assert [type(m) for m in drain(workers, 1)] == [Ready]  # the first
    assert workers.is_up(0)
    assert workers.recovery_stats()["deaths"] == 0


def test_up_and_hung_are_reported_once_for_each_generation(workers, make_child, exits, reports) -> None:
    make_child(0, 1)
    workers.wait_ready(1, LIMIT)
    for _ in range(3):
        workers.mark_up(0, 1)
        workers.report_hung(0)
    assert workers.stats()[0]["up"]
    workers.report_hung(1)  # a child that does not run
    assert reports == [WorkerUp("worker", 0, 1), Hung("worker", 0, 1)]
    exits.put(exit_of(1))
    make_child(0, 2)
    until(workers, 3)
    workers.mark_up(0, 1)  # an earlier generation's answer
    assert not workers.is_up(0)
    workers.mark_up(0, 2)
    assert workers.is_up(0)
    workers.report_hung(0)
    assert reports[2:] == [WorkerUp("worker", 0, 2), Hung("worker", 0, 2)]
    recovered = workers.recovery_stats()
    assert recovered["deaths"] == 1
    assert 0 <= recovered["whole_s"] < LIMIT


def test_missing_child_is_lost_after_the_limit(workers, make_child) -> None:
    make_child(1)
    workers.wait_ready(1, LIMIT)
    with pytest.raises(PeerLost, match="1 of 2 workers were ready"):
        workers.wait_ready(2, 0.1)
    assert kinds(until(workers, 1)) == [(1, Ready)]  # messages received meanwhile are not lost


def test_give_up_ends_every_wait(workers, exits, child) -> None:
    until(workers, 1)
    threading.Timer(0.2, exits.give_up, ["the engine was stopped"]).start()
    began = time.monotonic()
    with pytest.raises(PeerLost, match="the engine was stopped"):
        workers.receive(60_000)
    assert time.monotonic() - began < LIMIT
    with pytest.raises(PeerLost):
        workers.wait_ready(2, LIMIT)


# --- foreign processes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"version": VERSION + 1}, {"fingerprint": "0" * 64}])
def test_child_of_another_version_or_store_is_refused(workers, foreign, runtime, change) -> None:
    identity = Identity("worker", 0, 0)
    ready = {"version": VERSION, "fingerprint": PRINT} | change
    child = foreign(identity.prove(KEY))
    child.send_multipart(encode(Ready(role="worker", index=0, generation=0, pid=1, **ready)))
    child.send_multipart(encode(Partial(1, 0, 0.0, X)))
    assert drain(workers, refused=1) == []
    assert (running(workers), workers.malformed) == ([], 1)


def test_malformed_frames_are_counted_and_dropped(workers, child, foreign) -> None:
    malformed = foreign(Identity("worker", 1, 0).prove(KEY))  # a child of this engine, damaged
    for frames in ([b""], [b"\x22\x01", b"\xc1"], [b"\xff\x01", b"\x80"], [b"\x22\x01", b"\x80", b"x"]):
        malformed.send_multipart(frames)
    drain(workers, refused=4)
    child.send(Partial(3, 0, 0.0, X))
    assert [message.seq for _, message in until(workers, 1)] == [3]
    assert workers.malformed == 4


def ready_of(identity: Identity) -> list:
    fields = (VERSION, identity.role, identity.index, identity.generation, 1, PRINT)
    return encode(Ready(*fields))


NAMES = {
    "no name": b"",
    "no proof": b"worker-0-0",
    "another engine's proof": Identity("worker", 0, 0).prove(b"x" * 32),
    "another generation's proof": b"worker-0-0" + Identity("worker", 0, 1).prove(KEY)[10:],
    "a proof of zeros": b"worker-0-0-" + b"0" * 16,
    "a client's name": b"client-1",
    "another role's proof": Identity("prefetcher", 0, 0).prove(KEY),
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_unproven_identity_is_ignored_and_blocks_no_child(workers, make_child, foreign, name) -> None:
    intruder = foreign(name)
    intruder.send_multipart(ready_of(Identity("worker", 0, 0)))
    intruder.send_multipart(encode(Partial(1, 0, 0.0, X)))
    assert drain(workers, refused=2) == []
    assert running(workers) == []
    child = make_child()  # the real child can still announce itself
    workers.wait_ready(1, LIMIT)
    intruder.send_multipart(encode(Partial(2, 0, 0.0, X)))
    child.send(Partial(3, 0, 0.0, X))
    assert kinds(until(workers, 2)) == [(0, Ready), (0, Partial)]
    assert drain(workers, refused=3) == []
    assert workers.malformed == 3
    workers.send(0, CancelFetch(1))
    received(child, CancelFetch)
    assert not intruder.poll(100)


@contextmanager
def flood(make, name: bytes) -> Iterator[threading.Event]:
    """A foreign process that sends as fast as it can, FLOOD messages or until the block ends."""
    socket, over = make(name), threading.Event()
    frames = ready_of(Identity("worker", 0, 0))

    def pour() -> None:
        for _ in range(FLOOD):
            while not over.is_set():
                try:
                    socket.send_multipart(frames, zmq.NOBLOCK)
                    break
                except zmq.Again:
                    over.wait(0.001)

    thread = threading.Thread(target=pour)
    thread.start()
    try:
        yield over
    finally:
        over.set()
        thread.join(LIMIT)


def test_socket_is_behind_until_all_messages_are_received(workers, child, monkeypatch) -> None:
    until(workers, 1)
    assert workers.receive(0) == []
    assert not workers.behind
    with monkeypatch.context() as patch:
        patch.setattr(peers, "DRAIN_SECONDS", 0.0)
        child.send(Partial(3, 0, 0.0, X))
        assert workers.receive(int(1000 * LIMIT)) == []
        assert workers.behind
    assert [message.seq for _, message in until(workers, 1)] == [3]
    workers.behind = True  # as where the time ran out just after the last message
    assert workers.receive(0) == []
    assert not workers.behind


def test_flood_of_a_foreign_process_delays_no_child(workers, child, foreign) -> None:
    until(workers, 1)
    with flood(foreign, b"worker-0-0-" + b"0" * 16):
        deadline = time.monotonic() + LIMIT
        while workers.malformed < 1000 and time.monotonic() < deadline:
            assert workers.receive(0) == []
        for seq in range(20):
            child.send(Partial(seq, 0, 0.0, X))
            ((_, partial),) = until(workers, 1)
            assert partial.seq == seq
        workers.receive(100)  # returns, although messages keep arriving
    assert workers.malformed >= 1000


def test_seconds_without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr(ProgressWatch, "clock", lambda watch: now[0])
    watch = ProgressWatch()

    def stalled(after: float, ticks: int) -> float:
        now[0] += after
        return watch.stalled(ticks)

    assert stalled(0, 0) == 0.0
    assert stalled(0.04, 0) == pytest.approx(0.04)
    assert stalled(0.05, 0) == pytest.approx(0.09)
    assert stalled(60, 0) == pytest.approx(0.09 + STALL_SLICE)  # this process stood still itself
    assert stalled(0.05, 1) == 0.0
    assert stalled(0.03, 1) == pytest.approx(0.03)
    watch.reset()
    assert stalled(0.05, 1) == 0.0
    assert stalled(0.02, 1) == pytest.approx(0.02)
