"""Memory for uploads to come, of the host and of the device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 256  # bytes


class Reserved:
    """Taken before a stream waits for a landing, and filled while it does. CUDA may wait for all streams
    where memory is allocated or freed, and then for a copy that cannot begin until it returns."""

    def __init__(
        self, host: NDArray[np.uint8], device: Tensor, copy: Callable[[Tensor, NDArray[np.uint8]], object]
    ) -> None:
        """`host` and `device`: of one size, uint8. `copy`: enqueues a copy of a part to the device."""
        self.copy = copy
        self._host, self._device = host, device
        self._taken = 0

    def fits(self, size: int) -> bool:
        """Whether so many bytes more do."""
        return self._taken + size <= len(self._host)

    def upload(self, data: NDArray[np.uint8]) -> Tensor:
        """A copy of the array on the device."""
        part = slice(self._taken, self._taken + len(data))
        self._taken += -(-len(data) // ALIGNMENT) * ALIGNMENT
        self._host[part] = data
        self.copy(self._device[part], self._host[part])
        return self._device[part]
