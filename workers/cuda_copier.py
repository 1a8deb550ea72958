"""Copies over the link to a GPU, and the copier for a slab that another process has made."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from protocol.messages import AttachSlab
from shm.slab import Slab
from shm.store import Store
from workers.copiers import Copier, EmulatedLink, HostCopier, TileCopy, sleep_until, take_records
from workers.cuda import (
    CudaError,
    PageLocks,
    PinnedBuffer,
    call,
    constant,
    open_ipc_handle,
    passed,
    registered_parts,
    timed_event,
)

STAGING_THREADS = 4  # at most, so that a link is not slower than what is gathered for it
# Copies are begun ahead for so many bytes, of a fast link's 150 us: beginning one and waiting for it takes
# about 70 us, in which the link would idle.
AHEAD_BYTES = 1 << 22
MOST_AHEAD = 16


def staging_threads() -> int:
    """Returns a number of threads: half of the cores that this process may use, within limits."""
    return max(1, min(STAGING_THREADS, len(os.sched_getaffinity(0)) // 2))


@dataclass
class _Begun:
    """Begun copies, between two events of the stream."""

    first: Any
    last: Any
    tiles: int  # whole ones
    due: float = 0.0  # when an emulated link has moved them
    staged: list[Future[None]] = field(default_factory=list)
    buffers: list[PinnedBuffer] = field(default_factory=list)  # that they read


class CudaCopier:
    """Host to GPU on a non-blocking stream of its own. Tiles whose pages are locked go straight from the
    store; others, and gathered channels, through page-locked buffers that a few threads fill."""

    def __init__(
        self,
        store: Store,
        device: int,
        address: int,
        slot_bytes: int,
        *,
        stream: Callable[[], int] | None = None,
        link: EmulatedLink | None = None,
        locks: PageLocks | None = None,
    ) -> None:
        """`address`: the slab in this process. `stream`: that on which this process computes, and which
        `ready` lets wait for copies; without it, as where another process computes, `ready` waits itself.
        `locks`: of the store, where this process has it page-locked for another device."""
        call("cudaSetDevice", device)
        self._store, self._device = store, device
        self._address, self._slot_bytes = address, slot_bytes
        self._compute, self._link = stream, link
        self._stream = call("cudaStreamCreateWithFlags", constant("cudaStreamNonBlocking"))
        self._threads = ThreadPoolExecutor(staging_threads(), "staging")
        self._buffers: list[PinnedBuffer] = []  # that no copy reads
        self._events: list[Any] = []  # that no copy uses
        self._under_way: deque[_Begun] = deque()
        self._copied = (0, 0.0)
        self.ahead = min(MOST_AHEAD, max(2, 1 + AHEAD_BYTES // slot_bytes))
        self.locks = locks or PageLocks(store.segment.array, device)

    @property
    def copied(self) -> tuple[int, float]:
        self._collect()
        return self._copied

    def begin(self, copies: Sequence[TileCopy]) -> _Begun:
        self._collect()
        for copy in copies:
            if copy.fence is not None and (event := copy.fence.pending()) is not None:
                call("cudaStreamWaitEvent", self._stream, event, 0)
        tiles = sum(copy.channels is None for copy in copies)
        begun = _Begun(self._event(), self._event(), tiles)
        if self._link is not None:
            begun.due, _ = self._link.occupy(sum(copy.size(self._store) for copy in copies))
        call("cudaEventRecord", begun.first, self._stream)
        for copy in copies:
            if not self._copy_locked(copy):
                begun.buffers.append(self._buffers.pop() if self._buffers else PinnedBuffer())
                begun.staged.append(self._threads.submit(self._copy_staged, copy, begun.buffers[-1]))
        if not begun.staged:
            call("cudaEventRecord", begun.last, self._stream)
        return begun

    def _copy_locked(self, copy: TileCopy) -> bool:
        """Copy a tile straight from the store. False where its pages are not locked, or channels are
        gathered."""
        if copy.channels is not None:
            return False
        memory, tile = self._store.segment.array, copy.source(self._store)
        source, target = tile.ctypes.data, self._address + copy.slot * self._slot_bytes
        if source + tile.nbytes - memory.ctypes.data > self.locks.locked:
            return False
        for lo, hi in registered_parts(memory, source, tile.nbytes):
            self._enqueue(target + lo, source + lo, hi - lo)
        return True

    def _copy_staged(self, copy: TileCopy, buffer: PinnedBuffer) -> None:
        call("cudaSetDevice", self._device)
        source, size = copy.source(self._store), copy.size(self._store)
        out, target = buffer.array(size), self._address + copy.slot * self._slot_bytes
        if copy.channels is None:
            out[:] = source
        else:
            take_records(source, copy.channels, out)
            target += copy.at * source.shape[1]
        self._enqueue(target, out.ctypes.data, size)

    def _enqueue(self, target: int, source: int, size: int) -> None:
        kind = constant("cudaMemcpyKind").cudaMemcpyHostToDevice
        call("cudaMemcpyAsync", target, source, size, kind, self._stream)

    def ready(self, begun: _Begun) -> None:
        for staged in begun.staged:
            staged.result()
        if begun.staged:
            call("cudaEventRecord", begun.last, self._stream)
        if self._link is not None:
            sleep_until(begun.due, self._link.tick)
        if self._compute is None:
            call("cudaEventSynchronize", begun.last)
        else:
            call("cudaStreamWaitEvent", self._compute(), begun.last, 0)
        self._under_way.append(begun)

    def _collect(self) -> None:
        """Count completed copies, and use their events and buffers again."""
        while self._under_way and passed(self._under_way[0].last):
            begun = self._under_way.popleft()
            if begun.tiles:
                seconds = call("cudaEventElapsedTime", begun.first, begun.last) / 1e3
                self._copied = self._copied[0] + begun.tiles, self._copied[1] + seconds
            self._events += [begun.first, begun.last]
            self._buffers += begun.buffers

    def _event(self) -> Any:
        return self._events.pop() if self._events else timed_event()

    def stats(self) -> dict[str, int]:
        return {"locked_bytes": self.locks.locked, "lockable_bytes": self._store.segment.array.nbytes}

    def close(self) -> None:
        """The pages stay locked: the process ends next, which is far faster than unlocking them."""
        self._threads.shutdown()
        call("cudaStreamSynchronize", self._stream)
        self.locks.stop()
        self._collect()
        for buffer in self._buffers:
            buffer.close()
        for event in self._events:
            call("cudaEventDestroy", event)
        call("cudaStreamDestroy", self._stream)


def open_copier(order: AttachSlab, store: Store, link: EmulatedLink | None) -> Copier:
    """Return the copier for a slab of another process. Raises ShmError or CudaError if it cannot be
    attached."""
    if order.kind != "cuda":
        return HostCopier(store, Slab.attach(order.handle.decode(), order.slots, order.slot_bytes), link)
    try:
        address = open_ipc_handle(order.device, order.handle)
    except CudaError:
        with suppress(CudaError):
            call("cudaDeviceReset")  # its context takes half a gigabyte of the device's memory
        raise
    return CudaCopier(store, order.device, address, order.slot_bytes, link=link)
