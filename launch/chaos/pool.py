"""Whether an engine's pool of workers, and its prefetcher, are all there."""

from __future__ import annotations

import asyncio
from typing import Any

from launch.chaos.injector import Fault, StatsOf


def not_whole(peers: list[dict[str, Any]], before: list[dict[str, Any]], faults: list[Fault]) -> list[str]:
    """What is missing of a pool that was `before`: a line for each worker and prefetcher that is not up, or
    is still the life that was killed."""
    killed = {(f.role, f.index, f.incarnation) for f in faults if f.kind == "kill"}
    up = {
        (p["role"], p["index"])
        for p in peers
        if p["up"] and (p["role"], p["index"], p["incarnation"]) not in killed
    }
    known = dict.fromkeys((p["role"], p["index"]) for p in [*before, *peers])
    return [f"{role} {index} is not up" for role, index in known if (role, index) not in up]


async def wait_whole(
    stats: StatsOf, before: list[dict[str, Any]], faults: list[Fault], limit: float
) -> list[str]:
    """Wait until the pool is whole again, `limit` seconds at most. Returns what is missing then."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit
    while missing := not_whole((await stats())["peers"], before, faults):
        if loop.time() > deadline:
            break
        await asyncio.sleep(0.05)
    return missing
