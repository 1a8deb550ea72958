"""The coordinator's `Clients` without an engine: real sockets, and a few fixed answers."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pipeline.serving.clients import Clients
from protocol.client import Client
from protocol.messages import (
    VERSION,
    Cancel,
    Done,
    Error,
    Generate,
    SetPolicy,
    Stats,
    StatsReply,
    Welcome,
)
from protocol.sockets import ipc_endpoint

WELCOME = Welcome(VERSION, "test", "model", "f" * 64, "cpu", "all-host", True, 100, 100, False, False)
LIMIT = 10.0  # seconds


class Service:
    """Answers Stats with the counts of `Clients`, SetPolicy with an Error that quotes the policy's name,
    Generate with a Done that cannot be encoded; handling a Cancel raises."""

    def __init__(self, runtime: Path) -> None:
        self.local = ipc_endpoint(runtime, "client.sock")
        self.clients = Clients(self.local, lambda: WELCOME, self._on_message, self._on_gone)
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
async def service() -> AsyncIterator[Service]:
    """Serves for the length of the block, and must still serve at its end."""
    runtime = Path(tempfile.mkdtemp(prefix="tandem-test-"))
    try:
        running = Service(runtime)
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


async def works(endpoint: str) -> dict[str, Any]:
    """Check that a client of the library is served. Returns the counts."""
    async with Client.connect(endpoint, timeout=LIMIT) as client:
        return await client.stats()
