"""Adds the expert workers' partial sums on a GPU, which reads them in the host's memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workers.kernels.cuda.buffers import Uploaded
from workers.kernels.cuda.launcher import Launcher

THREADS = 256
KEPT = 256  # tables: in decode the same slots of the exchange take turns


class PartSums:
    """Launches `sums.cu`."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._tables: dict[tuple[object, ...], Uploaded] = {}

    def add(self, parts: Sequence[int], rows: Sequence[NDArray[np.intp]], y: Tensor) -> None:
        """y, float32 [R, H] on the device, becomes 0 plus each part in turn. parts: their addresses, as the
        device reads them; rows: of each the rows of y that it has, ascending. The parts must not change until
        the device has passed this."""
        number, (count, hidden) = len(parts), y.shape
        key = (count, *parts, *(b"" if len(kept) == count else kept.tobytes() for kept in rows))
        table = self._tables.get(key)
        if table is None:
            of = np.full((number, count), -1, np.int32)
            for part, kept in zip(of, rows, strict=True):
                part[kept] = np.arange(len(kept), dtype=np.int32)
            if len(self._tables) == KEPT:
                self._tables.pop(next(iter(self._tables)))
            table = Uploaded(self._launcher, np.array(parts, np.int64), of.ravel())
            self._tables[key] = table
        wide = -(-hidden // THREADS)
        addresses = (*table.addresses, number, count, hidden, wide, y.data_ptr())
        self._launcher.launch("add_parts", count * wide, THREADS, *addresses)
