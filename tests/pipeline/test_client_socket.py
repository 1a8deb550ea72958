"""The socket of clients and the queue for one of them, on real sockets: identities, outcomes of sends, and
messages in order with the bytes and seconds that wait."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from client_service import service
from raw_client import RawClient, raw_client
from waiting import until

from pipeline.fairness import RateLimiter
from pipeline.serving import clients
from pipeline.serving.clients import (
    ANONYMOUS_REFUSALS,
    LONGEST_ERROR,
    MOST_FRAMES,
    NO_IDENTITY,
    OVERHEAD,
    SEND_HWM,
    SLICE,
    ClientSocket,
    Frames,
    Outbox,
    frames_of,
)
from protocol.codec import decode, encode
from protocol.messages import VERSION, Done, Error, Heartbeat, Hello, Stats, StatsReply, Token
from protocol.sockets import ipc_endpoint

CLIENT = b"client"
TAKEN = 2  # messages that the two sockets hold beside the outbox
MESSAGES = [Heartbeat(1.0), Token(1, 0, 5, "x", 1.0, 2), *(Heartbeat(float(i)) for i in range(2, 5))]
FRAME = b"x" * 50_000


# --- identities ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def client_named(name: bytes, endpoint: str) -> AsyncIterator[RawClient]:
    """With this identity; for an empty one the engine's socket makes one."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        if name:
            socket.setsockopt(zmq.ROUTING_ID, name)
        socket.connect(endpoint)
        yield RawClient(socket)


@pytest.mark.parametrize("name", [b"", b"a client", b"x" * 15])
async def test_a_client_without_a_secret_identity_gets_no_welcome(name: bytes) -> None:
    async with service() as running, client_named(name, running.local) as client:
        await client.send(Hello(VERSION), Stats(1))
        for _ in range(2):
            assert await client.next() == Error(-1, NO_IDENTITY)
        refusals = running.clients._socket.refusals = RateLimiter(ANONYMOUS_REFUSALS)
        refusals._began = math.inf  # all of it in one second
        for _ in range(3 * ANONYMOUS_REFUSALS):
            await client.send(Hello(VERSION))
        async with raw_client(running.local) as other:  # which is heard behind them
            await other.send(Stats(1))
            await other.expect(StatsReply)
        for _ in range(ANONYMOUS_REFUSALS):
            assert await client.next() == Error(-1, NO_IDENTITY)
        assert not await client.socket.poll(50)
        assert len(running.received) == 1
        assert running.clients.counts()["connected"] <= 1


# --- sends --------------------------------------------------------------------------------------------------


def send_many(socket: ClientSocket, receiver: bytes, sent: list[int]) -> None:
    """Many more messages than queues hold; `sent` collects those that were taken."""
    for count in range(1 << 20):
        socket.send(receiver, [count.to_bytes(8, "big"), FRAME])
        sent.append(count)


async def test_send_raises_for_a_full_queue_and_for_an_unknown_receiver(runtime: Path) -> None:
    endpoint = ipc_endpoint(runtime, "client.sock")
    socket = ClientSocket(endpoint)
    try:
        async with (
            raw_client(endpoint, hello=False) as silent,
            raw_client(endpoint, hello=False) as reading,
            asyncio.timeout(20.0),
        ):
            await silent.send(Hello(VERSION, "silent"))
            receiver, frames = await socket.receive()
            assert frames == [bytes(f) for f in encode(Hello(VERSION, "silent"))]
            await reading.send(Hello(VERSION, "reading"))
            other, _ = await socket.receive()
            sent: list[int] = []
            with pytest.raises(zmq.Again):
                send_many(socket, receiver, sent)
            assert len(sent) >= SEND_HWM  # some wait in the receiver's own queue
            socket.send(other, list(encode(Heartbeat(1.0))))  # another client's queue is its own
            assert await reading.socket.poll(10_000)
            with pytest.raises(zmq.ZMQError) as unknown:
                socket.send(b"unknown", [b"x"])
            assert (type(unknown.value), unknown.value.errno) == (zmq.ZMQError, zmq.EHOSTUNREACH)
    finally:
        socket.close()


