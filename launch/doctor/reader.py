"""Process entry: reads a buffer in several ways, or copies it, and writes the rates. The copy is tile by
tile, like the prefetcher's into a slab in shared memory."""

from __future__ import annotations

import json
import mmap
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from shm.layout import Bytes
from workers.kernels import reading
from workers.kernels.native import best
from workers.lifetime import pin

BLOCK = 1 << 25  # bytes of one measurement
TILE = 1 << 20  # bytes of one copy, about a tile of a large model
FEWEST = 3  # blocks, for a median


def main(config: dict[str, Any]) -> None:
    """Configuration: `fd` and `size` of the buffer; `lo`, `hi`: the part to use; `cores` to run on; `seconds`
    of measurement; `what`: read | copy | huge, which also reads private memory in huge pages. Writes "ready",
    waits for a line, then writes for each kind of memory a list of bytes a second of each way, by name."""
    pin(config["cores"])
    shared = np.frombuffer(mmap.mmap(config["fd"], config["size"], mmap.MAP_SHARED), np.uint8)
    part = shared[config["lo"] : config["hi"]]
    kinds = [{"copy": _copier(part)} if config["what"] == "copy" else _readers(part)]
    if config["what"] == "huge":
        kinds.append(_readers(_huge_pages(part.nbytes)))
    for works in kinds:
        work, blocks = next(iter(works.values()))
        for block in range(blocks):
            work(block)  # maps every page before the measurement
    print(json.dumps("ready"), flush=True)
    if sys.stdin.readline():
        print(json.dumps(_rates(kinds, config["seconds"])), flush=True)


def _huge_pages(size: int) -> Bytes:
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[:] = 1  # pages that were never written would all be the one page of zeros
    return array


Work = Callable[[int], int]  # process the block of this number; returns its bytes
Works = dict[str, tuple[Work, int]]  # by name; with the number of blocks


def _readers(buffer: Bytes) -> Works:
    size = min(BLOCK, len(buffer)) // 64 * 64
    blocks = max(1, len(buffer) // size)

    def work(read: reading.Read) -> Work:
        def one(block: int) -> int:
            read(buffer[block * size : (block + 1) * size])
            return size

        return one

    return {name: (work(read), blocks) for name, read in reading.ways(best()).items()}


def _copier(buffer: Bytes) -> tuple[Work, int]:
    """The work, and the number of its blocks."""
    half = len(buffer) // 2
    source, target = buffer[:half], buffer[half : 2 * half]

    def copy(block: int) -> int:
        end = min((block + 1) * BLOCK, half)
        for begin in range(block * BLOCK, end, TILE):
            target[begin : min(begin + TILE, end)] = source[begin : min(begin + TILE, end)]
        return end - block * BLOCK

    return copy, -(-half // BLOCK)


def _rates(kinds: list[Works], seconds: float) -> list[dict[str, list[float]]]:
    """Alternates between all works, so that other programs slow all of them alike; each uses other blocks
    than the one before."""
    rates: list[dict[str, list[float]]] = [{name: [] for name in works} for works in kinds]
    began, rounds, calls = time.perf_counter(), 0, 0
    while rounds < FEWEST or time.perf_counter() - began < seconds:
        rounds += 1
        for works, of_kind in zip(kinds, rates, strict=True):
            for name, (work, blocks) in works.items():
                calls += 1
                before = time.perf_counter()
                done = work(calls % blocks)
                of_kind[name].append(done / (time.perf_counter() - before))
    return rates
