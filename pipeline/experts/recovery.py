"""How long it takes until a dead peer is replaced."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

KEPT = 256  # of the latest recoveries


class Recovery:
    """ExitEvents of one role's peers, and the seconds from each until its successor was there."""

    def __init__(self) -> None:
        self.deaths = 0
        self._died: dict[int, float] = {}  # index -> when
        self._ready: deque[float] = deque(maxlen=KEPT)
        self._whole: deque[float] = deque(maxlen=KEPT)

    def died(self, index: int) -> None:
        self.deaths += 1
        self._died[index] = time.monotonic()

    def ready(self, index: int) -> None:
        """Its successor has announced itself."""
        if index in self._died:
            self._ready.append(time.monotonic() - self._died[index])

    def whole(self, index: int) -> None:
        """Its successor does its work."""
        if index in self._died:
            self._whole.append(time.monotonic() - self._died.pop(index))

    def stats(self) -> dict[str, Any]:
        """Medians in seconds, None where nothing was recovered from. From any thread."""
        ready, whole = list(self._ready), list(self._whole)
        return {
            "deaths": self.deaths,
            "ready_s": statistics.median(ready) if ready else None,
            "whole_s": statistics.median(whole) if whole else None,
        }
