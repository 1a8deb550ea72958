"""Adds the expert workers' partial sums on a GPU, which reads them in the host's memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from workers.kernels.cuda.buffers import Uploaded
from workers.kernels.cuda.launcher import Launcher

THREADS = 256
KEPT = 256  # tables: in decode the same slots of the exchange take turns


class PartSums:
    """Launches `sums.cu`."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._tables: dict[tuple[int, ...], Uploaded] = {}

    def add(self, parts: Sequence[int], y: Tensor) -> None:
        """y, float32 on the device and contiguous, becomes 0 plus each part of its size in turn. parts: their
        addresses, as the device reads them. The parts must not change until the device has passed this."""
        table = self._tables.get(key := tuple(parts))
        if table is None:
            if len(self._tables) == KEPT:
                self._tables.pop(next(iter(self._tables)))
            table = self._tables[key] = Uploaded(self._launcher, np.array(parts, np.int64))
        addresses = (*table.addresses, len(parts), y.numel(), y.data_ptr())
        self._launcher.launch("add_parts", -(-y.numel() // THREADS), THREADS, *addresses)
