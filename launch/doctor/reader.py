"""Process entry: reads or copies a buffer at the speed of memory, and says how fast that was.

Of what numpy offers, no reader was faster on one core than `bitwise_or.reduce` over 64-bit words (22 to 24
GB/s; a float32 dot product 21 to 22, a matrix times a vector 19, two streams at once 12). A copy is what the
prefetcher does to a slab in shared memory, one tile after another.
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

BLOCK = 1 << 26  # bytes between two looks at the clock
TILE = 1 << 20  # bytes of one copy; tiles of large models are about as large
FEWEST = 3  # blocks whose times make a median


def main(told: dict[str, Any]) -> None:
    """Configuration: `fd` and `size` of the buffer; `lo`, `hi`: the part to use; `cores` to run on; `seconds`
    to go on for; `what`: read | copy | huge, which reads in turn from the buffer and from as much memory of
    its own in huge pages. Writes "ready", waits for a line, then writes a list for each memory that it read:
    bytes a second of each block."""
    pin(told["cores"])
    shared = np.frombuffer(mmap.mmap(told["fd"], told["size"], mmap.MAP_SHARED), np.uint8)
    part = shared[told["lo"] : told["hi"]]
    works = [_copier(part) if told["what"] == "copy" else _reader(part)]
    if told["what"] == "huge":
        works.append(_reader(_huge_pages(part.nbytes)))
    for work, blocks in works:
        for block in range(blocks):
            work(block)  # every page is there, and mapped, before the clock runs
    print(json.dumps("ready"), flush=True)
    if sys.stdin.readline():
        print(json.dumps(_rates(works, told["seconds"])), flush=True)


def _huge_pages(size: int) -> Bytes:
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[:] = 1  # unwritten pages would all be one page of zeros
    return array


Work = Callable[[int], int]  # do a block by its number; returns its bytes


def _reader(buffer: Bytes) -> tuple[Work, int]:
    """The work, and how many blocks there are."""
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
    """In turn, so that what else the machine does slows all of them alike."""
    rates: list[list[float]] = [[] for _ in works]
    now = began = time.perf_counter()
    while now - began < seconds * len(works) or len(rates[-1]) < FEWEST:
        for (work, blocks), its in zip(works, rates, strict=True):
            done = work(len(its) % blocks)
            before, now = now, time.perf_counter()
            its.append(done / (now - before))
    return rates
