"""The reference kernel: every format in plain torch operations, on the CPU and on CUDA.

Arithmetic of the plain formats (f32, bf16): matrix products in the format's own dtype. Of the quantized
ones: activations, and between the matrices silu(gate) * up, are rounded to int8 steps group by group, and
products are summed in float32 (`unpack.py`). Everything between tiles and experts is float32.
The order of the operations depends only on the tiles and rows, so the same call gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from shm.blocks import BlockFormat
from shm.layout import StoreLayout
from workers.kernels.unpack import dequantize, int8_steps

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def tile_numbers(layout: StoreLayout, tile: Tensor) -> tuple[Tensor, Tensor]:
    """A tile's weights, float32: gate over up [2T, H], down's columns [T, H]. tile: uint8 [tile_bytes]."""
    channels, hidden, blocks = layout.shape.tile, layout.shape.hidden, layout.format
    if not isinstance(blocks, BlockFormat):
        parts = tile.view(DTYPES[blocks.name]).view(3 * channels, hidden).float()
        return parts[: 2 * channels], parts[2 * channels :]
    wide = 2 * blocks.matrix_bytes(channels, hidden)
    gate_up = dequantize(blocks, tile[:wide], 2 * channels, hidden)
    return gate_up[:, :hidden], dequantize(blocks, tile[wide:], hidden, channels).mT


class ReferenceKernel:
    """Computes tiles in a uint8 tensor, on that tensor's device."""

    def __init__(self, layout: StoreLayout, tick: Callable[[], None] | None = None) -> None:
        """`tick` is called after each tile, as a sign of progress."""
        self._tick = tick
        self._tile = layout.shape.tile
        self._hidden = layout.shape.hidden
        self._tile_bytes = layout.tile_bytes
        self._plain = DTYPES.get(layout.format.name)
        self._blocks = layout.format if isinstance(layout.format, BlockFormat) else None

    def activations(self, x: Tensor) -> Tensor:
        """Hidden states float32 [R, H] in the kernel's form [R, ...]; once per Work, not once per expert."""
        return x.to(self._plain) if self._blocks is None else int8_steps(x, self._blocks.group)

    def compute(self, data: Tensor, x: Tensor, rows: Tensor) -> Tensor:
        """Sum of the outputs of consecutive tiles. data: uint8 [tiles * tile_bytes]; x: `activations`; rows:
        int64 [n], indices into it. Returns float32 [n, H], a new tensor."""
        x = x[rows]
        total: Tensor | None = None
        for tile in data.view(-1, self._tile_bytes):
            part = self._tile_output(tile, x)
            total = part if total is None else total.add_(part)
            if self._tick is not None:
                self._tick()
        if total is None:
            raise ValueError("no tiles")
        return total

    def _tile_output(self, tile: Tensor, x: Tensor) -> Tensor:
        """float32 [R, H]"""
        blocks = self._blocks
        if blocks is None:
            parts = tile.view(x.dtype).view(3, self._tile, self._hidden)
            return (self._inner(x, parts[:2].view(2 * self._tile, self._hidden)) @ parts[2]).float()
        wide = blocks.matrix_bytes(self._tile, self._hidden)
        # Tiles are whole blocks of outputs: gate and up are one matrix of twice as many.
        gate_up = dequantize(blocks, tile[: 2 * wide], 2 * self._tile, self._hidden)
        down = dequantize(blocks, tile[2 * wide :], self._hidden, self._tile)
        return functional.linear(int8_steps(self._inner(x, gate_up), blocks.group), down)

    def _inner(self, x: Tensor, gate_up: Tensor) -> Tensor:
        """silu(gate x) * (up x): [R, T]"""
        both = functional.linear(x, gate_up)  # [R, 2T]
        return functional.silu(both[:, : self._tile]) * both[:, self._tile :]
