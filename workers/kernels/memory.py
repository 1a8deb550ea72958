"""Memory that a kernel keeps from call to call: at a few rows, making arrays and asking for their addresses
cost more than a call of C."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
