"""Measures how fast cores read memory: the limit of everything that reads weights."""

from __future__ import annotations

import time
from functools import partial
from statistics import median

import numpy as np

from workers.kernels.native import best

MEMORY = 1 << 30  # bytes: far more than any cache
PART = 1 << 28  # bytes of one read
READS = 4  # for a figure


class Reading:
    """Reads of memory on `cores` cores."""

    def __init__(self, cores: int) -> None:
        self._parts = np.ones(MEMORY, np.uint8).reshape(-1, PART)
        self._team = best().team(cores)
        self._read = partial(best().read, team=self._team)
        self.gb_s()  # starts the threads

    def gb_s(self) -> float:
        """Returns the pace now, the median of a few reads."""
        seconds = []
        for part in self._parts[:READS]:
            began = time.perf_counter()
            self._read(part)
            seconds.append(time.perf_counter() - began)
        return PART / median(seconds) / 1e9

    def close(self) -> None:
        if self._team is not None:
            self._team.close()
