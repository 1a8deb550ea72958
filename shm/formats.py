"""The interface of a tile's format, and the plain formats: unquantized numbers in row-major order.

    plain formats (f32, bf16), one tile of T channels:

        byte 0               T*H*s                2*T*H*s              3*T*H*s
        | gate rows [T, H]   | up rows [T, H]     | down columns [T, H] |     s = bytes of one number

    all row-major, down transposed so that the tile's part of y is `a @ D`, a = silu(gate x) * (up x).

The quantized formats are in `shm/blocks.py`, those that are read by channel in `shm/floe.py`. The latter
divide a tile: its head (all of up) and its body are in two places. Other formats have no heads.

Random weights are copied from a pool of random numbers of the format, so that they cost no more than a copy:
a tile is pieces of POOL_PIECE bytes, each from a random place in the pool.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

ENCODED_ROWS = 8  # rounded at a time, so that the steps in between stay in the processor's cache
POOL_BYTES = 1 << 22  # of random numbers, about: several fit into the processor's cache
POOL_PIECE = 1 << 16  # bytes of a tile that are next to each other in the pool, too
POOL_SEED = 1
UNIFORM = 3.0**0.5  # a uniform number from -UNIFORM to UNIFORM has the standard deviation 1

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]
NO_HEAD: Bytes = np.empty(0, np.uint8)


class TileFormat(ABC):
    """How one tile's numbers become bytes. Stateless."""

    name: str
    random_step = 64  # bytes between the places in the pool where a piece may begin

    @property
    def granularity(self) -> int:
        """The channels of a tile must be a multiple of it."""
        return 1

    @abstractmethod
    def tile_bytes(self, hidden: int, tile: int) -> int:
        """Bytes of one tile of `tile` channels. Raises ValueError for no multiple of the granularity."""

    def head_bytes(self, hidden: int, tile: int) -> int:
        """Bytes of a tile's head, beside `tile_bytes`; 0 for a format without heads."""
        return 0

    @abstractmethod
    def encode(self, gate: Float32, up: Float32, down: Float32, out: Bytes, head: Bytes = NO_HEAD) -> None:
        """Write one tile. gate and up [T, H], down [T, H] (already transposed), out uint8 [tile_bytes], head
        uint8 [head_bytes]."""

    @abstractmethod
    def decode(self, data: Bytes, hidden: int, tile: int, head: Bytes = NO_HEAD) -> Float32:
        """The tile's numbers as float32 [3, T, H]: gate, up, down transposed. For tests and tools."""

    @abstractmethod
    def draw_pool(self, rng: np.random.Generator, nbytes: int, scale: float) -> Bytes:
        """About `nbytes` bytes, a multiple of `random_step`, of random weights of mean 0 and standard
        deviation about `scale`."""

    def fill_random(
        self,
        rng: np.random.Generator,
        hidden: int,
        tile: int,
        scale: float,
        out: Bytes,
        head: Bytes = NO_HEAD,
    ) -> None:
        """Write a tile of random weights of mean 0 and standard deviation about `scale`, at the speed of a
        copy; what pads the tile is as `encode` writes it. out uint8 [tile_bytes], head uint8 [head_bytes]."""
        copy_pieces(rng, self, scale, out)


class F32(TileFormat):
    """IEEE binary32, little endian, drawn above with s = 4."""

    name = "f32"

    def tile_bytes(self, hidden: int, tile: int) -> int:
        return 3 * tile * hidden * 4

    def encode(self, gate: Float32, up: Float32, down: Float32, out: Bytes, head: Bytes = NO_HEAD) -> None:
        np.stack((gate, up, down), out=out.view("<f4").reshape(3, *gate.shape))

    def decode(self, data: Bytes, hidden: int, tile: int, head: Bytes = NO_HEAD) -> Float32:
        return data.view("<f4").reshape(3, tile, hidden)

    def draw_pool(self, rng: np.random.Generator, nbytes: int, scale: float) -> Bytes:
        values = rng.random(nbytes // 4, dtype=np.float32) - np.float32(0.5)
        values *= np.float32(2 * UNIFORM * scale)
        return values.view(np.uint8)


class BF16(TileFormat):
    """bfloat16 (the upper half of binary32, rounded to nearest even), little endian, s = 2."""

    name = "bf16"

    def tile_bytes(self, hidden: int, tile: int) -> int:
        return 3 * tile * hidden * 2

    def encode(self, gate: Float32, up: Float32, down: Float32, out: Bytes, head: Bytes = NO_HEAD) -> None:
        target = out.view("<u2").reshape(3, *gate.shape)
        for part, values in zip(target, (gate, up, down), strict=True):
            for lo in range(0, len(values), ENCODED_ROWS):
                part[lo : lo + ENCODED_ROWS] = round_to_bf16(values[lo : lo + ENCODED_ROWS])

    def decode(self, data: Bytes, hidden: int, tile: int, head: Bytes = NO_HEAD) -> Float32:
        return widen_bf16(data.view("<u2").reshape(3, tile, hidden))

    def draw_pool(self, rng: np.random.Generator, nbytes: int, scale: float) -> Bytes:
        values = F32().draw_pool(rng, 2 * nbytes, scale).view("<f4")
        return round_to_bf16(values).view(np.uint8)


@lru_cache(maxsize=8)  # a model has few scales
def random_pool(tile_format: TileFormat, scale: float) -> Bytes:
    """The pool of a format and a standard deviation; the same in every process."""
    pool = tile_format.draw_pool(np.random.Generator(np.random.SFC64(POOL_SEED)), POOL_BYTES, scale)
    pool.flags.writeable = False
    return pool


def copy_pieces(rng: np.random.Generator, tile_format: TileFormat, scale: float, out: Bytes) -> None:
    """Fill `out` with pieces of the pool. Releases the GIL."""
    pool, step = random_pool(tile_format, scale), tile_format.random_step
    piece = POOL_PIECE // step * step
    starts = rng.integers((len(pool) - piece) // step + 1, size=-(-len(out) // piece)) * step
    for lo, start in zip(range(0, len(out), piece), starts.tolist(), strict=True):
        part = out[lo : lo + piece]
        part[:] = pool[start : start + len(part)]


def random_scales(rng: np.random.Generator, records: int, deviation: float) -> Float32:
    """Scales [records, 16] of the root mean square `deviation`, from 0.56 to 1.44 times that."""
    spread = rng.random((records, 16), dtype=np.float32) - np.float32(0.5)
    spread *= np.float32(UNIFORM / 2)
    spread += 1
    spread *= np.float32(deviation / np.sqrt(1 + 1 / 16))
    return spread


def round_to_bf16(values: Float32) -> NDArray[np.uint16]:
    """The bfloat16 bit patterns of float32 values, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    rounded = np.where(np.isnan(values), np.uint32(0x7FC0), rounded)
    return rounded.astype(np.uint16)


def widen_bf16(patterns: NDArray[np.uint16]) -> Float32:
    """The float32 values of bfloat16 bit patterns, exact."""
    return (patterns.astype(np.uint32) << 16).view(np.float32)
