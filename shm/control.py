"""The control segment: progress and current Work of each worker, prefetcher, the reader and the coordinator's
engine thread, written by them; and the requests that the coordinator computes.

    line i: the prefetcher of device i           line 8: the coordinator, and its link to device 0
    line 8 + i: the coordinator's link to device i
    lines 16 to 48: its requests                 line 49: the reader
    line 50 + i: worker i

There are at most 8 devices. A line is 64 bytes, so that no two writers share a cache line. Its numbers
(int64):

    0   counts progress and only grows
    1   the Work that is being computed, or the order that is being copied; IDLE without one
    2   until when this process's copies occupy an emulated link, in nanoseconds of CLOCK_MONOTONIC
    3   of the coordinator: tokens and blocks of scores that clients were sent; it only grows

Each number is written atomically, by one process. A reader of several may see them a moment apart.

The numbers of the lines of requests are one sequence: how many requests there are, then of each its key, and
of how many crashes it is suspected. They are read when the coordinator has exited.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shm.segment import Segment

LINE = 8  # numbers
IDLE = -1
REQUEST_LINES = 33
MOST_DEVICES = 8
MOST_REQUESTS = (REQUEST_LINES * LINE - 1) // 2  # that are written down
_REQUESTS = 2 * MOST_DEVICES  # the first of their lines
_READER = _REQUESTS + REQUEST_LINES
_ROWS = {"prefetcher": 0, "coordinator": MOST_DEVICES, "reader": _READER, "worker": _READER + 1}


class ControlSegment:
    """One line each for each prefetcher, link of the coordinator, and worker."""

    def __init__(self, segment: Segment) -> None:
        """View a segment. Use `create` or `attach`."""
        self.segment = segment

    @classmethod
    def create(cls, name: str, workers: int) -> ControlSegment:
        """A new segment. Raises NotEnoughMemory, and ShmError if the name is taken."""
        made = cls(Segment.create(name, (_ROWS["worker"] + workers) * LINE * 8))
        for index in range(MOST_DEVICES):
            for role in ("prefetcher", "coordinator"):
                made.line(role, index).end()
        made.line("reader", 0).end()
        for index in range(workers):
            made.line("worker", index).end()
        return made

    @classmethod
    def attach(cls, name: str) -> ControlSegment:
        """Raises SegmentMissing, ShmError."""
        return cls(Segment.attach(name, writable=True))

    def line(self, role: str, index: int) -> ControlLine:
        """The line of a worker, a prefetcher, the reader or the coordinator. Raises IndexError if it is
        not there."""
        if index < 0 or role not in _ROWS:
            raise IndexError(f"no line of {role} {index}")
        return ControlLine(self.segment.array.view(np.int64).reshape(-1, LINE)[_ROWS[role] + index])

    @property
    def requests(self) -> list[tuple[int, int]]:
        """The requests that the coordinator is computing, or was when it exited: the key of each, and of how
        many crashes it is suspected."""
        numbers = self._request_numbers
        count = min(max(int(numbers[0]), 0), MOST_REQUESTS)
        pairs = numbers[1 : 1 + 2 * count].reshape(-1, 2)
        return [(int(key), int(crashes)) for key, crashes in pairs]

    @requests.setter
    def requests(self, requests: Sequence[tuple[int, int]]) -> None:
        numbers, written = self._request_numbers, requests[:MOST_REQUESTS]
        numbers[0] = 0
        numbers[1 : 1 + 2 * len(written)] = [number for request in written for number in request]
        numbers[0] = len(written)

    @property
    def _request_numbers(self) -> NDArray[np.int64]:
        return self.segment.array.view(np.int64)[_REQUESTS * LINE : _READER * LINE]

    def close(self) -> None:
        """End this process's use; its creator unlinks `segment.name`."""
        self.segment.close()


class ControlLine:
    """The line of one child."""

    def __init__(self, numbers: NDArray[np.int64]) -> None:
        self._numbers = numbers.data  # single numbers are read and written faster than in an array
        self.address = int(numbers.ctypes.data)  # of the progress counter, for C code that increments it

    def tick(self) -> None:
        """Count one step of progress."""
        self._numbers[0] += 1

    def begin(self, seq: int) -> None:
        """Record that this Work is being computed, or this order copied."""
        self._numbers[1] = seq

    def end(self) -> None:
        """Record that nothing is being computed or copied."""
        self._numbers[1] = IDLE

    @property
    def ticks(self) -> int:
        return self._numbers[0]

    @property
    def seq(self) -> int:
        """The Work that is being computed or the order that is being copied, or IDLE."""
        return self._numbers[1]

    @property
    def link_until(self) -> int:
        """The time until which this process's copies occupy an emulated link, in nanoseconds."""
        return self._numbers[2]

    @link_until.setter
    def link_until(self, nanoseconds: int) -> None:
        self._numbers[2] = nanoseconds

    @property
    def answered(self) -> int:
        """Tokens and blocks of scores that clients were sent."""
        return self._numbers[3]

    @answered.setter
    def answered(self, number: int) -> None:
        self._numbers[3] = number
