"""Layers of experts with any bytes, computed on the host and on a device."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from emulated_cuda import EmulatedLauncher, library
from kernel_runs import bits, kernel_of
from numpy.typing import NDArray
from quantized_cases import random_tiles, states

from pipeline.device.base import DeviceKernel, LayerSum
from shm.blocks import BlockFormat
from shm.expert_math import SWIGLU, ExpertMath
from shm.layout import Bytes, ExpertShape, Float32, StoreLayout, format_named
from workers.kernels.cuda.sums import SUMS, OutputSums
from workers.kernels.native import Library, best, load


def host(name: str) -> Library:
    """The machine's own library, or the portable one."""
    found = load("portable") if name == "portable" else best()
    if not isinstance(found, Library) or (name == "fused" and found.variant == "portable"):
        pytest.skip(f"no {name} library here")
    return found


def same(found: Float32, expected: Float32) -> None:
    """Equal bits; a number that is none may be another one that is none."""
    np.testing.assert_array_equal(found, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(bits(found)[numbers], bits(expected)[numbers])


@dataclass(frozen=True)
class Layer:
    """Experts of one layer, hidden states, and which experts compute which of them."""

    layout: StoreLayout
    data: Bytes  # [experts, expert_bytes]
    x: Float32
    items: tuple[tuple[int, int], ...]  # expert, cut
    rows: tuple[NDArray[np.int32], ...]  # of each item, ascending
    weights: tuple[Float32, ...]

    @property
    def format(self) -> BlockFormat:
        assert isinstance(self.layout.format, BlockFormat)
        return self.layout.format

    def tile(self, expert: int, tile: int) -> Bytes:
        size = self.layout.tile_bytes
        return self.data[expert, tile * size : (tile + 1) * size]


def made(
    name: str,
    hidden: int,
    groups: int,
    tiles: int,
    number: int,
    experts: int,
    *kinds: str,
    seed: int,
    math: ExpertMath = SWIGLU,
) -> Layer:
    random, format = np.random.default_rng(seed), format_named(name)
    assert isinstance(format, BlockFormat)
    tile = groups * format.granularity
    layout = StoreLayout(ExpertShape(1, experts, hidden, tiles * tile, tile, math), format)
    codes, head, kind = kinds
    data = random_tiles(random, layout, experts * tiles, codes, head).reshape(experts, -1)
    items, rows = [], []
    for expert in range(experts):
        some = np.flatnonzero(random.random(number) < random.choice([0.1, 0.5, 1.0])).astype(np.int32)
        if len(some):
            items.append((expert, int(random.integers(1, tiles + 1))))
            rows.append(some)
    weights = [random.standard_normal(len(some)).astype(np.float32) for some in rows]
    return Layer(
        layout, data, states(random, kind, number, hidden), tuple(items), tuple(rows), tuple(weights)
    )


def on_host(library: Library, layer: Layer) -> Float32:
    kernel, y = kernel_of(library, layer.layout), np.zeros_like(layer.x)
    x = kernel.quantize(layer.x)
    for (expert, tiles), rows, weights in zip(layer.items, layer.rows, layer.weights, strict=True):
        part = kernel.tiles(layer.data[expert, : tiles * layer.layout.tile_bytes], x, rows)
        y[rows] += part * weights[:, None]
    return y


def slots_of(device: torch.device, number: int, size: int) -> list[torch.Tensor]:
    """Slots of so many bytes. On the host each ends where memory does: to read further ends the process."""
    if device.type != "cpu":
        slab = torch.full((number, -(-size // 256) * 256), 0xFF, dtype=torch.uint8, device=device)
        return [slot[:size] for slot in slab]
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    slots = []
    for _ in range(number):
        memory = np.frombuffer(mmap.mmap(-1, whole + mmap.PAGESIZE), np.uint8)
        guard = ctypes.c_void_p(memory.ctypes.data + whole)
        assert ctypes.CDLL(None).mprotect(guard, mmap.PAGESIZE, 0) == 0
        slots.append(torch.from_numpy(memory[whole - size : whole]))
    return slots


def on_device(
    experts: DeviceKernel,
    device: torch.device,
    layer: Layer,
    resident: Sequence[int],
    seed: int,
    sums: OutputSums | None = None,
) -> Float32:
    """Tiles in slots in any order: `resident` of each item at once, the rest one by one."""
    random, size = np.random.default_rng(seed), layer.layout.tile_bytes
    wanted = [(item, tile) for item, (_, number) in enumerate(layer.items) for tile in range(number)]
    slots = random.permutation(len(wanted) + 2)[: len(wanted)]
    places, slab = {}, slots_of(device, len(wanted) + 2, size)
    for (item, tile), slot in zip(wanted, slots.tolist(), strict=True):
        places[item, tile] = slab[slot]
        slab[slot].copy_(torch.from_numpy(layer.tile(layer.items[item][0], tile).copy()))
    offsets = np.cumsum([0, *map(len, layer.rows)]).astype(np.int32)
    cuts = np.array([cut for _, cut in layer.items], np.int32)
    x, rows, weights = torch.from_numpy(layer.x).to(device), *map(np.concatenate, (layer.rows, layer.weights))
    share = experts.begin(x, cuts, offsets, rows, weights)
    share.add([(item, tile, places[item, tile]) for item, tile in wanted if tile < resident[item]])
    landing = [(item, tile) for item, tile in wanted if tile >= resident[item]]
    while landing:
        next_of = {item: tile for item, tile in reversed(landing)}
        item = int(random.choice(list(next_of)))
        landing.remove((item, next_of[item]))
        share.add([(item, next_of[item], places[item, next_of[item]])])
    return total_of(share, x, sums)


def total_of(share: LayerSum, x: torch.Tensor, sums: OutputSums | None = None) -> Float32:
    """Add a share up as the layer's only output; `sums`: of a GPU."""
    sums, y = sums or OutputSums(EmulatedLauncher(library(SUMS))), torch.full_like(x, torch.nan)
    sums.total(y, [share.result()], [])
    return y.cpu().numpy()
