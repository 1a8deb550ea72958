"""Helpers that the measurements of `primitives.py` share."""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = dict[str, Any]
Memory = NDArray[np.uint8]
REPEATS = 7


def median(once: Callable[[], object], repeats: int = 0) -> float:
    """Seconds of a call; the median of so many, by default REPEATS."""
    once()
    seconds = []
    for _ in range(repeats or REPEATS):
        began = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def pages(size: int) -> Memory:
    """Host memory whose pages exist."""
    memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    memory[:] = 1
    return memory
