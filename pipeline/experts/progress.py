"""Measures how long a child that has work has made no progress, and how long it may."""

from __future__ import annotations

import time
from dataclasses import dataclass

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
