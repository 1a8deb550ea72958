"""Process entry: reads or copies a buffer as fast as the memory allows, and writes the rates.

Of numpy's functions the fastest reader on one core was `bitwise_or.reduce` over 64-bit words (22 to 24 GB/s;
a float32 dot product 21 to 22, a matrix times a vector 19, two streams at once 12). The copy is tile by tile,
like the prefetcher's into a slab in shared memory.
"""

from __future__ import annotations

import json
import mmap
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from shm.layout import Bytes
from workers.lifetime import pin

BLOCK = 1 << 26  # bytes of one measurement
TILE = 1 << 20  # bytes of one copy, about a tile of a large model
FEWEST = 3  # blocks, for a median


def main(config: dict[str, Any]) -> None:
    """Configuration: `fd` and `size` of the buffer; `lo`, `hi`: the part to use; `cores` to run on; `seconds`
    of measurement; `what`: read | copy | huge, which also reads private memory in huge pages. Writes "ready",
    waits for a line, then writes for each kind of memory a list of bytes a second."""
    pin(config["cores"])
    shared = np.frombuffer(mmap.mmap(config["fd"], config["size"], mmap.MAP_SHARED), np.uint8)
    part = shared[config["lo"] : config["hi"]]
    works = [_copier(part) if config["what"] == "copy" else _reader(part)]
    if config["what"] == "huge":
        works.append(_reader(_huge_pages(part.nbytes)))
    for work, blocks in works:
        for block in range(blocks):
            work(block)  # maps every page before the measurement
    print(json.dumps("ready"), flush=True)
    if sys.stdin.readline():
        print(json.dumps(_rates(works, config["seconds"])), flush=True)


def _huge_pages(size: int) -> Bytes:
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[:] = 1  # pages that were never written would all be the one page of zeros
    return array


Work = Callable[[int], int]  # process the block of this number; returns its bytes


def _reader(buffer: Bytes) -> tuple[Work, int]:
    """The work, and the number of its blocks."""
    words = buffer.view(np.uint64)
    step = BLOCK // 8

    def read(block: int) -> int:
        part = words[block * step : (block + 1) * step]
        np.bitwise_or.reduce(part)
        return part.nbytes

    return read, -(-len(words) // step)


def _copier(buffer: Bytes) -> tuple[Work, int]:
    half = len(buffer) // 2
    source, target = buffer[:half], buffer[half : 2 * half]

    def copy(block: int) -> int:
        end = min((block + 1) * BLOCK, half)
        for begin in range(block * BLOCK, end, TILE):
            target[begin : min(begin + TILE, end)] = source[begin : min(begin + TILE, end)]
        return end - block * BLOCK

    return copy, -(-half // BLOCK)


def _rates(works: list[tuple[Work, int]], seconds: float) -> list[list[float]]:
    """Alternates between the works, so that other programs slow all of them alike."""
    rates: list[list[float]] = [[] for _ in works]
    now = began = time.perf_counter()
    while now - began < seconds * len(works) or len(rates[-1]) < FEWEST:
        for (work, blocks), its in zip(works, rates, strict=True):
            done = work(len(its) % blocks)
            before, now = now, time.perf_counter()
            its.append(done / (now - before))
    return rates
