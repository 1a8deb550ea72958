"""Limits on answers and log lines that a misbehaving client can cause."""

from __future__ import annotations

import logging
import time


class RateLimiter:
    """Allows `limit` units in each second."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._spent = 0
        self._began = 0.0

    def spend(self, cost: int = 1) -> bool:
        """Count `cost` units; False where this second's exceed the limit."""
        now = time.monotonic()
        if now - self._began >= 1.0:
            self._began, self._spent = now, 0
        self._spent += cost
        return self._spent <= self._limit


class TimeShare:
    """Lets some work take a share of the time. After each piece that exceeds it, the work waits."""

    def __init__(self, share: float, burst: float) -> None:
        """`burst`: seconds that may be spent at once after a pause."""
        self._share = share
        self._burst = burst
        self._left = burst
        self._updated = time.monotonic()

    def spend(self, seconds: float) -> None:
        """Count time that was spent."""
        self._refill()
        self._left -= seconds

    @property
    def wait(self) -> float:
        """Seconds until the work may go on: none until the burst is spent, then as long as that takes to be
        earned again."""
        self._refill()
        return 0.0 if self._left > 0 else (self._burst - self._left) / self._share

    def _refill(self) -> None:
        now = time.monotonic()
        self._left = min(self._left + (now - self._updated) * self._share, self._burst)
        self._updated = now


class SparseLog:
    """Logs up to `limit` warnings a second that clients cause; the others are only counted."""

    def __init__(self, log: logging.Logger, limit: int = 5) -> None:
        self._log = log
        self._limiter = RateLimiter(limit)
        self._skipped = 0

    def warning(self, text: str, *, failed: bool = False) -> None:
        """`failed`: with the traceback of the exception that is being handled."""
        if not self._limiter.spend():
            self._skipped += 1
            return
        more = f" ({self._skipped} more lines like this were left out)" if self._skipped else ""
        self._skipped = 0
        self._log.warning("%s%s", text, more, exc_info=failed)
