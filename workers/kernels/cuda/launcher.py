"""Starts compiled kernels on a GPU, on torch's current stream, so behind what torch has computed; has arrays
that a launch reads, copied together, and scratch memory that its kernels share.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.cuda import CudaError, call
from workers.kernels.cuda.compiler import Program, checked, compiled, kernels

MOST_ARGUMENTS = 20
TABLE_BYTES = 3840  # of tables that travel with a launch, as in items.cuh: with arguments under 4096


class Launcher(Protocol):
    """The kernels of one program, on one device."""

    device: torch.device
    # A copy on the device, uint8; the kernels that are launched afterwards may read it.
    upload: Callable[[NDArray[np.uint8]], Tensor]

    def launch(
        self, kernel: str, blocks: int, threads: int, *arguments: int, tables: Tables | None = None
    ) -> None:
        """Start a kernel. Arguments are addresses on the device and numbers, 64 bits each; of kernels with
        `TABLES` the last argument is tables."""


class Arguments:
    """A kernel's arguments as the driver takes them: an array of addresses of 64-bit numbers."""

    def __init__(self) -> None:
        self._numbers = (ctypes.c_int64 * MOST_ARGUMENTS)()
        self._tables = np.zeros(TABLE_BYTES, np.uint8)
        first, size = ctypes.addressof(self._numbers), ctypes.sizeof(ctypes.c_int64)
        self._each = [first + i * size for i in range(MOST_ARGUMENTS)]
        self._addresses = (ctypes.c_void_p * MOST_ARGUMENTS)(*self._each)
        self._of_tables = int(self._tables.ctypes.data)
        self._last = 0  # the argument that is tables

    def fill(self, arguments: tuple[int, ...], tables: Tables | None) -> int:
        """Returns the array's address. The driver copies all before a launch returns, so that the same memory
        serves the next one."""
        number = len(arguments)
        self._numbers[:number] = list(arguments)
        self._addresses[self._last] = self._each[self._last]
        if tables is not None:
            self._last = number
            self._addresses[number] = self._of_tables
            self._tables[: len(tables.values)] = tables.values
        return ctypes.addressof(self._addresses)


class CudaLauncher:
    """A program on a CUDA device. Used by one thread at a time."""

    def __init__(
        self,
        program: Program,
        device: torch.device,
        cache: Path | None,
        upload: Callable[[NDArray[np.uint8]], Tensor],
    ) -> None:
        """Compiles it, or takes it from the cache folder. Raises CudaError where that fails. `upload`: of
        arrays to the device, without waiting."""
        self.device, self.upload = device, upload
        self._arguments = Arguments()
        try:
            self._driver: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as e:
            raise CudaError(f"cuda-bindings is not installed ({e})") from None
        call("cudaSetDevice", device.index)
        call("cudaFree", 0)  # the device's context, the one that torch uses, becomes this thread's
        cubin = compiled(program, torch.cuda.get_device_capability(device), cache)
        try:
            module = checked(self._driver, "cuModuleLoadData", np.frombuffer(cubin, np.uint8).ctypes.data)
        except RuntimeError as e:  # the bindings find no driver
            raise CudaError(str(e)) from None
        # All now: loading a kernel may wait for the device, and a step must not.
        self._functions: dict[str, Any] = {
            name: checked(self._driver, "cuModuleGetFunction", module, name.encode())
            for name in kernels(program.file)
        }

    def launch(
        self, kernel: str, blocks: int, threads: int, *arguments: int, tables: Tables | None = None
    ) -> None:
        if blocks == 0:
            return
        function = self._functions[kernel]
        filled = self._arguments.fill(arguments, tables)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        checked(self._driver, "cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, stream, filled, 0)


ALIGNMENT = 256  # bytes; of tables
TABLE_ALIGNMENT = 16


def places(alignment: int, sizes: Iterable[int]) -> tuple[list[int], int]:
    """Returns where parts of so many bytes begin, and the bytes of all. In Python: a layer has a few of
    them."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // alignment) * alignment
    return starts, end


def packed(*arrays: NDArray[Any]) -> tuple[list[int], NDArray[np.uint8]]:
    """Returns where each of these arrays begins, and the bytes of all."""
    starts, size = places(TABLE_ALIGNMENT, [array.nbytes for array in arrays])
    data = np.empty(size, np.uint8)
    for array, start in zip(arrays, starts, strict=True):
        data[start : start + array.nbytes] = array.view(np.uint8)
    return starts, data


class Tables:
    """Arrays that kernels read: small ones travel with each launch, others are copied to the device.
    `addresses`: of each as the kernels take it, while this lives."""

    def __init__(self, launcher: Launcher, *arrays: NDArray[Any]) -> None:
        self.addresses, data = packed(*arrays)
        self.values = data if len(data) <= TABLE_BYTES else data[:0]
        if len(data) > TABLE_BYTES:
            self._memory = launcher.upload(data)
            self.addresses = [self._memory.data_ptr() + start for start in self.addresses]


class Scratch:
    """Uninitialised memory that grows to what is asked for, and lives as long as this."""

    def __init__(self, launcher: Launcher) -> None:
        self._device, self._size, self._first = launcher.device, 0, 0
        self._memory: Tensor

    def parts(self, *sizes: int) -> list[int]:
        """Returns addresses of parts of so many bytes, which are the memory of earlier ones."""
        starts, size = places(ALIGNMENT, sizes)
        if size > self._size:
            self._memory, self._size = torch.empty(size, dtype=torch.uint8, device=self._device), size
            self._first = self._memory.data_ptr()
        return [self._first + start for start in starts]
