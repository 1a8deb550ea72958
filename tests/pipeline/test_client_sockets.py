"""Sends of a ClientSocket: each outcome is raised at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import zmq
from raw_client import raw_client

from pipeline.serving.client_socket import MOST_FRAMES, SEND_HWM, SLICE, ClientSocket
from protocol.codec import encode
from protocol.messages import VERSION, Heartbeat, Hello
from protocol.sockets import ipc_endpoint

FRAME = b"x" * 50_000


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
            receiver, frames, _ = await socket.receive()
            assert frames == [bytes(f) for f in encode(Hello(VERSION, "silent"))]
            await reading.send(Hello(VERSION, "reading"))
            other, *_ = await socket.receive()
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
                _, frames, dropped = await socket.receive()
            finally:
                working.cancel()
            assert (frames, dropped) == ([b""] * MOST_FRAMES, 50_000 - MOST_FRAMES)
            assert turns >= dropped // SLICE
            _, frames, dropped = await socket.receive()
            assert (frames, dropped) == ([bytes(f) for f in encode(Heartbeat(1.0))], 0)
    finally:
        socket.close()
