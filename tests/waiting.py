"""Waiting in tests until a condition holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], limit: float) -> bool:
    """Whether the condition came true within `limit` seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


async def until(condition: Callable[[], object], limit: float = 10.0) -> None:
    """Wait until the condition is true. Raises TimeoutError after `limit` seconds."""
    async with asyncio.timeout(limit):
        while not condition():  # noqa: ASYNC110 - conditions of other processes, which set no event
            await asyncio.sleep(0.005)
