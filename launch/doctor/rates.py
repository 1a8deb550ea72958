"""Process entry: computes with the weights in a buffer, each time others so that no cache holds them, and
writes the rates. It reads in several ways, or copies tile by tile like the prefetcher's into a slab in shared
memory; or it reads in the fastest way and computes an expert's tiles at one row as a worker does and a matrix
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

from protocol import messages
from shm.floe import FloeFormat
from shm.layout import Bytes, ExpertShape, StoreLayout, format_named
from shm.mask import Mask
from shm.store import Store
from workers.kernels import reading
from workers.kernels.choice import Choice
from workers.kernels.host import Activations, HostKernel
from workers.kernels.native import best
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


Kind = tuple[Bytes, dict[str, Work]]  # a buffer, and the ways in which it is used, by name


def main(config: dict[str, Any]) -> None:
    """Configuration: `fd` and `size` of the buffer; `lo`, `hi`: the part to use; `cores` to run on; `seconds`
    of measurement, of each kind; `what`: read, copy, huge (reads, and reads of private memory in huge pages)
    or kernels. For kernels: `experts`: (format, fields of its ExpertShape) of each kind; `left_out`: the
    share of an expert's channels that formats with heads leave out; `matrix`: (dtype, width, threads) or
    None; `kernels`: the Choice. Writes "ready", waits for a line, then writes for each kind the bytes a
    second of each way, by name."""
    pin(config["cores"])
    shared = np.frombuffer(mmap.mmap(config["fd"], config["size"], mmap.MAP_SHARED), np.uint8)
    part = shared[config["lo"] : config["hi"]]
    part.view(np.uint64).max()  # maps every page
    kinds: list[Kind] = []
    match config["what"]:
        case "copy":
            kinds.append((part, {"": Work(_copy, min(2 * BLOCK, len(part)), min(BLOCK, len(part) // 2))}))
        case "kernels":
            kinds += [(part, {"": work}) for work in _kernels(config, part)]
        case "huge":
            kinds += [(memory, _readers(memory)) for memory in (part, _huge_pages(len(part)))]
        case _:
            kinds.append((part, _readers(part)))
    for memory, works in kinds:
        for work in works.values():
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


def _readers(buffer: Bytes) -> dict[str, Work]:
    size = min(BLOCK, len(buffer)) // 64 * 64
    return {name: Work(read, size, size) for name, read in reading.ways(best()).items()}


def _copy(block: Bytes) -> None:
    half = len(block) // 2
    for begin in range(0, half, TILE):
        end = min(begin + TILE, half)
        block[half + begin : half + end] = block[begin:end]


def _kernels(config: dict[str, Any], part: Bytes) -> list[Work]:
    works = [Work(reading.fastest_way(part, best()), reading.SAMPLE, reading.SAMPLE)]
    kernels, share = Choice.from_map(config["kernels"]), 1 - config["left_out"]
    for name, shape in config["experts"]:
        works.append(_expert(name, ExpertShape(*shape), len(part), kernels, share))
    if config["matrix"] is not None:
        works.append(_matrix(*config["matrix"]))
    return works


def _expert(name: str, shape: ExpertShape, most: int, kernels: Choice, share: float) -> Work:
    """One expert; fewer of its tiles where it exceeds `most` bytes. `share`: of the channels of a format with
    heads that are kept. The buffer's weights are alike, so that these are the first ones of each tile."""
    layout = StoreLayout(shape, format_named(name))
    kernel = HostKernel(layout, kernels=kernels)
    x = np.full((1, shape.hidden), 0.5, np.float32)
    row = np.zeros(1, np.int32)
    tiles = max(1, min(shape.tiles, most * shape.tiles // layout.expert_bytes))
    size = layout.tile_bytes * tiles
    if isinstance(format := layout.format, FloeFormat):  # computed as Works on a store
        one = replace(shape, layers=1, experts=1, intermediate=tiles * shape.tile)
        layout = StoreLayout(one, format)
        items, offsets = np.array([[0, 0, tiles]], np.int32), np.array([0, 1], np.int32)
        mask = Mask(share=share)
        order = messages.Work(
            0, 0, items, offsets, row, np.ones(1, np.float32), x, mask.threshold, mask.share
        )
        kept = mask.number(shape.tile) if share < 1 else shape.tile
        read = tiles * (layout.head_bytes + kept * format.channel_bytes(shape.hidden))
        return Work(lambda data: kernel.compute_work(order, _Buffer(layout, data)), layout.total_bytes, read)
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


def _rates(kinds: list[Kind], seconds: float) -> list[dict[str, list[float]]]:
    rates: list[dict[str, list[float]]] = [{name: [] for name in works} for _, works in kinds]
    offset, rounds = 0, 0
    began = time.perf_counter()
    while rounds < FEWEST or time.perf_counter() - began < seconds * len(kinds):
        rounds += 1
        for (buffer, works), of_kind in zip(kinds, rates, strict=True):
            for name, (compute, size, read) in works.items():
                started = now = time.perf_counter()
                done = 0
                while now - started < SAMPLE:
                    offset = offset if offset + size <= len(buffer) else 0
                    compute(buffer[offset : offset + size])
                    offset += -(-size // ALIGNMENT) * ALIGNMENT
                    done += read
                    now = time.perf_counter()
                of_kind[name].append(done / (now - started))
    return rates
