"""What a C kernel computes: the shape and format of its weights, and activations as it reads them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shm.blocks import BlockFormat
from shm.floe import FloeFormat
from shm.formats import BF16, Float32, TileFormat

BF16_BITS = 16

Codes = NDArray[np.int8] | Float32


@dataclass(frozen=True)
class Geometry:
    """A matrix [outputs, inputs] of a quantized format, or tiles of `channels` with H = inputs = outputs.
    Of a format whose gate and down lie by channel, `bits` and `group` are those of up."""

    format: TileFormat
    inputs: int
    outputs: int
    channels: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.format, BlockFormat | FloeFormat | BF16):
            raise ValueError(f"no C kernel computes {self.format.name}")
        if self.channels % self.format.granularity:
            raise ValueError(f"{self.channels} channels are no whole groups of {self.format.granularity}")

    @property
    def bits(self) -> int:
        blocks = self._blocks
        return BF16_BITS if blocks is None else blocks.bits

    @property
    def group(self) -> int:
        blocks = self._blocks
        return 1 if blocks is None else blocks.group

    @property
    def channel_bits(self) -> int:
        """Of gate and down, where they lie by channel; else 0."""
        return self.format.rows.bits if isinstance(self.format, FloeFormat) else 0

    @property
    def padded(self) -> int:
        """Inputs in whole groups."""
        return -(-self.inputs // self.group) * self.group

    @property
    def _blocks(self) -> BlockFormat | None:
        format = self.format.up if isinstance(self.format, FloeFormat) else self.format
        return format if isinstance(format, BlockFormat) else None


@dataclass(frozen=True)
class Quantized:
    """Activations as a kernel reads them. Quantized formats: codes int8 [R, padded], factors float32
    [R, groups, 2]; bf16: codes float32 [R, inputs], factors empty."""

    codes: Codes
    factors: Float32
