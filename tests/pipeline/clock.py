"""A clock of the test's own."""

from __future__ import annotations


class Clock:
    """Takes the place of the module `time`; the test sets `now` (seconds)."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic
