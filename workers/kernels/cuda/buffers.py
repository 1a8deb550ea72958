"""Arrays that a launch reads, copied together, and scratch memory that its kernels share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.kernels.cuda.launcher import Launcher

ALIGNMENT = 256  # bytes


def _places(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where parts of so many bytes begin, and the bytes of all. In Python: a layer has a few of them."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, end


class Uploaded:
    """Arrays on the device, by one copy. `addresses`: of each, while this lives."""

    def __init__(self, launcher: Launcher, *arrays: NDArray[Any]) -> None:
        starts, size = _places([array.nbytes for array in arrays])
        data = np.empty(size, np.uint8)
        for array, start in zip(arrays, starts, strict=True):
            data[start : start + array.nbytes] = array.view(np.uint8)
        self._memory = launcher.upload(data)
        self.addresses = [self._memory.data_ptr() + start for start in starts]


class Scratch:
    """Parts of one allocation, uninitialised. `addresses`: of each, while this lives."""

    def __init__(self, launcher: Launcher, *sizes: int) -> None:
        starts, size = _places(sizes)
        self._memory: Tensor = torch.empty(size, dtype=torch.uint8, device=launcher.device)
        self.addresses = [self._memory.data_ptr() + start for start in starts]
