"""Measures how long a child that has work has made no progress, and how long it may; and how far the store is
page-locked."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from shm.segment import byte_size

log = logging.getLogger(__name__)

LINE_SECONDS = 10.0  # between two lines about page-locking, which takes up to 100 s for 100 GB
STALL_SLICE = 0.1  # seconds that one reading may count: this process may have been stopped itself


@dataclass(frozen=True)
class SilenceLimits:
    """Seconds without a sign of progress that the pool accepts."""

    stall: float = 3.0  # without a tile: the worker is hung
    stall_row: float = 0.02  # added for each row that it computes
    first_answer: float = 60.0  # instead of these, while it imports: that does not count as progress
    pool: float = 120.0  # without a message from any worker: the engine fails


class ProgressWatch:
    """Seconds without progress of a child that has work; only time between close readings counts."""

    def __init__(self) -> None:
        self._ticks = -1
        self._stalled = 0.0
        self._read_at = 0.0

    def stalled(self, ticks: int) -> float:
        """Seconds without progress, as far as they were observed; `ticks` is the child's counter now."""
        now = time.monotonic()
        if ticks != self._ticks:
            self._ticks, self._stalled = ticks, 0.0
        else:
            self._stalled += min(now - self._read_at, STALL_SLICE)
        self._read_at = now
        return self._stalled

    def reset(self) -> None:
        """Restart the count: the child has no work, or has just answered."""
        self._ticks = -1


class CopyProgress:
    """The progress counter of a prefetcher's thread."""

    def __init__(self) -> None:
        self.ticks = 0

    def tick(self) -> None:
        """Progress was made."""
        self.ticks += 1


class LockProgress:
    """Page-locking of the store, as the prefetcher reports it."""

    def __init__(self) -> None:
        self.locked = self.total = 0  # bytes
        self._began = self._said = time.monotonic()

    def report(self, locked: int, total: int) -> None:
        """Note it; say it now and then, and at the end."""
        now = time.monotonic()
        if locked <= self.locked:  # another prefetcher begins anew
            self._began = self._said = now
        self.locked, self.total = locked, total
        if locked == total or now - self._said > LINE_SECONDS:
            self._said = now
            log.info(
                f"{byte_size(locked)} of the store's {byte_size(total)} are page-locked, in"
                f" {now - self._began:.0f} s"
            )

    def stats(self) -> dict[str, int]:
        """Nothing where no page need be locked."""
        return {"locked_bytes": self.locked, "lockable_bytes": self.total} if self.total else {}
