"""The format fp8: E4M3 numbers, and a float32 scale for each block of 128 x 128.

    a matrix [n, k] of the backbone:

        byte 0                 whole lines of 64 bytes
        | rows [n, k], E4M3    | scales [n / 128, k / 128], float32 |       both numbers rounded up

    a tile of T channels (T a multiple of 128):

        byte 0               T*H                2*T*H                3*T*H
        | gate rows [T, H]   | up rows [T, H]   | down columns [T, H] | scales of gate, of up and of down |

all row-major; the scales of a tile's matrix are [T / 128, H / 128], rounded up. A number is its code's value
(`shm/codes.py`) times the scale of its block, in float32. There are zeros up to whole lines of 64 bytes.

DeepSeek's checkpoints and others have such blocks in gate, up and down; a tile's channels are whole blocks of
them, so that it keeps their bytes. Codes that mean NaN are refused.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shm.codes import E4M3_LARGEST, LARGEST, Codes
from shm.errors import WeightsUnusable
from shm.formats import NO_HEAD, Bytes, Float32, MatrixFormat, there, whole_lines

BLOCK = 128  # rows and numbers of a row that share a scale
NOT_A_NUMBER = 0x7F  # as a code without its sign
SUBNORMAL = np.float32(2.0**-6)  # below it E4M3 has steps of 2^-9
UNUSABLE = "some weights are infinite, not a number, or beyond 1e36: they cannot be kept in fp8"


class FP8(MatrixFormat):
    """E4M3 with a scale for each block of 128 x 128, drawn above."""

    name = "fp8"

    @property
    def granularity(self) -> int:
        return BLOCK

    def matrix_bytes(self, n: int, k: int) -> int:
        return self._bytes(1, n, k)

    def matrices_bytes(self, hidden: int, tile: int, matrices: int = 3) -> int:
        if tile % BLOCK:
            raise ValueError(f"a tile of fp8 needs a multiple of {BLOCK} channels, not {tile}")
        return self._bytes(matrices, tile, hidden)

    def _bytes(self, matrices: int, n: int, k: int) -> int:
        return whole_lines(matrices * n * k) + whole_lines(4 * matrices * blocks_in(n) * blocks_in(k))

    def parts(self, data: Bytes, n: int, k: int, matrices: int = 1) -> tuple[Bytes, Float32]:
        """Views of a matrix uint8 [matrix_bytes], or of a tile with so many matrices: codes uint8 [matrices,
        n, k], and scales float32 [matrices, ceil(n / 128), ceil(k / 128)]."""
        number, blocks = matrices * n * k, (matrices, blocks_in(n), blocks_in(k))
        start = whole_lines(number)
        scales = data[start : start + 4 * blocks[0] * blocks[1] * blocks[2]].view("<f4")
        return data[:number].reshape(matrices, n, k), scales.reshape(blocks)

    def clear_padding(self, data: Bytes, n: int, k: int, matrices: int = 1) -> None:
        """Zero what is between codes and scales and behind these in data as of `parts`."""
        number, blocks = matrices * n * k, matrices * blocks_in(n) * blocks_in(k)
        start = whole_lines(number)
        data[number:start] = 0
        data[start + 4 * blocks : self._bytes(matrices, n, k)] = 0

    def encode_matrix(self, w: Float32 | Codes, out: Bytes) -> None:
        self.clear_padding(out, *w.shape)
        codes, scales = self.parts(out, *w.shape)
        encode_rows(w, codes[0], scales[0])

    def encode(
        self, gate: Float32 | None, up: Float32, down: Float32, out: Bytes, head: Bytes = NO_HEAD
    ) -> None:
        matrices = there(gate, up, down)
        self.clear_padding(out, *up.shape, len(matrices))
        for w, codes, scales in zip(matrices, *self.parts(out, *up.shape, len(matrices)), strict=True):
            encode_rows(w, codes, scales)


def blocks_in(number: int) -> int:
    return -(-number // BLOCK)


def encode_rows(w: Float32 | Codes, codes: Bytes, scales: Float32) -> None:
    """Write rows of a matrix, from the beginning of a block on. w [n, k]: codes of fp8 are kept where the
    rows of a block share their scales, what is else there is rounded. codes uint8 [n or more, k], scales
    float32 [blocks of these, ceil(k / 128)]: rows beyond w become 0. Raises WeightsUnusable."""
    codes[w.shape[0] :] = 0
    for block, scale in enumerate(scales):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        rows = w[part]
        to = codes[part][: rows.shape[0]]
        if isinstance(rows, Codes) and is_kept(rows):
            rows.check()
            if ((rows.codes & 0x7F) == NOT_A_NUMBER).any():
                raise WeightsUnusable(UNUSABLE)
            to[:], scale[:] = rows.codes, rows.scales[:1]
        else:
            _round(rows.values() if isinstance(rows, Codes) else rows, to, scale)


def is_kept(rows: Codes) -> bool:
    """Returns whether these are rows of fp8 that share their scales."""
    return rows.format == "fp8" and rows.shape[0] > 0 and bool((rows.scales == rows.scales[0]).all())


def in_blocks(codes: Codes) -> bool:
    """Returns whether the rows of each block share their scales, from the first row on."""
    of_rows = codes.scales[::BLOCK].repeat(BLOCK, axis=0)[: codes.shape[0]]
    return bool((of_rows == codes.scales).all())


def transposed(down: Codes, turned: Bytes) -> Codes | None:
    """Codes [n, k] of fp8, from the beginning of a block on, as [k, n]; None where rows of a block do not
    share their scales. `turned`: the codes [k, n]."""
    if not in_blocks(down):
        return None
    return Codes("fp8", turned, down.scales[::BLOCK].T.repeat(BLOCK, axis=0)[: down.shape[1]])


def _round(rows: Float32, to: Bytes, scale: Float32) -> None:
    """At most 128 rows: each block in steps of its largest magnitude / 448, as transformers' quantizer."""
    inputs = rows.shape[1]
    size = np.abs(rows)
    starts = np.arange(0, inputs, BLOCK)
    most = np.maximum.reduceat(size.max(axis=0, initial=0), starts)
    if not most.max(initial=0) < LARGEST:
        raise WeightsUnusable(UNUSABLE)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(most > 0, np.float32(E4M3_LARGEST) / most, np.float32(1))
        # With the least numbers there are, 448 / most is infinite.
        inverse = np.minimum(inverse, np.finfo(np.float32).max)
        scale[:] = 1 / inverse
    size *= inverse.repeat(BLOCK)[:inputs]
    to[:] = nearest_e4m3(size)
    to |= np.signbit(rows).view(np.uint8) << np.uint8(7)


def nearest_e4m3(size: Float32) -> NDArray[np.uint8]:
    """The codes of magnitudes, to nearest even, at most that of 448."""
    bits = size.view(np.uint32)
    codes = (bits + np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)
    codes -= np.uint32((127 - 7) << 3)
    small = size < SUBNORMAL
    codes[small] = np.rint(size[small] * np.float32(2.0**9)).astype(np.uint32)
    return np.minimum(codes, np.uint32(0x7E)).astype(np.uint8)
