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
