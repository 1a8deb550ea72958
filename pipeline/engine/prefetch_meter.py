"""Measures whether predictions are worth their transfers; where not, prefetching pauses and is tried again
later.

A wrongly predicted tile takes the memory's and the link's time from demanded tiles. So over a window of
steps, at least USEFUL_SHARE of the prefetched tiles that landed must have been used before they were evicted.
The same holds where single channels are predicted.
"""

from __future__ import annotations

WINDOW = 16  # steps after which predictions are judged
LEAST = 64  # tiles that must have landed for a judgement
USEFUL_SHARE = 0.5  # of those tiles, that must have been used
PAUSE, LONGEST_PAUSE = 256, 8192  # steps until the next trial, doubled after each trial that fails


def pause_note(paused: int, steps: int) -> str:
    """One line for a report, where prefetching paused in some of the decode steps; otherwise ""."""
    if not paused:
        return ""
    return (
        f"prefetching paused in {paused} of {steps} decode steps, because too few of the tiles that it"
        " fetched were used (with the option pause=0 it never pauses)"
    )


class PrefetchMeter:
    """Judges one policy's predictions. `landed`, `useful`: prefetched tiles that had landed and been used
    when the policy was set."""

    def __init__(self, landed: int = 0, useful: int = 0) -> None:
        self.on = True
        self.status = ""  # one line for a person, while prefetching pauses or is tried again
        self._pause = PAUSE  # after the next failure
        self._pausing = 0  # steps of this pause
        self._steps = 0  # of this window or of this pause
        self._landed, self._useful = landed, useful  # when the window began

    def step(self, landed: int, useful: int) -> bool:
        """Count a step; `landed`, `useful`: all prefetched tiles so far that landed and that were used. True
        where the step switched prefetching off or on."""
        self._steps += 1
        if not self.on:
            if self._steps < self._pausing:
                return False
            self.on, self.status = True, "prefetching is being tried again"
            self._begin(landed, useful)
            return True
        arrived, used = landed - self._landed, useful - self._useful
        if self._steps < WINDOW or arrived < LEAST:  # too few to judge: the window continues
            return False
        self.on = used >= USEFUL_SHARE * arrived
        if self.on:
            self._pause, self.status = PAUSE, ""
        else:
            self.status = (
                f"prefetching pauses for {self._pause} steps: of {arrived} tiles or channels fetched in"
                f" {self._steps} steps, {used} were used"
            )
            self._pausing, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        self._begin(landed, useful)
        return not self.on

    def _begin(self, landed: int, useful: int) -> None:
        self._steps, self._landed, self._useful = 0, landed, useful
