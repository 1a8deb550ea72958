"""The interface of a tile's format, and the plain formats: unquantized numbers in row-major order.

    plain formats (f32, bf16), one tile of T channels:

        byte 0               T*H*s                2*T*H*s              3*T*H*s
        | gate rows [T, H]   | up rows [T, H]     | down columns [T, H] |     s = bytes of one number

    all row-major, down transposed so that the tile's part of y is `a @ D`, a = silu(gate x) * (up x).

The quantized formats are in `shm/blocks.py`, those that are read by channel in `shm/floe.py`. The latter
divide a tile: its head (all of up) and its body are in two places. Other formats have no heads.

Random weights cost no more than a copy: each tile is one of a few that were encoded from random numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from threading import Lock

import numpy as np
from numpy.typing import NDArray

ENCODED_ROWS = 8  # rounded at a time, so that the steps in between stay in the processor's cache
RANDOM_TILES = 8  # of a shape
POOL_BYTES = 1 << 22  # of random bfloat16 numbers
POOL_PIECE = 1 << 16  # bytes that are next to each other in the pool, too
UNIFORM = 3.0**0.5  # a uniform number from -UNIFORM to UNIFORM has the standard deviation 1

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]
NO_HEAD: Bytes = np.empty(0, np.uint8)
_drawing = Lock()


class TileFormat(ABC):
    """The bytes of one tile's numbers. Stateless."""

    name: str

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

    def fill_random(
        self,
        rng: np.random.Generator,
        hidden: int,
        tile: int,
        scale: float,
        out: Bytes,
        head: Bytes = NO_HEAD,
    ) -> None:
        """Write a tile of random weights of mean 0 and standard deviation `scale`, at the speed of a copy.
        out uint8 [tile_bytes], head uint8 [head_bytes]. Raises ValueError for other sizes."""
        sizes = self.tile_bytes(hidden, tile), self.head_bytes(hidden, tile)
        if (out.shape, head.shape) != ((sizes[0],), (sizes[1],)):
            raise ValueError(f"a tile of {sizes} bytes does not fit {out.shape} and {head.shape}")
        with _drawing:
            bodies, heads = _random_tiles(self, hidden, tile, scale)
        chosen = rng.integers(RANDOM_TILES)
        out[:], head[:] = bodies[chosen], heads[chosen]


class F32(TileFormat):
    """IEEE binary32, little endian, drawn above with s = 4."""

    name = "f32"

    def tile_bytes(self, hidden: int, tile: int) -> int:
        return 3 * tile * hidden * 4

    def encode(self, gate: Float32, up: Float32, down: Float32, out: Bytes, head: Bytes = NO_HEAD) -> None:
        np.stack((gate, up, down), out=out.view("<f4").reshape(3, *gate.shape))


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


@lru_cache(maxsize=8)  # a model has few shapes
def _random_tiles(tile_format: TileFormat, hidden: int, tile: int, scale: float) -> tuple[Bytes, Bytes]:
    """Tiles [RANDOM_TILES, tile_bytes] and their heads; the same in every process."""
    rng = np.random.Generator(np.random.SFC64(1))
    bodies = np.empty((RANDOM_TILES, tile_format.tile_bytes(hidden, tile)), np.uint8)
    heads = np.empty((RANDOM_TILES, tile_format.head_bytes(hidden, tile)), np.uint8)
    for body, head in zip(bodies, heads, strict=True):
        gate, up, down = random_numbers(rng, (3, tile, hidden), scale)
        tile_format.encode(gate, up, down, body, head)
    return bodies, heads


def random_numbers(rng: np.random.Generator, shape: tuple[int, ...], scale: float) -> Float32:
    """Uniform numbers of mean 0 and standard deviation `scale`."""
    values = rng.random(shape, dtype=np.float32) - np.float32(0.5)
    values *= np.float32(2 * UNIFORM * scale)
    return values


@lru_cache(maxsize=8)  # a model has few scales
def _pool(scale: float) -> Bytes:
    rng = np.random.Generator(np.random.SFC64(1))
    return round_to_bf16(random_numbers(rng, (POOL_BYTES // 2,), scale)).view(np.uint8)


def fill_bf16(rng: np.random.Generator, scale: float, out: Bytes) -> None:
    """Fill `out` with random bfloat16 numbers, in pieces of a pool: at the speed of a copy."""
    pool = _pool(scale)
    starts = rng.integers((POOL_BYTES - POOL_PIECE) // 2 + 1, size=-(-len(out) // POOL_PIECE)) * 2
    for lo, start in zip(range(0, len(out), POOL_PIECE), starts.tolist(), strict=True):
        part = out[lo : lo + POOL_PIECE]
        part[:] = pool[start : start + len(part)]


def round_to_bf16(values: Float32) -> NDArray[np.uint16]:
    """The bfloat16 bit patterns of float32 values, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    rounded = np.where(np.isnan(values), np.uint32(0x7FC0), rounded)
    return rounded.astype(np.uint16)


def widen_bf16(patterns: NDArray[np.uint16]) -> Float32:
    """The float32 values of bfloat16 bit patterns, exact."""
    return (patterns.astype(np.uint32) << 16).view(np.float32)
