"""What a C kernel computes: the shape and format of its weights, and activations as it reads them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shm.blocks import BlockFormat
from shm.formats import BF16, Float32, TileFormat

BF16_BITS = 16

Codes = NDArray[np.int8] | Float32


@dataclass(frozen=True)
class Geometry:
    """A matrix [outputs, inputs] of a quantized format, or tiles of `channels` with H = inputs = outputs."""

    format: TileFormat
    inputs: int
    outputs: int
    channels: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.format, BlockFormat | BF16):
            raise ValueError(f"no C kernel computes {self.format.name}")
        if self.channels % self.format.granularity:
            raise ValueError(f"{self.channels} channels are no whole groups of {self.format.granularity}")

    @property
    def bits(self) -> int:
        return self.format.bits if isinstance(self.format, BlockFormat) else BF16_BITS

    @property
    def group(self) -> int:
        return self.format.granularity

    @property
    def padded(self) -> int:
        """Inputs in whole groups."""
        return -(-self.inputs // self.group) * self.group


@dataclass(frozen=True)
class Quantized:
    """Activations as a kernel reads them. Quantized formats: codes int8 [R, padded], factors float32
    [R, groups, 2]; bf16: codes float32 [R, inputs], factors empty."""

    codes: Codes
    factors: Float32
