"""Waiting in tests until a condition holds, and measuring how long something takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path


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


class Stopwatch:
    """The seconds since it was made; a machine that is busy with other programs makes them uncertain by the
    seconds for which this process's threads were ready to run and had no core."""

    def __init__(self) -> None:
        self._began, self._ready = time.monotonic(), _ready_seconds()

    def shows(self, least: float, most: float) -> bool:
        """Whether so many seconds have passed."""
        seconds, uncertain = time.monotonic() - self._began, max(0.0, _ready_seconds() - self._ready)
        return least - uncertain < seconds < most + uncertain


def _ready_seconds() -> float:
    """How long this process's threads have waited for a core, if the kernel counts it."""
    found = Path("/proc/self/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[1]) for path in found) * 1e-9
