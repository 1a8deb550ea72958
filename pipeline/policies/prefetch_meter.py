"""Whether predictions are worth the bytes they move; where not, prefetching is switched off and tried later.

What a wrong prediction moves takes memory's and the link's time from what is demanded. So over a window of
steps at least PAYS of the tiles that landed by prediction must have been used before they were dropped.
"""

from __future__ import annotations

WINDOW = 16  # steps in which prediction is judged
LEAST = 64  # tiles that must have landed for a judgement
PAYS = 0.5  # share of them that must have been of use
REST, LONGEST_REST = 256, 8192  # steps until the next trial, doubled after each trial that fails


class PrefetchMeter:
    """Judges one policy's predictions. Counts are tiles, of which so many had `landed` and been `useful` when
    the policy was set."""

    def __init__(self, landed: int = 0, useful: int = 0) -> None:
        self.on = True
        self.status = ""  # one line for a person, where it has been switched off
        self._rest = REST  # after the next failure
        self._resting = 0  # steps of this rest
        self._steps = 0  # in this window, or of this rest
        self._landed, self._useful = landed, useful  # when the window began

    def step(self, landed: int, useful: int) -> bool:
        """A step has ended, with so many tiles landed by prediction and so many of them of use in all. True
        where prediction was switched off or on by it."""
        self._steps += 1
        if not self.on:
            if self._steps < self._resting:
                return False
            self.on, self.status = True, "prefetching is being tried again"
            self._begin(landed, useful)
            return True
        came, used = landed - self._landed, useful - self._useful
        if self._steps < WINDOW or came < LEAST:  # too few to judge: the window goes on
            return False
        self.on = used >= PAYS * came
        if self.on:
            self._rest, self.status = REST, ""
        else:
            self.status = (
                f"prefetching rests for {self._rest} steps: of {came} tiles that it brought in {self._steps}"
                f" steps, {used} were of use"
            )
            self._resting, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
        self._begin(landed, useful)
        return not self.on

    def _begin(self, landed: int, useful: int) -> None:
        self._steps, self._landed, self._useful = 0, landed, useful
