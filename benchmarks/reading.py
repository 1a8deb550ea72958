"""How fast cores read memory: the limit of everything that reads weights."""

from __future__ import annotations

from statistics import median

import numpy as np
import torch

from workers.kernels import reading
from workers.kernels.native import best

MEMORY = 1 << 30  # bytes: far more than any cache
PART = 1 << 28  # bytes of one read
READS = 4  # of each way, for a figure


class Reading:
    """Reads of memory on `cores` cores, in the ways of `workers/kernels/reading.py`."""

    def __init__(self, cores: int) -> None:
        self._parts = reading.walk(np.ones(MEMORY, np.uint8), PART)
        library = best()
        self._team = None if library is None else library.team(cores)
        torch.set_num_threads(cores)
        self._ways = reading.ways(library, self._team)
        self._rates: dict[str, list[float]] = {}
        self.gb_s()
        self._rates.clear()  # of reads that first had to start threads

    def gb_s(self) -> float:
        """The fastest way now, the median of a few reads."""
        now: dict[str, list[float]] = {name: [] for name in self._ways}
        for _ in range(READS):
            for name, read in self._ways.items():
                now[name].append(reading.timed(read, next(self._parts)) / 1e9)
        for name, rates in now.items():
            self._rates.setdefault(name, []).extend(rates)
        return reading.fastest(now).rate

    @property
    def ways(self) -> dict[str, float]:
        """GB/s of each way, the median of all its reads."""
        return {way: median(rates) for way, rates in self._rates.items()}

    def close(self) -> None:
        if self._team is not None:
            self._team.close()
