"""The coordinator's ends of its peers' sockets: who is heard, who is not, and when a wait ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import zmq
from moving_parts import peer_socket
from peer_words import LIMIT, PRINT, death, received

from pipeline.errors import PeerLost
from pipeline.experts.peers import ChildServerSocket
from protocol.codec import encode
from protocol.messages import (
    VERSION,
    CancelFetch,
    Hung,
    Partial,
    Ready,
    WorkerDied,
    WorkerUp,
)
from protocol.sockets import Identity, connect_dealer, ipc_endpoint

X = np.ones((1, 4), np.float32)
FLOOD = 20_000  # messages of a stranger


@pytest.fixture
def workers(runtime, deaths, said) -> Iterator[ChildServerSocket]:
    with peer_socket(runtime, "w", "worker", PRINT, deaths, said) as socket:
        yield socket


@pytest.fixture
def stranger(runtime) -> Iterator:
    """`stranger(name)`: a raw socket of that identity, on the workers' address."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = []

    def make(name: bytes) -> zmq.Socket[bytes]:
        made.append(connect_dealer(context, ipc_endpoint(runtime, "w"), identity=name))
        return made[-1]

    yield make
    for socket in made:
        socket.close(linger=0)
    context.term()


def drain(socket: ChildServerSocket, seconds: float = 0.3) -> list[object]:
    """What comes within a while."""
    until = time.monotonic() + seconds
    messages = []
    while time.monotonic() < until:
        messages += [message for _, message in socket.receive(20)]
    return messages


def until(socket: ChildServerSocket, count: int) -> list[tuple[int, object]]:
    """The next so many messages."""
    deadline = time.monotonic() + LIMIT
    messages: list[tuple[int, object]] = []
    while len(messages) < count and time.monotonic() < deadline:
        messages += socket.receive(50)
    return messages


def kinds(messages: list[tuple[int, object]]) -> list[tuple[int, type]]:
    return [(index, type(message)) for index, message in messages]


# --- lives ----------------------------------------------------------------------------------------------


def test_a_dead_lifes_late_words_are_dropped(workers, make_peer, deaths) -> None:
    old = make_peer()
    workers.wait_ready(1, LIMIT)
    old.send(Partial(1, 0, 0.0, X))
    assert kinds(until(workers, 2)) == [(0, Ready), (0, Partial)]
    deaths.put(death(0))
    old.send(Partial(2, 0, 0.0, X))
    assert [type(m) for m in drain(workers)] == [WorkerDied]
    assert workers.live == []
    new = make_peer(0, 1)
    assert kinds(until(workers, 1)) == [(0, Ready)]
    old.send(Partial(3, 0, 0.0, X))
    new.send(Partial(4, 1, 0.0, X))
    assert [message.seq for message in drain(workers)] == [4]
    assert workers.stats() == [
        {"role": "worker", "index": 0, "incarnation": 1, "pid": workers.stats()[0]["pid"], "up": False}
    ]


def test_a_successor_that_comes_before_the_news_of_a_death(workers, make_peer, deaths) -> None:
    """The death is told before its Ready, once; the news of it changes nothing any more."""
    old = make_peer(0, 1)
    workers.wait_ready(1, LIMIT)
    new = make_peer(0, 2)
    ready, died, again = until(workers, 3)
    assert kinds([ready, died, again]) == [(0, Ready), (0, WorkerDied), (0, Ready)]
    assert (died[1].incarnation, again[1].incarnation) == (1, 2)
    old.send(Partial(7, 1, 0.0, X))
    new.send(Partial(8, 2, 0.0, X))
    assert [message.seq for message in drain(workers)] == [8]
    deaths.put(death(1))
    assert drain(workers) == []
    assert workers.live == [0]
    workers.send(0, CancelFetch(1))
    received(new, CancelFetch)
    assert workers.recovery.stats()["deaths"] == 1


def test_a_former_life_cannot_come_back(workers, make_peer) -> None:
    make_peer(0, 5)
    workers.wait_ready(1, LIMIT)
    old = make_peer(0, 4)
    old.send(Partial(7, 4, 0.0, X))
    assert [message.incarnation for message in drain(workers)] == [5]


def test_deaths_of_others_are_not_of_this_role(workers, make_peer, deaths) -> None:
    make_peer()
    workers.wait_ready(1, LIMIT)
    for other in (death(0, role="prefetcher"), death(0, role="loader"), death(0, index=1), death(9)):
        deaths.put(other)
    assert [type(m) for m in drain(workers)] == [Ready]
    assert workers.live == [0]


def test_nothing_is_sent_to_the_dead(workers, make_peer, deaths) -> None:
    peer = make_peer()
    workers.wait_ready(1, LIMIT)
    peer.close()  # dead, and nobody knows it yet
    for number in range(2000):  # more than a queue holds
        workers.send(0, CancelFetch(number))
    deaths.put(death(0))
    until(workers, 2)
    workers.send(0, CancelFetch(1))
    workers.send(3, CancelFetch(1))  # who was never there


def test_up_and_hung_are_told_once_for_each_life(workers, make_peer, deaths, said) -> None:
    make_peer(0, 1)
    workers.wait_ready(1, LIMIT)
    for _ in range(3):
        workers.up(0)
        workers.hung(0)
    assert workers.stats()[0]["up"]
    workers.hung(1)  # not there
    assert said == [WorkerUp("worker", 0, 1), Hung("worker", 0, 1)]
    deaths.put(death(1))
    make_peer(0, 2)
    until(workers, 3)
    workers.up(0)
    workers.hung(0)
    assert said[2:] == [WorkerUp("worker", 0, 2), Hung("worker", 0, 2)]
    recovered = workers.recovery.stats()
    assert recovered["deaths"] == 1
    assert 0 <= recovered["ready_s"] <= recovered["whole_s"] < LIMIT


