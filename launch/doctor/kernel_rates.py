"""Process entry: computes with weights in a buffer, each time others so that no cache holds them, and writes
the rates: reads in the fastest way, an expert's tiles at one row as a worker computes them, a matrix times a
vector as the backbone does. It alternates between them, so that other programs slow all of them alike."""

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
from workers.kernels import reading
from workers.kernels.choice import Choice
from workers.kernels.host import Activations, HostKernel
from workers.kernels.native import best
from workers.lifetime import pin

FEWEST = 3  # samples, for a median
MATRIX_ROWS = 2048
ALIGNMENT = 4096  # of what is computed with
SAMPLE = 0.02  # seconds; the same for all kinds, because other programs interrupt longer ones more often


class Work(NamedTuple):
    """What computes with `size` bytes of the buffer, of which it reads `read`."""

    compute: Callable[[Bytes], object]
    size: int
    read: int


def main(config: dict[str, Any]) -> None:
    """Configuration: `fd`, `size`, `lo`, `hi`, `cores` and `seconds` (of each kind) as for
    `launch/doctor/reader.py`; `experts`: (format, fields of its ExpertShape) of each kind; `left_out`: the
    share of an expert's channels that formats with heads leave out; `matrix`: (dtype, width, threads), or
    None; `kernels`: the Choice. Writes "ready", waits for a line, then writes for the reads, each of the
    experts and the matrix a list of bytes a second."""
    pin(config["cores"])
    shared = np.frombuffer(mmap.mmap(config["fd"], config["size"], mmap.MAP_SHARED), np.uint8)
    part = shared[config["lo"] : config["hi"]]
    part.view(np.uint64).max()  # maps every page
    works = [Work(reading.fastest_way(part, best()), reading.SAMPLE, reading.SAMPLE)]
    kernels, share = Choice.from_map(config["kernels"]), 1 - config["left_out"]
    for name, shape in config["experts"]:
        works.append(_expert(name, ExpertShape(*shape), len(part), kernels, share))
    if config["matrix"] is not None:
        works.append(_matrix(*config["matrix"]))
    for work in works:
        work.compute(part[: work.size])  # allocates scratch, and imports what it needs
    print(json.dumps("ready"), flush=True)
    if sys.stdin.readline():
        print(json.dumps(_rates(works, part, config["seconds"])), flush=True)


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


def _rates(works: list[Work], buffer: Bytes, seconds: float) -> list[list[float]]:
    rates: list[list[float]] = [[] for _ in works]
    offset = 0
    began = now = time.perf_counter()
    while now - began < seconds * len(works) or len(rates[-1]) < FEWEST:
        for (compute, size, read), its in zip(works, rates, strict=True):
            started = now = time.perf_counter()
            done = 0
            while now - started < SAMPLE:
                offset = offset if offset + size <= len(buffer) else 0
                compute(buffer[offset : offset + size])
                offset += -(-size // ALIGNMENT) * ALIGNMENT
                done += read
                now = time.perf_counter()
            its.append(done / (now - started))
    return rates
