"""The few CUDA runtime calls that torch does not offer: memory outside its allocator, IPC, page-locking.

Everything goes through cuda-bindings; this module can be imported without it, and `available` tells whether
it is installed. Handles are 64 opaque bytes, as they travel in AttachSlab.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.program import COMMAND
from shm.segment import byte_size

IPC_HANDLE_BYTES = 64
ALIGNMENT = 256  # bytes, of a part of an arena
# Of one registration: a refusal costs at most so much pinned memory, and a call of the driver waits for one.
REGISTER_CHUNK = 1 << 25
NOT_READY = 600  # cudaErrorNotReady

log = logging.getLogger(__name__)


class CudaError(Exception):
    """A CUDA runtime call failed, or cuda-bindings is not installed; the text names the call."""


def _runtime() -> Any:
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as e:
        remedy = f"{COMMAND} doctor has the command"
        raise CudaError(f"cuda-bindings is not installed ({e}); {remedy}") from None


def call(name: str, *arguments: Any) -> Any:
    """Call a runtime function; its results without the status. Raises CudaError unless that is success."""
    runtime = _runtime()
    status, *results = getattr(runtime, name)(*arguments)
    if int(status) != 0:
        _, text = runtime.cudaGetErrorString(status)
        raise CudaError(f"{name}: {text.decode() if isinstance(text, bytes) else text}")
    return results[0] if len(results) == 1 else tuple(results)


def lasting_error() -> str:
    """The error after which nothing is computed in this process's context; "" where only one call failed."""
    _runtime().cudaGetLastError()  # which forgets it
    try:
        call("cudaDeviceSynchronize")
    except CudaError as e:
        return str(e)
    return ""


def passed(event: Any) -> bool:
    """Tells whether all work before the event has completed. Raises CudaError where some has failed."""
    runtime = _runtime()
    (status,) = runtime.cudaEventQuery(event)
    if int(status) == NOT_READY:
        return False
    call("cudaEventQuery", event)
    return True


def blocking_event() -> Any:
    """A new event. By default a wait for one spins, on a core that a worker needs; this one's sleeps."""
    flags = constant("cudaEventDisableTiming") | constant("cudaEventBlockingSync")
    return call("cudaEventCreateWithFlags", flags)


def timed_event() -> Any:
    """A new event that notes when it was passed. A wait for it sleeps, too."""
    return call("cudaEventCreateWithFlags", constant("cudaEventBlockingSync"))


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


class PinnedArena:
    """Page-locked host memory for copies to the device: parts of it are taken one after the other, until all
    copies from them have ended."""

    def __init__(self) -> None:
        self._buffer = PinnedBuffer()
        self._full: list[PinnedBuffer] = []  # too small for all parts together, and still in use
        self._size = self._taken = 0

    def take(self, size: int) -> NDArray[np.uint8]:
        """uint8 [size], in use until `restart`."""
        start = self._taken
        if start + size > self._size:
            if start:
                self._full.append(self._buffer)
                self._buffer = PinnedBuffer()
            start, self._size = 0, max(size, 2 * self._size)
        self._taken = start + -(-size // ALIGNMENT) * ALIGNMENT
        return self._buffer.array(self._size)[start : start + size]

    def restart(self) -> None:
        """All copies from its parts have ended."""
        self._taken = 0
        while self._full:
            self._full.pop().close()

    def close(self) -> None:
        """Free the memory."""
        self.restart()
        self._buffer.close()
        self._size = 0


class PageLocks:
    """Registers host memory (a read-write mapping) with CUDA, so that copies from it are asynchronous: chunk
    by chunk in a thread, because that takes 6 to 100 s for 100 GB. What is not locked yet is copied by way of
    `PinnedBuffer`s."""

    def __init__(self, memory: NDArray[np.uint8], device: int) -> None:
        """Begin to register this memory."""
        self.locked = 0  # bytes, from the first on
        self._memory, self._device = memory, device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._lock, name="page-lock", daemon=True)
        self._thread.start()

    def _lock(self) -> None:
        total, began = self._memory.nbytes, time.monotonic()
        try:
            call("cudaSetDevice", self._device)
            for end in _lock_chunks(self._memory):
                self.locked = end
                if self._stop.is_set():
                    return
        except CudaError as e:
            log.warning(f"page-locked {self.locked / max(1, total):.0%} of the store: {e}")
        else:
            log.debug(f"{byte_size(total)} of the store page-locked in {time.monotonic() - began:.0f} s")

    def stop(self) -> None:
        """Lock no more; what is locked stays so until the process exits."""
        self._stop.set()
        self._thread.join()

    def undo(self) -> None:
        """Wait until all is locked that can be, and unlock it."""
        self._thread.join()
        page_unlock(self._memory, self.locked)
        self.locked = 0


def _lock_chunks(memory: NDArray[np.uint8]) -> Iterator[int]:
    """Register the memory. Yields how many of its first bytes are. Raises CudaError where no more can be."""
    start = memory.ctypes.data
    for offset in range(0, memory.nbytes, REGISTER_CHUNK):
        size = min(REGISTER_CHUNK, memory.nbytes - offset)
        call("cudaHostRegister", start + offset, size, constant("cudaHostRegisterPortable"))
        yield offset + size


def page_lock(memory: NDArray[np.uint8]) -> tuple[int, str]:
    """Register host memory at once. Returns the bytes that were locked and, where not all were, why."""
    locked = 0
    try:
        for end in _lock_chunks(memory):
            locked = end
    except CudaError as e:
        return locked, str(e)
    return locked, ""


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
