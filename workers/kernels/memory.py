"""Memory that is kept from call to call: at a few rows, making an array and asking for its address cost more
than a call of C."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

LINE = 64  # bytes of a cache line


class Kept:
    """Numbers of one type from `address` on, at the beginning of a cache line."""

    def __init__(self, kind: type[np.generic]) -> None:
        self.address = 0
        self._numbers: NDArray[Any] = np.empty(0, kind)

    def __call__(self, size: int) -> NDArray[Any]:
        """The first `size` of them, with any content; valid until the next call."""
        if size > len(self._numbers):
            kind = self._numbers.dtype
            raw = np.empty(size * kind.itemsize + LINE, np.uint8)
            start = -raw.ctypes.data % LINE
            self._numbers = raw[start : start + size * kind.itemsize].view(kind)
            self.address = raw.ctypes.data + start
        return self._numbers[:size]

    def copies(self, *arrays: NDArray[Any]) -> list[int]:
        """The addresses of copies of arrays of 4-byte numbers, which may be unaligned."""
        flat = [array.ravel().view(self._numbers.dtype) for array in arrays]
        sizes = [len(array) for array in flat]
        np.concatenate(flat, out=self(sum(sizes)), casting="no")
        return [self.address + 4 * before for before in accumulate(sizes[:-1], initial=0)]