async def test_a_message_of_very_many_frames_does_not_hold_the_event_loop(runtime: Path) -> None:
    endpoint = ipc_endpoint(runtime, "client.sock")
    socket = ClientSocket(endpoint)
    turns = 0

    async def other_work() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    try:
        async with raw_client(endpoint, hello=False) as hostile, asyncio.timeout(20.0):
            await hostile.socket.send_multipart([b""] * 50_000)
            await hostile.send(Heartbeat(1.0))
            working = asyncio.create_task(other_work())
            try:
                _, frames = await socket.receive()
            finally:
                working.cancel()
            assert frames == [b""] * (MOST_FRAMES + 1)
            assert turns >= 50_000 // SLICE - 1
            _, frames = await socket.receive()
            assert frames == [bytes(f) for f in encode(Heartbeat(1.0))]
    finally:
        socket.close()


# --- the queue for a client ---------------------------------------------------------------------------------


@dataclass
class Ends:
    """An outbox and its client; `attempts`: the calls of `send`."""

    router: zmq.Socket[bytes]
    dealer: zmq.Socket[bytes]
    attempts: int = 0

    def __post_init__(self) -> None:
        self.box = Outbox(self.send)

    def send(self, frames: Frames) -> None:
        self.attempts += 1
        self.router.poll(0)  # a coordinator reads its sockets all the time: so it notices what a client does
        self.router.send_multipart([CLIENT, *frames], zmq.NOBLOCK)

    def read(self, count: int) -> list[object]:
        return [decode(self.dealer.recv_multipart()) for _ in range(count)]

    async def retried(self) -> None:
        """The full socket has been tried a few more times."""
        seen = self.attempts
        await until(lambda: self.attempts > seen + 2)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setattr(clients, "RETRY", 0.0)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        router.set_hwm(1)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.bind("inproc://outbox")
        dealer.set_hwm(1)
        dealer.setsockopt(zmq.ROUTING_ID, CLIENT)
        dealer.setsockopt(zmq.RCVTIMEO, 10_000)
        dealer.connect("inproc://outbox")
        dealer.send(b"")
        assert router.recv_multipart() == [CLIENT, b""]
        yield Ends(router, dealer)


async def test_full_socket_is_tried_again_and_then_no_longer_full(ends: Ends) -> None:
    box, sizes = ends.box, [OVERHEAD + len(b"".join(encode(message))) for message in MESSAGES]
    for message in MESSAGES:
        box.put(message)
    assert (len(box), box.queued_bytes, box.full_since) == (len(MESSAGES), sum(sizes), None)
    pumping = asyncio.create_task(box.pump())
    since = []
    for first in (0, 1):  # full, a message later full again
        await ends.retried()
        assert box.queued_bytes == sum(sizes[TAKEN + first :])
        since.append(box.full_since)
        await ends.retried()
        assert box.full_since == since[-1]  # since the first refusal, not the latest
        assert ends.read(1) == [MESSAGES[first]]
    assert None not in since
    assert since[0] < since[1]
    await ends.retried()
    assert ends.read(1) == MESSAGES[2:3]
    await asyncio.wait_for(box.empty(), 10)
    assert ends.read(TAKEN) == MESSAGES[3:]
    assert (len(box), box.queued_bytes, box.full_since) == (0, 0, None)
    pumping.cancel()


async def test_disconnect_ends_the_pump_of_a_full_socket(ends: Ends) -> None:
    for message in MESSAGES:
        ends.box.put(message)
    pumping = asyncio.create_task(ends.box.pump())
    await ends.retried()
    assert not pumping.done()
    ends.dealer.close(linger=0)
    await asyncio.wait_for(pumping, 10)


@pytest.mark.parametrize("length", [LONGEST_ERROR, LONGEST_ERROR + 1])
def test_errors_are_cut_and_their_request_stays(length: int) -> None:
    kept = "x" * LONGEST_ERROR + "..." * (length > LONGEST_ERROR)
    for message, wanted in (
        (Error(4, "x" * length), Error(4, kept)),
        (Done(4, "error", "x" * length, usage=True), Done(4, "error", kept, usage=True)),
    ):
        assert decode([bytes(frame) for frame in frames_of(message)]) == wanted
