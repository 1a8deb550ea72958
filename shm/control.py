"""The control segment: what each worker and the prefetcher is doing, written by them and read by others.

    line 0: the prefetcher    line 1 + i: worker i

A line is 64 bytes, so that no two writers share a cache line: its first number (int64) counts progress and
only grows; the second is the Work that is being computed, IDLE where none is. Each number is written whole,
by one process. Who reads two of them may see them a moment apart.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shm.segment import Segment

LINE = 8  # numbers
IDLE = -1


class ControlSegment:
    """Lines for the prefetcher and so many workers."""

    def __init__(self, segment: Segment) -> None:
        """View a segment. Use `create` or `attach`."""
        self.segment = segment

    @classmethod
    def create(cls, name: str, workers: int) -> ControlSegment:
        """A new segment. Raises NotEnoughMemory, and ShmError where the name is taken."""
        made = cls(Segment.create(name, (1 + workers) * LINE * 8))
        made.line("prefetcher", 0).end()
        for index in range(workers):
            made.line("worker", index).end()
        return made

    @classmethod
    def attach(cls, name: str) -> ControlSegment:
        """Raises SegmentMissing, ShmError."""
        return cls(Segment.attach(name, writable=True))

    def line(self, role: str, index: int) -> ControlLine:
        """The line of a worker or of the prefetcher. Raises IndexError where there is none."""
        if index < 0:
            raise IndexError(f"no line of {role} {index}")
        row = 1 + index if role == "worker" else 0
        return ControlLine(self.segment.array.view(np.int64).reshape(-1, LINE)[row])

    def close(self) -> None:
        """End this process's use; its creator unlinks `segment.name`."""
        self.segment.close()


class ControlLine:
    """One peer's line."""

    def __init__(self, numbers: NDArray[np.int64]) -> None:
        self._numbers = numbers

    def tick(self) -> None:
        """Progress was made."""
        self._numbers[0] += 1

    @property
    def address(self) -> int:
        """Where this process sees the count of progress, for code that counts by itself."""
        return int(self._numbers.ctypes.data)

    def begin(self, seq: int) -> None:
        """This Work is being computed from now on."""
        self._numbers[1] = seq

    def end(self) -> None:
        """No Work is being computed."""
        self._numbers[1] = IDLE

    @property
    def ticks(self) -> int:
        return int(self._numbers[0])

    @property
    def seq(self) -> int:
        """The Work that is being computed, or IDLE."""
        return int(self._numbers[1])
