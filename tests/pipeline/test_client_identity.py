"""Clients without an identity of their own, which other clients could guess, are not served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio
from client_service import service
from raw_client import RawClient

from pipeline.serving.client_socket import ANONYMOUS_REFUSALS, NO_IDENTITY
from protocol.messages import VERSION, Error, Hello, Stats


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
        for _ in range(3 * ANONYMOUS_REFUSALS):
            await client.send(Hello(VERSION))
        await asyncio.sleep(0.5)
        answers = 0
        while await client.socket.poll(100):
            await client.socket.recv_multipart()
            answers += 1
        assert 0 < answers < 3 * ANONYMOUS_REFUSALS
        assert running.received == []
        assert running.clients.counts()["connected"] == 0


async def test_a_client_with_16_bytes_is_served() -> None:
    async with service() as running, client_named(b"x" * 16, running.local) as client:
        await client.send(Hello(VERSION), Stats(1))
        await client.next()
        assert running.clients.counts()["connected"] == 1
