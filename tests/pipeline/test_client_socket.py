"""The socket of clients: identities, and outcomes of sends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from client_service import service
from raw_client import RawClient, raw_client

from pipeline.fairness import RateLimiter
from pipeline.serving.clients import (
    ANONYMOUS_REFUSALS,
    LONGEST_ERROR,
    MOST_FRAMES,
    NO_IDENTITY,
    SEND_HWM,
    SLICE,
    ClientSocket,
    frames_of,
)
from protocol.codec import decode, encode
from protocol.messages import VERSION, Done, Error, Heartbeat, Hello, Stats, StatsReply
from protocol.sockets import ipc_endpoint

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


@pytest.mark.parametrize("length", [LONGEST_ERROR, LONGEST_ERROR + 1])
def test_errors_are_cut_and_their_request_stays(length: int) -> None:
    kept = "x" * LONGEST_ERROR + "..." * (length > LONGEST_ERROR)
    for message, wanted in (
        (Error(4, "x" * length), Error(4, kept)),
        (Done(4, "error", "x" * length, usage=True), Done(4, "error", kept, usage=True)),
    ):
        assert decode([bytes(frame) for frame in frames_of(message)]) == wanted
