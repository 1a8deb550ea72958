"""The interface of a tile's format, and the plain formats: unquantized numbers in row-major order.

    plain formats (f32, bf16), one tile of T channels:

        byte 0               T*H*s                2*T*H*s              3*T*H*s
        | gate rows [T, H]   | up rows [T, H]     | down columns [T, H] |     s = bytes of one number

    all row-major, down transposed so that the tile's part of y is `a @ D`, a = silu(gate x) * (up x).

The quantized formats are in `shm/blocks.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

ENCODED_ROWS = 8  # rounded at a time, so that the steps in between stay in the processor's cache
RANDOM_BYTES = 1 << 19  # drawn at a time, for the same reason
UNIFORM = 3.0**0.5  # a uniform number from -UNIFORM to UNIFORM has the standard deviation 1

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class TileFormat(ABC):
    """How one tile's numbers become bytes. Stateless."""

    name: str

    @property
    def granularity(self) -> int:
        """The channels of a tile must be a multiple of it."""
        return 1

    @abstractmethod
    def tile_bytes(self, hidden: int, tile: int) -> int:
        """Bytes of one tile of `tile` channels. Raises ValueError for no multiple of the granularity."""

    @abstractmethod
    def encode(self, gate: Float32, up: Float32, down: Float32, out: Bytes) -> None:
        """Write one tile. gate and up [T, H], down [T, H] (already transposed), out uint8 [tile_bytes]."""

    @abstractmethod
    def decode(self, data: Bytes, hidden: int, tile: int) -> Float32:
        """The tile's numbers as float32 [3, T, H]: gate, up, down transposed. For tests and tools."""

    @abstractmethod
    def fill_random(self, rng: np.random.Generator, hidden: int, tile: int, scale: float, out: Bytes) -> None:
        """Write a tile of random weights of mean 0 and standard deviation about `scale`, at the speed of the
        generator; what pads the tile is as `encode` writes it. out uint8 [tile_bytes]."""


class F32(TileFormat):
    """IEEE binary32, little endian, drawn above with s = 4."""

    name = "f32"

    def tile_bytes(self, hidden: int, tile: int) -> int:
        return 3 * tile * hidden * 4

    def encode(self, gate: Float32, up: Float32, down: Float32, out: Bytes) -> None:
        np.stack((gate, up, down), out=out.view("<f4").reshape(3, *gate.shape))

    def decode(self, data: Bytes, hidden: int, tile: int) -> Float32:
        return data.view("<f4").reshape(3, tile, hidden)

    def fill_random(self, rng: np.random.Generator, hidden: int, tile: int, scale: float, out: Bytes) -> None:
        step = np.float32(2 * UNIFORM * scale / 2**23)
        for part in random_parts(rng, out):
            bits = part.view("<u4")
            bits &= np.uint32(2**23 - 1)
            values = bits.astype(np.float32)
            values -= np.float32(2**22 - 0.5)
            np.multiply(values, step, out=part.view("<f4"))


class BF16(TileFormat):
    """bfloat16 (the upper half of binary32, rounded to nearest even), little endian, s = 2."""

    name = "bf16"

    def tile_bytes(self, hidden: int, tile: int) -> int:
        return 3 * tile * hidden * 2

    def encode(self, gate: Float32, up: Float32, down: Float32, out: Bytes) -> None:
        target = out.view("<u2").reshape(3, *gate.shape)
        for part, values in zip(target, (gate, up, down), strict=True):
            for lo in range(0, len(values), ENCODED_ROWS):
                part[lo : lo + ENCODED_ROWS] = round_to_bf16(values[lo : lo + ENCODED_ROWS])

    def decode(self, data: Bytes, hidden: int, tile: int) -> Float32:
        return widen_bf16(data.view("<u2").reshape(3, tile, hidden))

    def fill_random(self, rng: np.random.Generator, hidden: int, tile: int, scale: float, out: Bytes) -> None:
        # Every pattern of 16 bits stands for one of the evenly spaced numbers.
        values = (np.arange(1 << 16, dtype=np.float32) - np.float32(2**15 - 0.5)) * np.float32(
            2 * UNIFORM * scale / 2**16
        )
        table = round_to_bf16(values)
        for part in random_parts(rng, out):
            halves = part.view("<u2")
            halves[:] = table[halves]


def random_parts(rng: np.random.Generator, out: Bytes) -> Iterator[Bytes]:
    """Fill `out` (any number of bytes) with random bytes; yields its parts in order."""
    for lo in range(0, len(out), RANDOM_BYTES):
        part = out[lo : lo + RANDOM_BYTES]
        part[:] = rng.bit_generator.random_raw(-(-len(part) // 8)).view(np.uint8)[: len(part)]
        yield part


def round_to_bf16(values: Float32) -> NDArray[np.uint16]:
    """The bfloat16 bit patterns of float32 values, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    rounded = np.where(np.isnan(values), np.uint32(0x7FC0), rounded)
    return rounded.astype(np.uint16)


def widen_bf16(patterns: NDArray[np.uint16]) -> Float32:
    """The float32 values of bfloat16 bit patterns, exact."""
    return (patterns.astype(np.uint32) << 16).view(np.float32)
