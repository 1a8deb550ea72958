"""Connections to the engine: one for each API key, so that keys take turns and conversations are private.
Each is kept open across restarts of the engine, in which its requests go on where they were."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePath

from pipeline.assets import model_dir
from pipeline.gateway.errors import ApiError
from pipeline.models.shapes import short_name
from protocol.client import Client
from protocol.errors import ProtocolError
from protocol.messages import Welcome

log = logging.getLogger(__name__)

EMBEDDED = "tandem-embedded"
CONNECT_SECONDS = 60.0  # for an engine that is still being started
RETRY_SECONDS = 600.0  # for a restart: a large model's backbone is read again
PAUSE_SECONDS = 0.2  # before a connection that failed is made again
OPENING_SECONDS = 5.0  # that a request waits for the first connection, as in the first moments of a start


@dataclass
class _Link:
    """One key's connection."""

    client: Client | None = None
    paused: bool = False  # the engine is restarting
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class EngineLinks:
    """The connections of all API keys. Used by the event loop."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._links: dict[str, _Link] = {}
        self.restarts = 0  # of the engine, as the first connection has seen them

    @property
    def ready(self) -> bool:
        """Returns whether the engine answers now."""
        link = self._links.get("")
        return link is not None and link.client is not None and not link.paused

    def start(self) -> None:
        """Begin to connect."""
        self._open("")

    async def client(self, name: str = "") -> Client:
        """Returns the connection of the API key with this name. It may be reconnecting; then requests are
        sent when it has. Raises ApiError while there is none."""
        link = self._links.get(name) or self._open(name)
        if link.client is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(OPENING_SECONDS):
                    await link.opened.wait()
        if link.client is None:
            raise ApiError(503, "the engine is not ready: it is being started")
        return link.client

    def _open(self, name: str) -> _Link:
        link = self._links[name] = _Link()
        link.task = asyncio.create_task(self._keep(name, link), name=f"connection of {name or 'all'}")
        return link

    async def _keep(self, name: str, link: _Link) -> None:
        while True:
            try:
                async with Client.connect(
                    self._endpoint,
                    name=f"http/{name}" if name else "http",
                    timeout=CONNECT_SECONDS,
                    retry=RETRY_SECONDS,
                ) as client:
                    client.on_pause = lambda reason: self._on_pause(link, reason)
                    client.on_reconnect = lambda: self._on_reconnect(name, link)
                    link.client, link.paused = client, False
                    link.opened.set()
                    reason = await client.lost()
                    log.warning("the connection to the engine has ended: %s", reason)
            except ProtocolError as e:
                log.debug("no connection to the engine: %s", e)
            finally:
                link.client = None
                link.opened.clear()
            await asyncio.sleep(PAUSE_SECONDS)

    def _on_pause(self, link: _Link, reason: ProtocolError) -> None:
        link.paused = True
        log.info("waiting for the engine: %s", reason)

    def _on_reconnect(self, name: str, link: _Link) -> None:
        link.paused = False
        self.restarts += not name

    async def close(self) -> None:
        """Close all connections. Requests that still run end with EngineGone."""
        tasks = [link.task for link in self._links.values() if link.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def model_name(welcome: Welcome) -> str:
    """Returns the model as clients know it: a folder without those before it, of the Hub's cache ORG/NAME."""
    if PurePath(welcome.model) == model_dir():
        return EMBEDDED
    return short_name(welcome.model) or welcome.model
