"""Waits that stand in for a slower host or link."""

from __future__ import annotations

import time
from collections.abc import Callable

TICK_SECONDS = 0.5  # most time between two signs of progress


def sleep_until(deadline: float, tick: Callable[[], None]) -> None:
    """Sleep until `time.perf_counter()` reaches the deadline, with ticks: the wait counts as progress."""
    while (rest := deadline - time.perf_counter()) > 0:
        time.sleep(min(rest, TICK_SECONDS))
        tick()
