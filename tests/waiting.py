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
    """The seconds since it was made, as a process's main thread sees them: a machine that is busy with other
    programs makes them uncertain by the seconds for which that thread was ready to run and had no core."""

    def __init__(self, pid: int | str = "self") -> None:
        """`pid`: the process; it must not have been waited for while the stopwatch is in use."""
        self._schedule = Path(f"/proc/{pid}/schedstat")
        self._began, self._ready = time.monotonic(), self._ready_seconds()

    def range(self) -> tuple[float, float]:
        """Seconds without those that are uncertain, and with them."""
        seconds = time.monotonic() - self._began
        return seconds - (self._ready_seconds() - self._ready), seconds

    def shows(self, least: float, most: float) -> bool:
        """Whether so many seconds may have passed."""
        without, seconds = self.range()
        uncertain = seconds - without
        return least - uncertain < seconds < most + uncertain

    def _ready_seconds(self) -> float:
        """How long the thread has waited for a core."""
        return int(self._schedule.read_text().split()[1]) * 1e-9
