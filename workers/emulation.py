"""Waits that stand in for a slower host or link.

Coordinator and prefetcher copy over one emulated link (`--link-gbps`). Each notes in its line of the control
segment until when its copies occupy that link, and begins behind what both have noted; so neither waits for
the other process itself, and the death of one costs the other at most the copies that were noted. The
prefetcher begins nothing while demanded tiles occupy the link.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from shm.control import ControlLine

TICK_SECONDS = 0.5  # most time between two signs of progress


def sleep_until(deadline: float, tick: Callable[[], None]) -> None:
    """Sleep until `time.perf_counter()` reaches the deadline, with ticks: the wait counts as progress."""
    while (rest := deadline - time.perf_counter()) > 0:
        time.sleep(min(rest, TICK_SECONDS))
        tick()


class EmulatedLink:
    """A link of `gbps` 1e9 bytes a second, as one of its two users sees it."""

    def __init__(self, gbps: float, own: ControlLine, other: ControlLine) -> None:
        """`own` and `other`: the lines of this process and of the other one."""
        self._rate = gbps * 1e9
        self._own, self._other = own, other
        self.tick = own.tick

    @property
    def other_until(self) -> float:
        """Until when, by `time.perf_counter()`, the other process's copies occupy the link."""
        return self._other.link_until / 1e9

    def free_soon(self) -> bool:
        """Whether the other process's copies have moved, or will have in less than a millisecond, which this
        waits."""
        busy = self.other_until - time.perf_counter()
        if busy >= 1e-3:
            return False
        if busy > 0:
            time.sleep(busy)
        return self.other_until <= time.perf_counter()

    def occupy(self, size: int) -> tuple[float, float]:
        """Let so many bytes follow what is on the link. Returns when they have moved, and in how many
        seconds."""
        seconds = size / self._rate
        begin = max(time.perf_counter(), self._own.link_until / 1e9, self.other_until)
        self._own.link_until = int((begin + seconds) * 1e9)
        return begin + seconds, seconds
