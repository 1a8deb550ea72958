"""The interface of a tile's format, and the plain formats: unquantized numbers in row-major order.

    plain formats (f32, bf16), one tile of T channels:

        byte 0               T*H*s                2*T*H*s              3*T*H*s
        | gate rows [T, H]   | up rows [T, H]     | down columns [T, H] |     s = bytes of one number

    all row-major, down transposed so that the tile's part of y is `a @ D`, a = f(gate x, up x) as
    `shm/expert_math.py` says. Ungated experts have no gate rows.

With biases every format but those of `shm/floe.py` has them behind the matrices, which are padded with zeros
to whole lines of 64 bytes, and so are they:

    | the tile's matrices | gate's biases [T], float32 (unless ungated) | up's biases [T], float32 |

The quantized formats are in `shm/fp8.py` and `shm/blocks.py`, those that are read by channel in
`shm/floe.py`. The latter divide a tile: its head (all of up) and its body are in two places. Other formats
have no heads.

Random weights cost no more than a copy: each tile is one of a few that were encoded from random numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from shm.expert_math import SWIGLU, ExpertMath

ENCODED_ROWS = 8  # rounded at a time, so that the steps in between stay in the processor's cache
RANDOM_TILES = 8  # of a shape
POOL_BYTES = 1 << 22  # of random bfloat16 numbers
POOL_PIECE = 1 << 16  # bytes that are next to each other in the pool, too
UNIFORM = 3.0**0.5  # a uniform number from -UNIFORM to UNIFORM has the standard deviation 1

LINE = 64  # bytes

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]
NO_HEAD: Bytes = np.empty(0, np.uint8)
_drawing = Lock()


class TileFormat(ABC):
    """The bytes of one tile's numbers. Stateless."""

    name: str
    factors = False  # each matrix has one, behind the matrices of a tile

    @property
    def granularity(self) -> int:
        """The channels of a tile must be a multiple of it."""
        return 1

    @abstractmethod
    def matrices_bytes(self, hidden: int, tile: int, matrices: int = 3) -> int:
        """Bytes of the matrices of a tile of `tile` channels: of gate, up and down, or with 2 `matrices` of
        up and down. Raises ValueError for no multiple of the granularity."""

    def tile_bytes(self, hidden: int, tile: int, math: ExpertMath = SWIGLU) -> int:
        """Bytes of one tile. Raises as `matrices_bytes`, and where the format has no tiles of this kind."""
        size = self.matrices_bytes(hidden, tile, math.matrices)
        return whole_lines(size) + whole_lines(4 * math.biases * tile) if math.bias else size

    def head_bytes(self, hidden: int, tile: int) -> int:
        """Bytes of a tile's head, beside `tile_bytes`; 0 for a format without heads."""
        return 0

    def beside_matrices(self, data: Bytes, hidden: int, tile: int, math: ExpertMath) -> Bytes:
        """The bytes of a tile that are no matrix's, a view [.., n]."""
        return data[None, self.matrices_bytes(hidden, tile, math.matrices) :]

    def biases(self, data: Bytes, hidden: int, tile: int, math: ExpertMath) -> Float32:
        """The biases in a tile uint8 [tile_bytes]: a view float32 [n, T] of gate's, unless ungated, and up's.
        Of a format with heads only gate's: up's are in the head of the expert."""
        start = whole_lines(self.matrices_bytes(hidden, tile, math.matrices))
        return data[start : start + 4 * math.biases * tile].view("<f4").reshape(math.biases, tile)

    @abstractmethod
    def encode(
        self, gate: Float32 | None, up: Float32, down: Float32, out: Bytes, head: Bytes = NO_HEAD
    ) -> None:
        """Write the matrices of one tile. gate (None: ungated) and up [T, H], down [T, H] (already
        transposed), out uint8 [tile_bytes], head uint8 [head_bytes]. What is beside them stays."""

    def fill_random(
        self,
        rng: np.random.Generator,
        hidden: int,
        tile: int,
        scale: float,
        out: Bytes,
        head: Bytes = NO_HEAD,
        math: ExpertMath = SWIGLU,
    ) -> None:
        """Write a tile of random weights of mean 0 and standard deviation `scale` and without biases, at the
        speed of a copy. out uint8 [tile_bytes], head uint8 [head_bytes]. Raises ValueError for others."""
        sizes = self.tile_bytes(hidden, tile, math), self.head_bytes(hidden, tile)
        if (out.shape, head.shape) != ((sizes[0],), (sizes[1],)):
            raise ValueError(f"a tile of {sizes} bytes does not fit {out.shape} and {head.shape}")
        with _drawing:
            bodies, heads = _random_tiles(self, hidden, tile, scale, math)
        chosen = rng.integers(RANDOM_TILES)
        out[:], head[:] = bodies[chosen], heads[chosen]


