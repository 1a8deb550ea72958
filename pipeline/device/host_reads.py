"""Memory of the host that a GPU's kernels read in place, and sums of the workers' partial sums in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.arrays import FloatArray
from workers.cuda import CudaError, call, constant
from workers.kernels.cuda.launcher import Launcher
from workers.kernels.cuda.matrix import PartSums


class HostReads:
    """Used by the engine's thread alone."""

    def __init__(self, launcher: Callable[[], Launcher]) -> None:
        """`launcher`: of the kernels' program, made when memory is shared first; raises CudaError."""
        self._launcher = launcher
        self._sums: PartSums | None = None
        self._ranges: dict[int, tuple[int, int]] = {}  # by start: end, and distance on the device

    def share(self, memory: NDArray[np.uint8]) -> str:
        """As Device.share_memory."""
        start = memory.ctypes.data
        try:
            if self._sums is None:
                self._sums = PartSums(self._launcher())
            call("cudaHostRegister", start, memory.nbytes, constant("cudaHostRegisterDefault"))
            try:
                there = int(call("cudaHostGetDevicePointer", start, 0))
            except CudaError:
                call("cudaHostUnregister", start)
                raise
        except CudaError as e:
            return str(e)
        self._ranges[start] = start + memory.nbytes, there - start
        return ""

    def unshare(self, memory: NDArray[np.uint8]) -> None:
        """As Device.unshare_memory."""
        if self._ranges.pop(memory.ctypes.data, None):
            call("cudaHostUnregister", memory.ctypes.data)

    def close(self) -> None:
        for start in self._ranges:
            call("cudaHostUnregister", start)
        self._ranges.clear()

    def sum(self, parts: Sequence[FloatArray], shape: tuple[int, ...], device: torch.device) -> Tensor | None:
        """`sum_on_host` of parts that all lie in shared memory; None where not all do."""
        if self._sums is None:
            return None
        places = [self._place(y) for y in parts]
        if 0 in places:
            return None
        y = torch.empty(shape, dtype=torch.float32, device=device)
        self._sums.add(places, y)
        return y

    def _place(self, array: FloatArray) -> int:
        """The address by which kernels read an array; 0 where they do not."""
        start = int(array.__array_interface__["data"][0])  # sooner than by ctypes
        for first, (end, distance) in self._ranges.items():
            if first <= start < end:
                return start + distance
        return 0
