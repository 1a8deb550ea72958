"""Process entry: computes with the weights in a buffer, each time others so that no cache holds them, and
writes the rates. It reads, or copies tile by tile like the prefetcher's into a slab in shared memory; or it
reads and computes an expert's tiles at one row as a worker does and a matrix
times a vector as the backbone does. It alternates between all, so that other programs slow all of them alike.
"""

from __future__ import annotations

import json
import mmap
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from shm.descriptor import describe
from shm.floe import FloeFormat
from shm.layout import Bytes, ExpertShape, StoreLayout, format_named
from shm.mask import Mask
from shm.store import Store
from workers.kernels.host import Activations, HostKernel
from workers.kernels.native import reader
from workers.lifetime import pin

BLOCK = 1 << 25  # bytes of one read, and of one copy
TILE = 1 << 20  # bytes of a part of a copy, about a tile of a large model
FEWEST = 3  # samples, for a median
MATRIX_ROWS = 2048
ALIGNMENT = 4096  # of what is computed with
SAMPLE = 0.02  # seconds; the same for all kinds, because other programs interrupt longer ones more often


class Work(NamedTuple):
    """A computation with `size` bytes of a buffer, of which it counts `read`."""

    compute: Callable[[Bytes], object]
    size: int
    read: int


Kind = tuple[Bytes, Work]  # a buffer, and what computes with it


def main(config: dict[str, Any]) -> None:
    """Configuration: `fd` and `size` of the buffer; `lo`, `hi`: the part to use; `cores` to run on; `seconds`
    of measurement, of each kind; `what`: read, copy, huge (reads, and reads of private memory in huge pages)
    or kernels. For kernels: `experts`: (format, fields of its ExpertShape) of each kind; `left_out`: the
    share of an expert's channels that formats with heads leave out; `matrix`: (dtype, width, threads) or
    None. Writes "ready", waits for a line, then writes for each kind the bytes a second of each sample."""
    pin(config["cores"])
    shared = np.frombuffer(mmap.mmap(config["fd"], config["size"], mmap.MAP_SHARED), np.uint8)
    part = shared[config["lo"] : config["hi"]]
    part.view(np.uint64).max()  # maps every page
    kinds: list[Kind] = []
    match config["what"]:
        case "copy":
            kinds.append((part, Work(_copy, min(2 * BLOCK, len(part)), min(BLOCK, len(part) // 2))))
        case "kernels":
            kinds += [(part, work) for work in _kernels(config, part)]
        case "huge":
            kinds += [(memory, _read(memory)) for memory in (part, _huge_pages(len(part)))]
        case _:
            kinds.append((part, _read(part)))
    for memory, work in kinds:
        work.compute(memory[: work.size])  # allocates scratch, and imports what it needs
    print(json.dumps("ready"), flush=True)
    if sys.stdin.readline():
        print(json.dumps(_rates(kinds, config["seconds"])), flush=True)


def _huge_pages(size: int) -> Bytes:
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[:] = 1  # pages that were never written would all be the one page of zeros
    return array


def _read(buffer: Bytes) -> Work:
    size = min(BLOCK, len(buffer)) // 64 * 64
    return Work(reader(), size, size)


def _copy(block: Bytes) -> None:
    half = len(block) // 2
    for begin in range(0, half, TILE):
        end = min(begin + TILE, half)
        block[half + begin : half + end] = block[begin:end]


def _kernels(config: dict[str, Any], part: Bytes) -> list[Work]:
    works, share = [_read(part)], 1 - config["left_out"]
    for name, shape in config["experts"]:
        works.append(_expert(name, ExpertShape(*shape), len(part), share))
    if config["matrix"] is not None:
        works.append(_matrix(*config["matrix"]))
    return works


def _expert(name: str, shape: ExpertShape, most: int, share: float) -> Work:
    """One expert; fewer of its tiles where it exceeds `most` bytes. `share`: of the channels of a format with
    heads that are kept. The buffer's weights are alike, so that these are the first ones of each tile."""
    layout = StoreLayout(shape, format_named(name))
    kernel = HostKernel(layout)
    x = np.full((1, shape.hidden), 0.5, np.float32)
    row = np.zeros(1, np.int32)
    tiles = max(1, min(shape.tiles, most * shape.tiles // layout.expert_bytes))
    size = layout.tile_bytes * tiles
    if isinstance(format := layout.format, FloeFormat):  # computed as Works on a store
        one = replace(shape, layers=1, experts=1, intermediate=tiles * shape.tile)
        layout = StoreLayout(one, format)
        mask, y = Mask(share=share), np.empty_like(x)
        order = describe(0, [(0, 0, tiles)], [0, 1], [0], [1.0], 1, mask)
        kept = mask.number(shape.tile) if share < 1 else shape.tile
        read = tiles * (layout.head_bytes + kept * format.channel_bytes(shape.hidden))
        return Work(
            lambda data: kernel.compute_work(order, x, _Buffer(layout, data), y), layout.total_bytes, read
        )
    return Work(lambda data: kernel.compute(data, Activations(x), row), size, size)


class _Buffer(Store):
    """The bytes of a buffer as a store of one expert."""

    def __init__(self, layout: StoreLayout, data: Bytes) -> None:
        self.layout = layout
        self._data = data
        self._tile_bytes = layout.tile_bytes


def _matrix(dtype: str, width: int, threads: int) -> Work:
    import torch

    torch.set_num_threads(threads)
    kind = {"bf16": torch.bfloat16, "f32": torch.float32}[dtype]
    x = torch.full((1, width), 0.5, dtype=kind)

    def multiply(data: Bytes) -> object:
        weight = torch.from_numpy(data).view(kind).view(MATRIX_ROWS, width)
        with torch.inference_mode():
            return torch.nn.functional.linear(x, weight)

    size = MATRIX_ROWS * width * kind.itemsize
    return Work(multiply, size, size)


def _rates(kinds: list[Kind], seconds: float) -> list[list[float]]:
    rates: list[list[float]] = [[] for _ in kinds]
    offset, rounds = 0, 0
    began = time.perf_counter()
    while rounds < FEWEST or time.perf_counter() - began < seconds * len(kinds):
        rounds += 1
        for (buffer, (compute, size, read)), of_kind in zip(kinds, rates, strict=True):
            started = now = time.perf_counter()
            done = 0
            while now - started < SAMPLE:
                offset = offset if offset + size <= len(buffer) else 0
                compute(buffer[offset : offset + size])
                offset += -(-size // ALIGNMENT) * ALIGNMENT
                done += read
                now = time.perf_counter()
            of_kind.append(done / (now - started))
    return rates
