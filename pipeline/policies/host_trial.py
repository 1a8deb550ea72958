"""Whether steps are faster where the host computes everything, as measured.

A cost model says what a layer's shares take. It does not say what dividing takes beside them: its planning,
the two sides' arrays, caches that are colder afterwards. Where experts are a small part of a step, that
decides. So steps of either kind are compared by the clock: now and then a few of the other kind, each time
later where they were slower.
"""

from __future__ import annotations

from collections import deque
from statistics import median

PRESENT = 8  # steps of the present kind that are compared
TRIED, SKIPPED = 6, 2  # of the other kind, and how many of these come too early to count
LEAST = 0.02  # relative gain of a change
FIRST, LONGEST = 256, 4096  # steps from one trial to the next
HOPELESS = 1.5  # times the present seconds of the layers, by the costs: not tried


class HostTrial:
    """Of steps of about equally many rows. `host`: the next step's experts are all the host's; `settled`: so
    were those of the kind that was faster."""

    def __init__(self) -> None:
        self.host = False
        self.settled = False
        self._present: deque[float] = deque(maxlen=PRESENT)
        self._tried: list[float] = []
        self._period = FIRST
        self._left = 0  # steps until the next trial

    def note(self, seconds: float, hopeless: bool) -> None:
        """A step has taken so long. `hopeless`: by the costs the host alone would take HOPELESS times that of
        the layers."""
        if self.host != self.settled:
            self._tried.append(seconds)
            if len(self._tried) == TRIED:
                self._compare()
            return
        self._present.append(seconds)
        self._left -= 1
        if self._left <= 0 and len(self._present) == PRESENT and (self.host or not hopeless):
            self.host = not self.settled

    def _compare(self) -> None:
        if median(self._tried[SKIPPED:]) < (1 - LEAST) * median(self._present):
            self.settled, self._period = self.host, FIRST
        else:
            self._period = min(2 * self._period, LONGEST)
        self.host, self._left = self.settled, self._period
        self._tried.clear()
        self._present.clear()
