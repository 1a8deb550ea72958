"""The few CUDA runtime calls that torch does not offer: memory outside its allocator, IPC, page-locking.

Everything goes through cuda-bindings; this module can be imported without it, and `available` tells whether
it is installed. Handles are 64 opaque bytes, as they travel in AttachSlab.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

IPC_HANDLE_BYTES = 64
REGISTER_CHUNK = 1 << 30  # one refusal then costs at most a GiB of pinned memory, not the whole store


class CudaError(Exception):
    """A CUDA runtime call failed, or cuda-bindings is not installed; the text names the call."""


def _runtime() -> Any:
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as e:
        remedy = "python launch.py doctor has the command"
        raise CudaError(f"cuda-bindings is not installed ({e}); {remedy}") from None


def call(name: str, *arguments: Any) -> Any:
    """Call a runtime function; its results without the status. Raises CudaError unless that is success."""
    runtime = _runtime()
    status, *results = getattr(runtime, name)(*arguments)
    if int(status) != 0:
        _, text = runtime.cudaGetErrorString(status)
        raise CudaError(f"{name}: {text.decode() if isinstance(text, bytes) else text}")
    return results[0] if len(results) == 1 else tuple(results)


def constant(name: str) -> Any:
    """A constant or enumeration of the runtime, by its name in the CUDA headers."""
    return getattr(_runtime(), name)


def ipc_handle(pointer: int) -> bytes:
    """Export an allocation made by cudaMalloc."""
    handle = call("cudaIpcGetMemHandle", pointer)
    return ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES)


def open_ipc_handle(device: int, data: bytes) -> int:
    """Map another process's allocation on this device; its address here. The device becomes the calling
    thread's: the mapping belongs to its context."""
    if len(data) != IPC_HANDLE_BYTES:
        raise CudaError(f"an IPC handle has {IPC_HANDLE_BYTES} bytes, not {len(data)}")
    call("cudaSetDevice", device)
    handle = constant("cudaIpcMemHandle_t")()
    ctypes.memmove(handle.getPtr(), data, IPC_HANDLE_BYTES)
    return int(call("cudaIpcOpenMemHandle", handle, constant("cudaIpcMemLazyEnablePeerAccess")))


class PinnedBuffer:
    """Page-locked host memory that grows to what is asked of it."""

    def __init__(self) -> None:
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)

    def array(self, size: int) -> NDArray[np.uint8]:
        """uint8 [size] at its beginning; an earlier array of it must not be in use."""
        if size > len(self._memory):
            self.close()
            address = int(call("cudaMallocHost", size))
            self._memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        return self._memory[:size]

    def close(self) -> None:
        """Free the memory."""
        if len(self._memory):
            call("cudaFreeHost", self._memory.ctypes.data)
            self._memory = np.empty(0, np.uint8)


def page_lock(memory: NDArray[np.uint8]) -> tuple[int, str]:
    """Register host memory (a read-write mapping) with CUDA, in chunks, so that copies from it are
    asynchronous. Returns the bytes that were locked and, where not all were, why."""
    start = memory.ctypes.data
    for offset in range(0, memory.nbytes, REGISTER_CHUNK):
        size = min(REGISTER_CHUNK, memory.nbytes - offset)
        try:
            call("cudaHostRegister", start + offset, size, constant("cudaHostRegisterDefault"))
        except CudaError as e:
            return offset, str(e)
    return memory.nbytes, ""


def page_unlock(memory: NDArray[np.uint8], locked: int) -> None:
    """Undo `page_lock`; `locked` is its first result."""
    for offset in range(0, locked, REGISTER_CHUNK):
        call("cudaHostUnregister", memory.ctypes.data + offset)


def registered_parts(memory: NDArray[np.uint8], start: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut `size` bytes at address `start` within `memory` where `page_lock` cut it: pairs (lo, hi) relative
    to `start`. The host range of one copy must not run from one registration into another."""
    offset = start - memory.ctypes.data
    lo = 0
    while lo < size:
        hi = min(size, ((offset + lo) // REGISTER_CHUNK + 1) * REGISTER_CHUNK - offset)
        yield lo, hi
        lo = hi
