"""A client that can send anything, and receives every message, which the library's client cannot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import zmq.asyncio

from protocol.client import Client
from protocol.codec import decode, encode
from protocol.messages import VERSION, Done, Error, Generate, Heartbeat, Hello, Stats, StatsReply, Welcome
from protocol.sockets import connect_dealer

Message = TypeVar("Message")
LIMIT = 20.0  # seconds for an answer


class RawClient:
    """A DEALER on client.sock."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self._barriers = iter(range(1 << 40, 1 << 41))

    async def send(self, *messages: object) -> None:
        for message in messages:
            await self.socket.send_multipart(encode(message))

    async def next(self) -> Any:
        """The next message but heartbeats."""
        async with asyncio.timeout(LIMIT):
            while True:
                message = decode(await self.socket.recv_multipart())
                if not isinstance(message, Heartbeat):
                    return message

    async def expect(self, kind: type[Message]) -> Message:
        message = await self.next()
        assert isinstance(message, kind), message
        return message

    async def until_stats(self) -> tuple[list[Any], dict[str, Any]]:
        """All answers to earlier messages, and the stats. Invalid requests are refused in the order of
        messages: those with a text behind other texts, and those of ids in the engine's thread."""
        messages: list[Any] = []
        for given in ({"prompt": "x"}, {"token_ids": (0,)}):
            barrier = next(self._barriers)
            await self.send(Generate(barrier, max_tokens=0, **given))
            while (message := await self.next()).request != barrier:
                messages.append(message)
        request = next(self._barriers)
        await self.send(Stats(request))
        while not isinstance(message := await self.next(), StatsReply) or message.request != request:
            messages.append(message)
        return messages, message.stats

    async def to_the_end(self, *requests: int) -> dict[int, list[Any]]:
        """All messages of these requests until each has its terminal one, and any that follow."""
        found: dict[int, list[Any]] = {request: [] for request in requests}
        while not all(any(isinstance(m, Done | Error) for m in messages) for messages in found.values()):
            message = await self.next()
            found[message.request].append(message)
        for message in (await self.until_stats())[0]:
            found[message.request].append(message)
        return found


@asynccontextmanager
async def raw_client(endpoint: str, *, hello: bool = True, identity: bytes = b"") -> AsyncIterator[RawClient]:
    """Connected; with `hello` it has its Welcome."""
    socket = connect_dealer(zmq.asyncio.Context.instance(), endpoint, identity=identity)
    try:
        client = RawClient(socket)
        if hello:
            await client.send(Hello(VERSION, "raw"))
            await client.expect(Welcome)
        yield client
    finally:
        socket.close(linger=0)


async def idle(client: Client, kept: bool = True) -> dict[str, Any]:
    """The stats once no request runs or waits, with no KV used; unless `kept`, once none is kept either."""
    held = ("running", "waiting") if kept else ("running", "waiting", "kv_tokens_kept")
    async with asyncio.timeout(LIMIT):
        while True:
            stats = await client.stats()
            if not any(stats["scheduler"][key] for key in held):
                assert stats["scheduler"]["kv_tokens_used"] == 0
                return stats
            await asyncio.sleep(0.05)


def one_line(text: str) -> str:
    """Check an error's text: one line, not empty, no traceback."""
    assert text
    assert "\n" not in text
    assert "Traceback" not in text
    assert len(text) < 300
    return text
