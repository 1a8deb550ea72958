"""Connections to the engine: one for each API key, so that keys take turns and conversations are private.
Each is kept open across restarts of the engine, in which its requests go on where they were."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePath

from pipeline.assets import model_dir
from pipeline.gateway.errors import ApiError
from pipeline.models.shapes import short_name
from protocol.answer import Result
from protocol.client import Client
from protocol.errors import ProtocolError
from protocol.messages import Sampling, Welcome

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


# ----------------------------------------------------------------------------------------------------------
# Whether the engine computes: it may answer all messages, and hang in a step. Where none was seen for some
# seconds, one is asked for: a single token, which nothing counts and nothing keeps.


PERIOD = 10.0  # seconds after a step in which no other is asked for
LIMIT = 10.0  # seconds for a step; the supervisor restarts an engine that hangs for a minute
LOOK = 0.1  # seconds between two looks at the engine's counters


class Health:
    """The latest knowledge of whether one engine computes. Used by the event loop."""

    def __init__(self, links: EngineLinks, period: float = PERIOD, limit: float = LIMIT) -> None:
        self._links = links
        self._period, self._limit = period, limit
        self._known = 0.0  # time until which no step is asked for
        self._asking: asyncio.Task[str] | None = None

    async def check(self) -> None:
        """Raises ApiError unless the engine has just computed, or does so now."""
        if not self._links.ready:
            raise ApiError(503, "the engine is not ready: it is being started or restarted")
        if time.monotonic() < self._known:
            return
        if self._asking is None:  # one step for all that wait
            self._asking = asyncio.create_task(self._ask(), name="health")
        if reason := await asyncio.shield(self._asking):
            raise ApiError(503, reason)

    async def _ask(self) -> str:
        """Returns why no step was seen, "" where one was."""
        try:
            async with asyncio.timeout(self._limit):
                await _see_step(await self._links.client())
        except TimeoutError:
            return f"the engine hangs: it has not ended a step in {self._limit:g} s"
        except (ApiError, ProtocolError) as e:
            return f"the engine does not compute: {e}"
        finally:
            self._asking = None
        self._known = time.monotonic() + self._period
        return ""


async def _see_step(client: Client) -> None:
    """Wait for the end of a step: of requests that run, else of one for a single token. Raises
    ProtocolError."""
    before, running = await _progress(client)
    own: asyncio.Task[Result] | None = None
    try:
        while own is None or not own.done():
            if own is None and not running:
                # A seed of its own, since the engine counts those that it gives.
                one = {"token_ids": (0,), "max_tokens": 1, "sampling": Sampling(seed=0)}
                answer = client.generate(**one, counted=False, reuse=False)
                own = asyncio.create_task(answer.result())
            if own is None:
                await asyncio.sleep(LOOK)
            else:
                await asyncio.wait((own,), timeout=LOOK)
            steps, running = await _progress(client)
            if steps != before:
                return
        own.result()
    finally:
        if own is not None:
            own.cancel()
            await asyncio.gather(own, return_exceptions=True)


async def _progress(client: Client) -> tuple[int, int]:
    """Returns how many steps were computed, and how many requests run."""
    stats = await client.stats()
    return sum(phase["steps"] for phase in stats["engine"].values()), stats["scheduler"]["running"]
