"""How much of a nuisance is answered, and how much of it is written down."""

from __future__ import annotations

import logging
import time


class RateLimiter:
    """So many of something in a second, whatever comes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._spent = 0
        self._began = 0.0

    def spend(self, cost: int = 1) -> bool:
        """Count one more, or as much as it costs; whether that is still within the budget."""
        now = time.monotonic()
        if now - self._began >= 1.0:
            self._began, self._spent = now, 0
        self._spent += cost
        return self._spent <= self._most


class SparseLog:
    """Warnings of one kind that strangers can cause: a few in a second, the rest as a number."""

    def __init__(self, log: logging.Logger, most: int = 5) -> None:
        self._log = log
        self._budget = RateLimiter(most)
        self._skipped = 0

    def warning(self, text: str, *, failed: bool = False) -> None:
        """`failed`: with the traceback of the exception that is being handled."""
        if not self._budget.spend():
            self._skipped += 1
            return
        more = f" ({self._skipped} more lines like this were left out)" if self._skipped else ""
        self._skipped = 0
        self._log.warning("%s%s", text, more, exc_info=failed)
