"""The reference kernel: the plain formats (f32, bf16) through torch, on the CPU and on CUDA.

Arithmetic: matrix products in the format's own dtype, everything between tiles and experts in float32.
The order of the operations depends on the tiles and rows alone, so the same call gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from shm.layout import StoreLayout

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


class ReferenceKernel:
    """Computes tiles whose bytes lie in a uint8 tensor, on that tensor's device."""

    def __init__(self, layout: StoreLayout, tick: Callable[[], None] | None = None) -> None:
        """`tick` is called after each tile: progress was made."""
        self._tick = tick
        self._tile = layout.shape.tile
        self._hidden = layout.shape.hidden
        self._tile_bytes = layout.tile_bytes
        self._dtype = DTYPES[layout.format.name]

    def activations(self, x: Tensor) -> Tensor:
        """Hidden states float32 [R, H] as the kernel reads them; once per Work, not once per expert."""
        return x.to(self._dtype)

    def run(self, data: Tensor, x: Tensor) -> Tensor:
        """Sum of the outputs of consecutive tiles. data: uint8 [tiles * tile_bytes]; x: `activations`
        [R, H]. Returns float32 [R, H], a new tensor."""
        tiles = data.view(self._dtype).view(-1, 3, self._tile, self._hidden)
        total: Tensor | None = None
        for tile in tiles:
            both = functional.linear(x, tile[:2].view(2 * self._tile, self._hidden))  # [R, 2T]
            inner = functional.silu(both[:, : self._tile]) * both[:, self._tile :]  # [R, T]
            part = (inner @ tile[2]).float()  # [R, H]
            total = part if total is None else total.add_(part)
            if self._tick is not None:
                self._tick()
        if total is None:
            raise ValueError("no tiles to run")
        return total
