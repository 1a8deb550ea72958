"""Whether all of an engine's workers and its prefetcher are up again after faults."""

from __future__ import annotations

import asyncio
from typing import Any

from launch.chaos.injector import Fault, StatsOf


def missing_peers(
    peers: list[dict[str, Any]], before: list[dict[str, Any]], faults: list[Fault]
) -> list[str]:
    """A line for each worker and prefetcher of `before` that is not up, or only as the killed incarnation."""
    killed = {(f.role, f.index, f.incarnation) for f in faults if f.kind == "kill"}
    up = {
        (p["role"], p["index"])
        for p in peers
        if p["up"] and (p["role"], p["index"], p["incarnation"]) not in killed
    }
    known = dict.fromkeys((p["role"], p["index"]) for p in [*before, *peers])
    return [f"{role} {index} is not up" for role, index in known if (role, index) not in up]


async def wait_recovered(
    stats: StatsOf, before: list[dict[str, Any]], faults: list[Fault], limit: float
) -> list[str]:
    """Wait until no peer is missing, `limit` seconds at most. Returns the missing ones."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit
    while missing := missing_peers((await stats())["peers"], before, faults):
        if loop.time() > deadline:
            break
        await asyncio.sleep(0.05)
    return missing
