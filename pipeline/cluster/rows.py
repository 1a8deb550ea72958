"""x as it travels between machines: in a quarter of its bytes where the format's kernels make int8 codes of
it anyway, so that the receiver's kernels make the same codes again; else as it is."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from pipeline.arrays import FloatArray
from shm.compiled import load
from shm.descriptor import address_of
from shm.layout import StoreLayout
from workers.kernels.c_types import BF16_BITS, Geometry

VERSION = 1  # of rows.c
Bytes = np.ndarray[tuple[int, int], np.dtype[np.int8]]


@dataclass(frozen=True)
class WireX:
    """A batch as it travels: rows of bytes, compact as rows.c draws them, or float32."""

    compact: bool
    rows: Bytes  # [R, bytes]


@cache
def library() -> Any:
    """Returns the functions of rows.c. Raises NotCompiled."""
    functions = load(__file__, "_rows", VERSION)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    functions.tandem_compact.argtypes = functions.tandem_expand.argtypes = pointer, *[number] * 4, pointer
    functions.tandem_expand.restype = None
    return functions


class RowCoder:
    """Makes of x what travels, and the reverse. Used by one thread."""

    def __init__(self, layout: StoreLayout) -> None:
        """Raises NotCompiled."""
        geometry, functions = Geometry.of_tiles(layout), library()
        self._compact, self._expand = functions.tandem_compact, functions.tandem_expand
        self._hidden = hidden = geometry.inputs
        self._sizes = hidden, geometry.padded, geometry.group
        self._has_codes = geometry.bits < BF16_BITS
        self._width = geometry.padded + 4 * (geometry.padded // geometry.group)

    def encode(self, x: FloatArray) -> WireX:
        """x: float32 [R, H], contiguous."""
        if self._has_codes:
            rows = np.empty((len(x), self._width), np.int8)
            if not self._compact(address_of(x), len(x), *self._sizes, address_of(rows)):
                return WireX(True, rows)
        return WireX(False, x.view(np.int8))

    def decode(self, wire: WireX) -> FloatArray:
        """Returns float32 [R, H]. Raises ValueError for rows of another length."""
        rows = wire.rows
        if rows.shape[1] != (self._width if wire.compact else 4 * self._hidden) or (
            wire.compact and not self._has_codes
        ):
            raise ValueError(f"x of {rows.shape} bytes for rows of {self._hidden} numbers")
        x: FloatArray = np.empty((len(rows), self._hidden), np.float32)
        if wire.compact:
            self._expand(address_of(rows), len(x), *self._sizes, address_of(x))
        else:
            x.view(np.int8)[:] = rows
        return x
