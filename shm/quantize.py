"""Quantizes matrices into the records that `shm/blocks.py` and `shm/floe.py` draw, by `quantize.c`, which
specifies the computation. It releases the GIL."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from shm.compiled import load
from shm.errors import WeightsUnusable
from shm.formats import Bytes, Float32

LANES = 16  # outputs of a block
HEAD_BYTES = 64  # of a record: scales, and zeros where there are some
MAX_GROUP = 256
ROW_GROUP = 64  # numbers of a row that share a scale
STEPS = 20  # of the optimisation, at most
VERSION = 4  # of the library's functions
UNUSABLE = "some weights are infinite, not a number, or beyond {}: they cannot be quantized"


class Library:
    """The compiled functions."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        size, pointer = ctypes.c_int64, ctypes.c_void_p
        self.blocks: Any = functions.tandem_encode_blocks
        self.blocks.argtypes, self.blocks.restype = (pointer, *[size] * 8, pointer), ctypes.c_int
        self.rows: Any = functions.tandem_encode_rows
        self.rows.argtypes, self.rows.restype = (pointer, *[size] * 8, pointer), ctypes.c_int


@cache
def library() -> Library:
    """The library. Raises NotCompiled."""
    return Library(load(__file__, "_quantize", VERSION))


def encode_blocks(
    w: Float32, bits: int, group: int, out: Bytes, steps: int = STEPS, half: bool = False
) -> None:
    """Fill the records `out` (uint8, contiguous) of w float32 [n, k], any strides, in 2, 4 or 8 bits.
    `steps`: of the optimisation of 2 and 4 bits, at most; 0 rounds to nearest. `half`: scales, of 4 bits, are
    in binary16, not bfloat16. Raises WeightsUnusable where a weight is not finite, or beyond 2^120, `half`
    2^16; then `out` holds nothing useful. Raises NotCompiled."""
    record_bytes = HEAD_BYTES + LANES * group * bits // 8
    w = _checked(w)
    if group % (32 // bits) or not 0 < group <= MAX_GROUP:
        raise ValueError(
            f"a group of {group} inputs: a multiple of {32 // bits} is needed, {MAX_GROUP} at most"
        )
    needed = -(-w.shape[0] // LANES) * -(-w.shape[1] // group) * record_bytes
    usable = out.dtype == np.uint8 and out.flags.c_contiguous and out.flags.writeable
    if not usable or out.shape != (needed,):
        raise ValueError(f"the records need {needed} contiguous bytes, not {out.dtype} {out.shape}")
    sizes = bits, group, half, steps
    if library().blocks(w.ctypes.data, *w.shape, *_strides(w), *sizes, out.ctypes.data):
        raise WeightsUnusable(UNUSABLE.format("65536" if half else "1e36"))


def encode_rows(w: Float32, bits: int, out: Bytes, steps: int = STEPS) -> None:
    """Fill, as `encode_blocks` does, the row records `out` (uint8 [n, bytes], a record's bytes contiguous) of
    4 or 8 bits."""
    w = _checked(w)
    lines = row_head_bytes(w.shape[1], bits)
    needed = lines + row_line_bytes(w.shape[1], bits)
    usable = out.dtype == np.uint8 and out.shape == (len(w), needed) and out.flags.writeable
    if not usable or (needed > 1 and out.strides[1] != 1):
        raise ValueError(f"the records need {needed} bytes each, not {out.dtype} {out.shape}")
    out[:, :lines] = 0
    sizes = bits, steps, out.strides[0], lines
    if library().rows(w.ctypes.data, *w.shape, *_strides(w), *sizes, out.ctypes.data):
        raise WeightsUnusable(UNUSABLE.format("1e36"))


def row_head_bytes(k: int, bits: int) -> int:
    """Bytes of the scales, and zeros, of a row of k numbers; each in whole lines of 64 bytes."""
    groups = row_line_bytes(k, bits) * 8 // bits // ROW_GROUP
    return 2 * (-(-2 * groups // 64) * 64) if bits == 4 else -(-4 * groups // 64) * 64


def row_line_bytes(k: int, bits: int) -> int:
    """Bytes of the codes of a row of k numbers, in whole lines of 64."""
    return -(-k * bits // 512) * 64


def _checked(w: Float32) -> Float32:
    """The weights as the library can read them. Raises ValueError for what is no matrix of float32."""
    if w.ndim != 2 or min(w.shape) < 1 or w.dtype != np.float32:
        raise ValueError(f"a matrix of float32 is quantized, not {w.dtype} {w.shape}")
    plain = w.flags.aligned and not any(stride % w.itemsize for stride in w.strides)
    return w if plain else w.copy()


def _strides(w: Float32) -> Iterator[int]:
    """Returns a matrix's strides in numbers."""
    return (stride // w.itemsize for stride in w.strides)
