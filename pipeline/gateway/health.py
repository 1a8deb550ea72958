"""Whether the engine computes: it may answer all messages, and hang in a step. Where none was seen for some
seconds, one is asked for: a single token, which nothing counts and nothing keeps."""

from __future__ import annotations

import asyncio
import time

from pipeline.gateway.engine_links import EngineLinks
from pipeline.gateway.errors import ApiError
from protocol.answer import Result
from protocol.client import Client
from protocol.errors import ProtocolError
from protocol.messages import Sampling

PERIOD = 10.0  # seconds after a step in which no other is asked for
LIMIT = 10.0  # seconds for a step; the supervisor restarts an engine that hangs for a minute
LOOK = 0.1  # seconds between two looks at the engine's counters


class Health:
    """What is known about one engine. Used by the event loop."""

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