def test_who_does_not_come_is_lost(workers, make_peer) -> None:
    make_peer(1)
    with pytest.raises(PeerLost, match="1 of 2 workers were ready"):
        workers.wait_ready(2, 0.4)
    assert kinds(until(workers, 1)) == [(1, Ready)]  # what was said meanwhile is not lost


def test_given_up_ends_every_wait(workers, make_peer) -> None:
    make_peer()
    workers.wait_ready(1, LIMIT)
    until(workers, 1)
    threading.Timer(0.2, workers.give_up, ["the engine was stopped"]).start()
    began = time.monotonic()
    with pytest.raises(PeerLost, match="the engine was stopped"):
        workers.receive(60_000)
    assert time.monotonic() - began < LIMIT
    with pytest.raises(PeerLost):
        workers.wait_ready(2, LIMIT)


# --- strangers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"version": VERSION + 1}, {"fingerprint": "0" * 64}])
def test_a_peer_of_another_engine_is_refused(workers, stranger, runtime, change) -> None:
    identity = Identity("worker", 0, 0)
    ready = {"version": VERSION, "fingerprint": PRINT} | change
    peer = stranger(identity.prove(b"k" * 32))
    peer.send_multipart(encode(Ready(role="worker", index=0, incarnation=0, pid=1, **ready)))
    peer.send_multipart(encode(Partial(1, 0, 0.0, X)))
    assert drain(workers) == []
    assert (workers.live, workers.malformed) == ([], 1)


def test_malformed_frames_are_counted_and_dropped(workers, make_peer, stranger) -> None:
    peer = make_peer()
    workers.wait_ready(1, LIMIT)
    malformed = stranger(Identity("worker", 1, 0).prove(b"k" * 32))  # a child of ours that has gone mad
    for frames in ([b""], [b"\x22\x01", b"\xc1"], [b"\xff\x01", b"\x80"], [b"\x22\x01", b"\x80", b"x"]):
        malformed.send_multipart(frames)
    deadline = time.monotonic() + LIMIT
    while workers.malformed < 4 and time.monotonic() < deadline:
        drain(workers, 0.05)
    peer.send(Partial(3, 0, 0.0, X))
    assert [message.seq for _, message in until(workers, 1)] == [3]
    assert workers.malformed == 4


def ready_of(identity: Identity) -> list:
    fields = (VERSION, identity.role, identity.index, identity.incarnation, 1, PRINT)
    return encode(Ready(*fields))


NAMES = {
    "no name": b"",
    "no proof": b"worker-0-0",
    "another engine's proof": Identity("worker", 0, 0).prove(b"x" * 32),
    "another life's proof": b"worker-0-0" + Identity("worker", 0, 1).prove(b"k" * 32)[10:],
    "a proof of zeros": b"worker-0-0-" + b"0" * 16,
    "a client's name": b"somebody",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_stranger_is_not_heard_and_takes_no_place(workers, make_peer, stranger, name) -> None:
    intruder = stranger(name)
    intruder.send_multipart(ready_of(Identity("worker", 0, 0)))
    intruder.send_multipart(encode(Partial(1, 0, 0.0, X)))
    assert drain(workers) == []
    assert workers.live == []
    peer = make_peer()  # the place is its own all the same
    workers.wait_ready(1, LIMIT)
    intruder.send_multipart(encode(Partial(2, 0, 0.0, X)))
    peer.send(Partial(3, 0, 0.0, X))
    assert kinds(until(workers, 2)) == [(0, Ready), (0, Partial)]
    assert drain(workers) == []
    assert workers.malformed == 3
    workers.send(0, CancelFetch(1))
    received(peer, CancelFetch)
    assert not intruder.poll(100)


def test_a_child_of_another_role_is_not_heard(workers, stranger) -> None:
    other = stranger(Identity("prefetcher", 0, 0).prove(b"k" * 32))
    other.send_multipart(ready_of(Identity("worker", 0, 0)))
    assert drain(workers) == []
    assert (workers.live, workers.malformed) == ([], 1)


@contextmanager
def flood(make, name: bytes) -> Iterator[threading.Event]:
    """A stranger that sends as fast as it can, until FLOOD messages or the end of the block."""
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


def test_a_strangers_flood_keeps_nobody_from_being_heard(workers, make_peer, stranger) -> None:
    peer = make_peer()
    workers.wait_ready(1, LIMIT)
    until(workers, 1)
    with flood(stranger, b"worker-0-0-" + b"0" * 16):
        deadline = time.monotonic() + LIMIT
        while workers.malformed < 1000 and time.monotonic() < deadline:
            assert workers.receive(0) == []
        slowest = 0.0
        for seq in range(20):
            began = time.monotonic()
            peer.send(Partial(seq, 0, 0.0, X))
            ((_, partial),) = until(workers, 1)
            assert partial.seq == seq
            slowest = max(slowest, time.monotonic() - began)
        began = time.monotonic()
        workers.receive(100)  # is no endless loop, either
        assert time.monotonic() - began < 2
    assert slowest < 2
    assert workers.malformed >= 1000
