"""Memory that a kernel keeps from call to call: at a few rows, making arrays and asking for their addresses
cost more than a call of C."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from shm.formats import Float32
from workers.kernels.c_types import Activations

LINE = 64  # bytes of a cache line


class Kept:
    """Memory that grows to what is asked for."""

    def __init__(self) -> None:
        self.bytes: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._address = 0

    def reserve(self, size: int) -> int:
        """The address of the first `size` of `bytes`, at the beginning of a cache line; valid until the next
        call."""
        if size > len(self.bytes):
            raw = np.empty(size + LINE, np.uint8)
            start = -raw.ctypes.data % LINE
            self.bytes = raw[start : start + size]
            self._address = raw.ctypes.data + start
        return self._address


class Rows:
    """Memory for the rows of a Work: x, x as C reads it, and the result."""

    def __init__(self, x: Float32, y: Float32, codes: NDArray[np.generic], factors: Float32) -> None:
        self.x, self.y = x, y
        self.x_address, self.y_address = x.ctypes.data, y.ctypes.data
        self.codes_address, self.factors_address = codes.ctypes.data, factors.ctypes.data
        self._activations = Activations(self.codes_address, self.factors_address)
        self.activations = ctypes.addressof(self._activations)
        self._arrays = codes, factors