class MatrixFormat(TileFormat):
    """Base of the quantized formats that keep single matrices, too: those of the backbone."""

    @abstractmethod
    def matrix_bytes(self, n: int, k: int) -> int:
        """Bytes of a matrix of n outputs and k inputs."""

    @abstractmethod
    def encode_matrix(self, w: Float32, out: Bytes) -> None:
        """Quantize w [n, k] (any strides) into out, uint8 [matrix_bytes(n, k)]. Raises WeightsUnusable."""


class F32(TileFormat):
    """IEEE binary32, little endian, drawn above with s = 4."""

    name = "f32"

    def matrices_bytes(self, hidden: int, tile: int, matrices: int = 3) -> int:
        return matrices * tile * hidden * 4

    def encode(
        self, gate: Float32 | None, up: Float32, down: Float32, out: Bytes, head: Bytes = NO_HEAD
    ) -> None:
        for part, values in zip(plain_matrices(out, gate, up, 4), there(gate, up, down), strict=True):
            part.view("<f4")[:] = values


class BF16(TileFormat):
    """bfloat16 (the upper half of binary32, rounded to nearest even), little endian, s = 2."""

    name = "bf16"

    def matrices_bytes(self, hidden: int, tile: int, matrices: int = 3) -> int:
        return matrices * tile * hidden * 2

    def encode(
        self, gate: Float32 | None, up: Float32, down: Float32, out: Bytes, head: Bytes = NO_HEAD
    ) -> None:
        for part, values in zip(plain_matrices(out, gate, up, 2), there(gate, up, down), strict=True):
            for lo in range(0, len(values), ENCODED_ROWS):
                part[lo : lo + ENCODED_ROWS].view("<u2")[:] = round_to_bf16(values[lo : lo + ENCODED_ROWS])


def whole_lines(size: int) -> int:
    """Rounded up to whole lines of bytes."""
    return -(-size // LINE) * LINE


def there(gate: Float32 | None, up: Float32, down: Float32) -> tuple[Float32, ...]:
    """The matrices that a tile has, in their order."""
    return (up, down) if gate is None else (gate, up, down)


def plain_matrices(out: Bytes, gate: Float32 | None, up: Float32, size: int) -> Bytes:
    """The matrices of a plain tile with numbers of so many bytes: [matrices, T, bytes of a row]."""
    tile, row, number = len(up), up.shape[1] * size, 2 if gate is None else 3
    return out[: number * tile * row].reshape(number, tile, row)


@lru_cache(maxsize=8)  # a model has few shapes
def _random_tiles(
    tile_format: TileFormat, hidden: int, tile: int, scale: float, math: ExpertMath
) -> tuple[Bytes, Bytes]:
    """Tiles [RANDOM_TILES, tile_bytes] and their heads; the same in every process."""
    rng = np.random.Generator(np.random.SFC64(1))
    bodies = np.zeros((RANDOM_TILES, tile_format.tile_bytes(hidden, tile, math)), np.uint8)
    heads = np.empty((RANDOM_TILES, tile_format.head_bytes(hidden, tile)), np.uint8)
    for body, head in zip(bodies, heads, strict=True):
        *gate, up, down = random_numbers(rng, (math.matrices, tile, hidden), scale)
        tile_format.encode(gate[0] if gate else None, up, down, body, head)
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
