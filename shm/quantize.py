"""Quantizes matrices into the records that `shm/blocks.py` and `shm/floe.py` draw: by the C library, else by
numpy.

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
from shm.half_quadratic import LARGEST, STEPS, coded_groups, int8_groups

LANES = 16  # outputs of a block
HEAD_BYTES = 64  # of a record: scales, and zeros where there are some
MAX_GROUP = 256
ROW_GROUP = 64  # numbers of a row that share a scale
VERSION = 3  # of the library's functions: one that an older checkout left behind is not used
UNUSABLE = "some weights are infinite, not a number, or beyond 1e36: they cannot be quantized"
NUMPY_NUMBERS = 1 << 18  # quantized at a time by numpy, which needs some twenty times their memory


class Library:
    """The compiled functions."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        size, pointer = ctypes.c_int64, ctypes.c_void_p
        self.blocks: Any = functions.tandem_encode_blocks
        self.blocks.argtypes, self.blocks.restype = (pointer, *[size] * 7, pointer), ctypes.c_int
        self.rows: Any = functions.tandem_encode_rows
        self.rows.argtypes, self.rows.restype = (pointer, *[size] * 8, pointer), ctypes.c_int


@cache
def library() -> Library | None:
    """None where it was not compiled, or not for this version."""
    spec = PathFinder.find_spec("_quantize", [str(Path(__file__).parent)])
    if spec is None:
        return None
    try:
        functions = ctypes.CDLL(spec.origin)
        return Library(functions) if functions.tandem_quantize_version() == VERSION else None
    except (OSError, AttributeError):
        return None


def encode_blocks(
    w: Float32, bits: int, group: int, out: Bytes, steps: int = STEPS, compiled: bool = True
) -> None:
    """Fill the records `out` (uint8, contiguous) of w float32 [n, k], any strides, in 2, 4 or 8 bits.
    `steps`: of the optimisation of 2 and 4 bits, at most; 0 rounds to nearest. `compiled`: by the library,
    where there is one. Raises WeightsUnusable where a weight is not finite, or beyond 2^120; then `out` holds
    nothing useful."""
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
    functions = library() if compiled else None
    if functions is None:
        records = out.reshape(-1, -(-w.shape[1] // group), record_bytes)
        for block, first, x in _lanes(w, group):
            part = records[block : block + x.shape[1], first : first + x.shape[2]]
            head, codes = _quantized(x, group, bits, steps)
            part[..., :HEAD_BYTES] = head
            fields = codes.reshape(-1, 8 // bits, 4, *codes.shape[1:])  # j, field, b, blocks, groups, lane
            packed = fields[:, 0].copy()
            for field in range(1, 8 // bits):
                packed |= fields[:, field] << bits * field
            part[..., HEAD_BYTES:] = packed.transpose(2, 3, 0, 4, 1).reshape(*part.shape[:2], -1)
    elif functions.blocks(w.ctypes.data, *w.shape, *_strides(w), bits, group, steps, out.ctypes.data):
        raise WeightsUnusable(UNUSABLE)


def encode_rows(w: Float32, bits: int, out: Bytes, steps: int = STEPS, compiled: bool = True) -> None:
    """Fill, as `encode_blocks` does, the row records `out` (uint8 [n, bytes], a record's bytes contiguous) of
    4 or 8 bits."""
    w = _checked(w)
    lines = row_head_bytes(w.shape[1], bits)
    needed = lines + row_line_bytes(w.shape[1], bits)
    usable = out.dtype == np.uint8 and out.shape == (len(w), needed) and out.flags.writeable
    if not usable or (needed > 1 and out.strides[1] != 1):
        raise ValueError(f"the records need {needed} bytes each, not {out.dtype} {out.shape}")
    out[:, :lines] = 0
    functions = library() if compiled else None
    if functions is None:
        for block, first, x in _lanes(w, ROW_GROUP):
            head, codes = _quantized(x, ROW_GROUP, bits, steps)
            part = out[block * LANES : (block + x.shape[1]) * LANES]
            _write_rows(part, head, codes, first, bits, lines)
    elif functions.rows(
        w.ctypes.data, *w.shape, *_strides(w), bits, steps, out.strides[0], lines, out.ctypes.data
    ):
        raise WeightsUnusable(UNUSABLE)


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


def _quantized(x: Float32, group: int, bits: int, steps: int) -> tuple[Bytes, Bytes]:
    """Quantize weights as `_lanes` gives them. Returns heads [blocks, groups, HEAD_BYTES], and codes [inputs
    of a whole group, blocks, groups, 16]."""
    lanes = x.reshape(len(x), -1)
    if bits == 8:
        scales, q = int8_groups(lanes)
        head = scales.astype("<f4").reshape(x.shape[1:])
    else:
        *pair, q = coded_groups(lanes, (1 << bits) - 1, steps)
        head = np.concatenate([part.astype("<u2").reshape(x.shape[1:]) for part in pair], axis=-1)
    codes = np.full((group, *x.shape[1:]), 128 if bits == 8 else 0, np.uint8)
    codes[: len(x)] = q.reshape(x.shape)
    return head.view(np.uint8), codes


def _write_rows(part: Bytes, head: Bytes, codes: Bytes, first: int, bits: int, lines: int) -> None:
    """Write groups from `first` on into the records of rows, uint8 [rows, bytes]; heads and codes as
    `_quantized` gives them, of as many rows or of some that pad them."""
    blocks, groups = head.shape[:2]
    columns = [slice(4 * first, 4 * (first + groups))]
    if bits == 4:
        columns = [slice(at + 2 * first, at + 2 * (first + groups)) for at in (0, lines // 2)]
    for place, numbers in zip(columns, np.split(head, len(columns), axis=-1), strict=True):
        each = numbers.reshape(blocks, groups, LANES, -1).transpose(0, 2, 1, 3)  # rows before groups
        part[:, place] = each.reshape(blocks * LANES, -1)[: len(part)]
    ordered = codes.reshape(4, 16, blocks, groups, LANES).transpose(2, 4, 3, 1, 0)  # block, lane, group, i, b
    row_codes = ordered.reshape(blocks * LANES, groups, 64)[: len(part)]
    for g in range(groups):
        line = (first + g) // (8 // bits)
        target = part[:, lines + 64 * line : lines + 64 * (line + 1)]
        if bits == 4 and (first + g) % 2:
            target |= row_codes[:, g] << 4
        else:
            target[:] = row_codes[:, g]


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
