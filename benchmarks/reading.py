"""How fast cores read memory: the limit of everything that reads weights."""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import torch

from workers.kernels.native import best

MEMORY = 1 << 30  # bytes: far more than any cache
PART = 1 << 28  # bytes of one read
READS = 4  # of each way, for a figure


class Reading:
    """Reads of memory on `cores` cores, in several ways."""

    def __init__(self, cores: int) -> None:
        self._parts = np.ones((MEMORY // PART, PART), np.uint8)
        self._library = best()
        self._team = None if self._library is None else self._library.team(cores)
        torch.set_num_threads(cores)
        self._rates: dict[str, list[float]] = {}
        self.gb_s()
        self._rates.clear()  # of reads that first had to start threads

    def gb_s(self) -> float:
        """The fastest way now, the median of a few reads."""
        now: dict[str, list[float]] = {}
        for i in range(READS):
            part = self._parts[i % len(self._parts)]
            for way in ("C loop", "torch.sum")[self._library is None :]:
                began = time.perf_counter()
                self._read(way, part)
                now.setdefault(way, []).append(PART / (time.perf_counter() - began) / 1e9)
        for way, rates in now.items():
            self._rates.setdefault(way, []).extend(rates)
        return max(map(median, now.values()))

    @property
    def ways(self) -> dict[str, float]:
        """GB/s of each way, the median of all its reads."""
        return {way: median(rates) for way, rates in self._rates.items()}

    def close(self) -> None:
        if self._team is not None:
            self._team.close()

    def _read(self, way: str, part: np.ndarray) -> None:
        if way == "torch.sum":
            torch.from_numpy(part).view(torch.float32).sum()
        elif self._library is not None:
            self._library.read(part, self._team)
