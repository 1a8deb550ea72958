"""Which experts the preset tandem keeps: those of most use in all layers, or whole layers.

A resident tile saves most where the rest of what its layer uses is resident too: then the host is not needed
at all, nor the exchange with it. Where a layer takes longer for what is beside its tiles than for them, it is
better to have whole layers on the device and others on the host than to divide each. Now and then a step is
planned with either arrangement; the one with less seconds is kept.
"""

from __future__ import annotations

from collections import deque

from pipeline.arrays import IntArray
from pipeline.policies.division import Divider
from pipeline.policies.view import Active, Target
from pipeline.policies.worth import Worth

STEPS = 8  # that are compared
EVERY = 16  # steps from one to the next, once there are so many
LEAST = 0.05  # relative gain of a change
PAYS_WITHIN = 1024  # steps in which it saves as much as its tiles take on the link


class Arrangement:
    """Compares the two in decode."""

    def __init__(self, worth: Worth, tiles: int) -> None:
        """`tiles`: of an expert."""
        self._worth, self._tiles = worth, tiles
        self._layers = worth.by_layer()
        self._step = 0
        self._seconds: deque[tuple[float, float]] = deque(maxlen=STEPS)  # by use, by layer
        self._tried: IntArray | None = None  # by use, in a step that is compared
        self._by_use = self._by_layer = 0.0  # seconds of this step so far

    def begin_step(self) -> None:
        """A decode step, of which nothing has been observed."""
        self._step += 1
        self._tried = None
        if len(self._seconds) < STEPS or not self._step % EVERY:
            self._tried = self._worth.by_use() if self._worth.frozen else self._worth.target
            self._by_use = self._by_layer = 0.0

    def note(self, layer: int, active: Active, divider: Divider) -> None:
        """A layer is planned."""
        if self._tried is not None:
            for target in (self._tried, self._layers):
                resident = target[layer].take(active.experts)
                found = divider.balanced(active, resident, self._tiles)
                if target is self._layers:
                    self._by_layer += found.seconds
                else:
                    self._by_use += found.seconds

    def end_step(self, divider: Divider) -> list[Target]:
        """The targets that change."""
        if self._tried is None:
            return []
        self._seconds.append((self._by_use, self._by_layer))
        if len(self._seconds) < STEPS:
            return []
        worth = self._worth
        by_use, by_layer = (sum(each) / STEPS for each in zip(*self._seconds, strict=True))
        saved = by_layer - by_use if worth.frozen else by_use - by_layer
        if saved < LEAST * max(by_use, by_layer):
            return []
        target = self._tried if worth.frozen else self._layers
        more = int((target - worth.target).clip(min=0).sum())
        if more * divider.tile > saved * PAYS_WITHIN:
            return []
        return worth.arrange(target, not worth.frozen)
