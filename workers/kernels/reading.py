"""How fast memory is read here: the limit that every share of reading refers to.

No single way of reading is the fastest on all processors: one prefetch hint halves the pace of a processor
that another one serves best. So memory is read in several ways, in turns, and the fastest one counts: the C
loop of `c/bandwidth.h`, with each hint and some distances, and torch.sum where torch is imported already and
has no more threads than the team; without a compiled library numpy and torch.sum. The memory must be far
larger than the last level of cache. This module imports no torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from shm.formats import Bytes
from workers.kernels.choice import HINTS, Prefetch
from workers.kernels.native import Library, Team

AHEAD = (1024, 4096, 16384)  # bytes
PREFETCHES = (Prefetch("none", 0), *(Prefetch(hint, ahead) for hint in HINTS[1:] for ahead in AHEAD))
SAMPLE = 1 << 25  # bytes of one reading: it takes much longer than a call
ROUNDS = 5  # of all ways, to find the fastest

Read = Callable[[Bytes], object]


@dataclass(frozen=True)
class Reading:
    """The fastest way: its name, and bytes a second."""

    way: str
    rate: float


def ways(library: Library | None, team: Team | None = None) -> dict[str, Read]:
    """By name, functions that read all of their argument, a multiple of 64 bytes, on the team's cores."""
    if library is None:
        found: dict[str, Read] = {"numpy": lambda data: np.bitwise_or.reduce(data.view(np.uint64))}
    else:
        found = {str(way): partial(library.read, prefetch=way, team=team) for way in PREFETCHES}
    torch = sys.modules.get("torch")
    threads = 1 if team is None else team.threads
    if torch is not None and (library is None or torch.get_num_threads() <= threads):
        found["torch.sum"] = lambda data: torch.from_numpy(data).view(torch.float32).sum()
    return found


def fastest(rates: Mapping[str, Sequence[float]]) -> Reading:
    """Of the rates of each way: the best median."""
    way = max(rates, key=lambda name: median(rates[name]))
    return Reading(way, median(rates[way]))


def fastest_way(memory: Bytes, library: Library | None, team: Team | None = None) -> Read:
    """The way that reads this memory fastest on the team's cores, by some rounds of all."""
    parts, found = walk(memory), ways(library, team)
    rates = {name: [timed(read, next(parts)) for _ in range(ROUNDS)] for name, read in found.items()}
    return found[fastest(rates).way]


def walk(memory: Bytes, size: int = SAMPLE) -> Iterator[Bytes]:
    """Parts of this size, or all where that is less, without end: each is used again after all others."""
    size = min(size, len(memory)) // 64 * 64
    while True:
        for lo in range(0, len(memory) - size + 1, size):
            yield memory[lo : lo + size]


def timed(read: Read, data: Bytes) -> float:
    """Bytes a second."""
    began = time.perf_counter()
    read(data)
    return len(data) / (time.perf_counter() - began)
