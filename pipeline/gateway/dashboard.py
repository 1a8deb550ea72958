"""The dashboard's contents, as server-sent events. The engine is asked once for all pages, and only while
there is one.

`state`: whether the engine answers; `about`: what it is; `counters`: totals since its start, once a second;
`experts`: what has changed since the event before, up to ten times a second.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.gateway.call import event_of
from pipeline.gateway.engine_links import EngineLinks, model_name
from pipeline.gateway.errors import ApiError
from protocol.client import Client
from protocol.errors import ProtocolError
from protocol.messages import ExpertActivityReply, Welcome

log = logging.getLogger(__name__)

PERIOD = 0.1  # seconds between two `experts`
COUNTERS_PERIOD = 1.0  # between two `counters`
AWAY_PERIOD = 0.25  # between two looks at an engine that does not answer
ANSWER_SECONDS = 2.0  # within which a running engine answers
MOST_WAITING = 32  # events for a browser that does not read them; older ones are dropped
MOST_BROWSERS = 16


class Feed:
    """The events of all browsers. Used by the event loop."""

    def __init__(self, links: EngineLinks) -> None:
        self._links = links
        self._queues: dict[asyncio.Queue[bytes | None], str] = {}  # with their keys, the oldest first
        self._latest: dict[str, bytes] = {}  # of each event whose next one does not add to it
        self._polling: asyncio.Task[None] | None = None
        self._closed = False

    async def events(self, key: str = "") -> AsyncGenerator[bytes, None]:
        """Yields the events of one browser. Where there are too many, the oldest of the key that has most
        ends, if that has more than this one. Raises ApiError."""
        if len(self._queues) >= MOST_BROWSERS:
            self._make_room(key)
        if self._closed:
            raise ApiError(503, "the server is shutting down")
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(MOST_WAITING)
        self._queues[queue] = key
        try:
            if self._polling is None:
                self._latest.clear()
                self._polling = asyncio.create_task(self._poll(), name="dashboard")
            for event in list(self._latest.values()):
                yield event
            while (next_event := await queue.get()) is not None:
                yield next_event
        finally:
            self._queues.pop(queue, None)
            if not self._queues and self._polling is not None:
                self._polling.cancel()
                self._polling = None

    def _make_room(self, key: str) -> None:
        counts = Counter(self._queues.values())
        crowded, most = counts.most_common(1)[0]
        if most <= counts[key] + 1:
            raise ApiError(429, f"{MOST_BROWSERS} dashboards are open; close one")
        oldest = next(queue for queue, owner in self._queues.items() if owner == crowded)
        del self._queues[oldest]
        _put(oldest, None)

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        for queue in self._queues:
            _put(queue, None)

    def _publish(self, kind: str, value: dict[str, Any], keep: bool = True) -> None:
        event = event_of(value, kind)
        if keep:
            self._latest[kind] = event
        for queue in self._queues:
            _put(queue, event)

    async def _poll(self) -> None:
        state = ""
        while True:
            try:
                if self._links.ready:
                    client = await self._links.client()
                    state = "asked"
                    await self._follow(client)
            except (ApiError, ProtocolError, TimeoutError) as e:
                log.debug("dashboard: the engine does not answer: %s", e)
            except Exception:
                log.exception("dashboard: the engine's answer could not be shown")
            if state != "away":
                state = "away"
                self._publish("state", {"engine": "away", "restarts": self._links.restarts})
            await asyncio.sleep(AWAY_PERIOD)

    async def _follow(self, client: Client) -> None:
        """Publish what happens in one generation of the engine, while it answers. Raises ApiError,
        ProtocolError, TimeoutError."""
        restarts, before = self._links.restarts, None
        next_counters = 0.0
        while self._links.ready and self._links.restarts == restarts:
            began = time.monotonic()
            async with asyncio.timeout(ANSWER_SECONDS):
                activity = await client.expert_activity()
                if before is None:
                    # Not before it has answered: that an engine is dead is seen later than that it is silent.
                    self._publish("state", {"engine": "up", "restarts": restarts})
                    self._publish("about", _about(client.welcome, activity))
                if (changes := _changes(activity, before)) is not None:
                    self._publish("experts", changes, keep=before is None)
                before = activity
                if began >= next_counters:
                    next_counters = began + COUNTERS_PERIOD
                    stats = await client.stats()
                    self._publish("counters", _counters(stats))
            await asyncio.sleep(max(0.0, began + PERIOD - time.monotonic()))


def _put(queue: asyncio.Queue[bytes | None], event: bytes | None) -> None:
    if queue.full():
        with suppress(asyncio.QueueEmpty):
            queue.get_nowait()
    queue.put_nowait(event)


def _about(welcome: Welcome, activity: ExpertActivityReply) -> dict[str, Any]:
    layers, experts = activity.resident.shape
    return {
        "engine": welcome.engine,
        "model": model_name(welcome),
        "device": welcome.device,
        "format": welcome.format,
        "backbone_dtype": welcome.backbone_dtype,
        "kv_dtype": welcome.kv_dtype,
        "emulation": welcome.emulation,
        "layers": layers,
        "experts": experts,
        "tiles": activity.tiles,
    }


def _changes(now: ExpertActivityReply, before: ExpertActivityReply | None) -> dict[str, str] | None:
    """Returns planes of a byte for each expert, in base64: tiles resident, times used, share of its tiles on
    the device (255: all), tiles fetched on demand, tiles that became resident. None where nothing has
    changed."""
    resident = now.resident
    if before is None:
        zero = np.zeros_like(resident)
        sums, gained = [zero, zero, zero], zero
    else:
        pairs = ((now.used, before.used), (now.device, before.device), (now.demanded, before.demanded))
        sums = [new - old for new, old in pairs]
        gained = np.maximum(resident - before.resident, 0)
        if not (sums[0].any() or (resident != before.resident).any()):
            return None
    used, device, demanded = sums
    share = device * 255 // np.maximum(used * now.tiles, 1)
    planes = {"resident": resident, "used": used, "device": share, "demanded": demanded, "gained": gained}
    return {name: _bytes(plane) for name, plane in planes.items()}


def _bytes(plane: NDArray[np.int32]) -> str:
    return base64.b64encode(np.clip(plane, 0, 255).astype(np.uint8).tobytes()).decode("ascii")


def _counters(stats: dict[str, Any]) -> dict[str, Any]:
    """Returns what is shown of the stats, without what each layer has: a browser is sent a few kilobytes."""
    phases = {}
    for name, phase in stats["engine"].items():
        sums = {key: sum(phase["layers"][key]) for key in ("active", "hits")}
        phases[name] = {key: phase[key] for key in ("steps", "rows", "fetched_bytes", "seconds")} | sums
    shown = ("policy", "policy_options", "scheduler", "tile_bytes", "cache", "prefetch", "machines")
    named = {name: stats[name] for name in shown if name in stats}
    return named | {"time": time.monotonic(), "phases": phases}
