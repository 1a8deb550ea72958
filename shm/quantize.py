"""Quantizes matrices into the records that `shm/blocks.py` draws: by the C library, else by numpy.

`quantize.c` is compiled at installation if there is a compiler; `half_quadratic.py` specifies the
computation, and both give the same bytes. Both release the GIL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import numpy as np

from shm.errors import WeightsUnusable
from shm.formats import Bytes, Float32
from shm.half_quadratic import LARGEST, STEPS, int4_groups, int8_groups

LANES = 16  # outputs of a block
HEAD_BYTES = 64  # of a record: scales, and zeros where there are some
MAX_GROUP = 256
VERSION = 1  # of the library's functions: one that an older checkout left behind is not used
UNUSABLE = "some weights are infinite, not a number, or beyond 1e36: they cannot be quantized"
NUMPY_NUMBERS = 1 << 18  # quantized at a time by numpy, which needs some twenty times their memory


class Library:
    """The compiled functions."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        size, pointer = ctypes.c_int64, ctypes.c_void_p
        self.int4: Any = functions.tandem_encode_int4
        self.int4.argtypes, self.int4.restype = (pointer, *[size] * 6, pointer), ctypes.c_int
        self.int8: Any = functions.tandem_encode_int8
        self.int8.argtypes, self.int8.restype = (pointer, *[size] * 5, pointer), ctypes.c_int


@cache
def library() -> Library | None:
    """None where it was not compiled, or not for this version."""
    found = PathFinder.find_spec("_quantize", [str(Path(__file__).parent)])
    if found is None:
        return None
    try:
        functions = ctypes.CDLL(found.origin)
        return Library(functions) if functions.tandem_quantize_version() == VERSION else None
    except (OSError, AttributeError):
        return None


def encode_int4(w: Float32, group: int, out: Bytes, steps: int = STEPS, compiled: bool = True) -> None:
    """Fill the int4 records `out` (uint8, contiguous) of w float32 [n, k], any strides. `steps`: of the
    optimisation, at most; 0 rounds to nearest. `compiled`: by the library, where there is one. Raises
    WeightsUnusable where a weight is not finite, or beyond 2^120; then `out` holds nothing useful."""
    _encode(w, group, out, 4, compiled, steps)


def encode_int8(w: Float32, group: int, out: Bytes, compiled: bool = True) -> None:
    """Fill the int8 records, as `encode_int4` does the others."""
    _encode(w, group, out, 8, compiled)


def _encode(w: Float32, group: int, out: Bytes, bits: int, compiled: bool, *steps: int) -> None:
    record_bytes = HEAD_BYTES + LANES * group * bits // 8
    w = _checked(w, group, out, record_bytes)
    functions = library() if compiled else None
    if functions is None:
        records = out.reshape(-1, -(-w.shape[1] // group), record_bytes)
        for block, first, x in _lanes(w, group):
            part = records[block : block + x.shape[1], first : first + x.shape[2]]
            (_numpy_int4 if bits == 4 else _numpy_int8)(x, group, part, *steps)
        return
    function = functions.int4 if bits == 4 else functions.int8
    strides = (stride // w.itemsize for stride in w.strides)
    if function(w.ctypes.data, *w.shape, *strides, group, *steps, out.ctypes.data):
        raise WeightsUnusable(UNUSABLE)


def _checked(w: Float32, group: int, out: Bytes, record_bytes: int) -> Float32:
    """The weights as the library can read them. Raises ValueError for what does not fit."""
    if w.ndim != 2 or min(w.shape) < 1 or w.dtype != np.float32:
        raise ValueError(f"a matrix of float32 is quantized, not {w.dtype} {w.shape}")
    if group % 8 or not 0 < group <= MAX_GROUP:
        raise ValueError(f"a group of {group} inputs: it must be a multiple of 8, {MAX_GROUP} at most")
    needed = -(-w.shape[0] // LANES) * -(-w.shape[1] // group) * record_bytes
    usable = out.dtype == np.uint8 and out.flags.c_contiguous and out.flags.writeable
    if not usable or out.shape != (needed,):
        raise ValueError(f"the records need {needed} contiguous bytes, not {out.dtype} {out.shape}")
    plain = w.flags.aligned and not any(stride % w.itemsize for stride in w.strides)
    return w if plain else w.copy()


def _numpy_int4(x: Float32, group: int, part: Bytes, steps: int) -> None:
    scales, zeros, q = int4_groups(x.reshape(len(x), -1), steps)
    codes = np.zeros((group, *x.shape[1:]), np.uint8)
    codes[: len(x)] = q.reshape(x.shape)
    part[..., :32].view("<u2")[:] = scales.reshape(x.shape[1:])
    part[..., 32:64].view("<u2")[:] = zeros.reshape(x.shape[1:])
    halves = codes.reshape(-1, 2, 4, *x.shape[1:])  # j, half, b, blocks, groups, lane
    packed = halves[:, 0] | halves[:, 1] << 4
    part[..., 64:] = packed.transpose(2, 3, 0, 4, 1).reshape(*part.shape[:2], -1)


def _numpy_int8(x: Float32, group: int, part: Bytes) -> None:
    scales, u = int8_groups(x.reshape(len(x), -1))
    codes = np.full((group, *x.shape[1:]), 128, np.uint8)
    codes[: len(x)] = u.reshape(x.shape)
    part[..., :64].view("<f4")[:] = scales.reshape(x.shape[1:])
    quads = codes.reshape(-1, 4, *x.shape[1:])  # j, b, blocks, groups, lane
    part[..., 64:] = quads.transpose(2, 3, 0, 4, 1).reshape(*part.shape[:2], -1)


def _lanes(w: Float32, group: int) -> Iterator[tuple[int, int, Float32]]:
    """Parts of a matrix: first block, first group, weights [inputs of a group, blocks, groups, 16]. Outputs
    that pad are 0; a last group that is not whole is a part with fewer inputs."""
    n, k = w.shape
    rows = max(LANES, NUMPY_NUMBERS // k // LANES * LANES)
    whole = k // group
    for lo in range(0, n, rows):
        part = w[lo : lo + rows]
        if not (np.abs(part) < LARGEST).all():
            raise WeightsUnusable(UNUSABLE)
        part = np.pad(part, ((0, -len(part) % LANES), (0, 0)))
        for first, columns in ((0, part[:, : whole * group]), (whole, part[:, whole * group :])):
            if columns.shape[1]:
                inputs = min(group, columns.shape[1])
                lanes = columns.reshape(-1, LANES, columns.shape[1] // inputs, inputs).transpose(3, 0, 2, 1)
                yield lo // LANES, first, np.ascontiguousarray(lanes)
