"""The coordinator's `Clients` without an engine: real sockets, and a few fixed answers."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from child_messages import KEY
from free_port import free_port
from raw_client import RawClient, raw_client

from pipeline.serving.clients import Clients
from protocol.client import Client
from protocol.keys import Address, new_keys
from protocol.messages import (
    VERSION,
    Cancel,
    Done,
    Error,
    Generate,
    Hello,
    RemoteClient,
    SetPolicy,
    Stats,
    StatsReply,
    Welcome,
)
from protocol.sockets import Identity, ipc_endpoint

WELCOME = Welcome(VERSION, "test", "model", "f" * 64, "cpu", "all-host", True, 100, 100, False, False)
ENGINE, CLIENT = new_keys()
LIMIT = 10.0  # seconds


class Service:
    """Answers Stats with the counts of `Clients`, SetPolicy with an Error that quotes the policy's name,
    Generate with a Done that cannot be encoded; handling a Cancel raises."""

    def __init__(self, runtime: Path, remote: bool = False) -> None:
        self.local = ipc_endpoint(runtime, "client.sock")
        self.remote = ipc_endpoint(runtime, "remote.sock")
        handlers = (lambda: WELCOME, self._on_message, self._on_gone)
        self.clients = Clients(self.local, *handlers, remote=self.remote if remote else None, key=KEY)
        self.received: list[tuple[bytes, object]] = []
        self.gone: list[bytes] = []

    def _on_message(self, client: bytes, message: Any) -> None:
        self.received.append((client, message))
        match message:
            case Stats():
                self.clients.send(client, StatsReply(message.request, dict(self.clients.counts())))
            case SetPolicy():
                self.clients.send(client, Error(message.request, f"no policy {message.policy}"))
            case Generate():
                self.clients.send(client, Done(message.request, "stop", text=message.prompt + "\ud800"))
            case Cancel():
                raise ZeroDivisionError("a bug")

    def _on_gone(self, client: bytes) -> None:
        self.gone.append(client)


@asynccontextmanager
async def service(remote: bool = False) -> AsyncIterator[Service]:
    """Serves for the length of the block, and must still serve at its end."""
    runtime = Path(tempfile.mkdtemp(prefix="tandem-test-"))
    try:
        running = Service(runtime, remote)
        serving = asyncio.create_task(running.clients.serve())
        try:
            yield running
            await works(running.local)
            assert not serving.done()
        finally:
            serving.cancel()
            await asyncio.wait([serving])
            running.clients.close()
    finally:
        shutil.rmtree(runtime)


_numbers = itertools.count()


@asynccontextmanager
async def introduced(
    endpoint: str, account: str, right: str, incarnation: int = 0
) -> AsyncIterator[RawClient]:
    """A connection of the door, which has introduced its client."""
    identity = Identity("remote", next(_numbers), incarnation).prove(KEY)
    async with raw_client(endpoint, hello=False, identity=identity) as client:
        await client.send(RemoteClient(account, right, "127.0.0.1"))
        yield client


@asynccontextmanager
async def remote_client(
    endpoint: str, account: str, right: str = "use", *, incarnation: int = 0, hello: bool = True
) -> AsyncIterator[RawClient]:
    """A client behind the door."""
    async with introduced(endpoint, account, right, incarnation) as client:
        if hello:
            await client.send(Hello(VERSION, "remote"))
            await client.expect(Welcome)
        yield client


def free_endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


async def works(where: str | Address) -> dict[str, Any]:
    """Check that a client of the library is served. Returns the counts."""
    async with Client.connect(where, timeout=LIMIT) as client:
        return await client.stats()
