"""Copies into slots, of whole tiles or of gathered channels: within host memory, or over the link to a GPU.

`start` and `gather` begin a copy and `finish` returns when it has completed. Copies complete in the order of
their start; at most `depth` may be under way, or `gather_depth` of gathered channels.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from protocol.messages import AttachSlab, I32Vector
from shm.layout import Bytes
from shm.slab import Slab
from shm.store import Store
from workers.cuda import (
    PinnedBuffer,
    call,
    constant,
    open_ipc_handle,
    page_lock,
    page_unlock,
    registered_parts,
)
from workers.emulation import sleep_until

Tick = Callable[[], None]
GATHER_THREADS = 4  # at most, so that a link is not slower than what is gathered for it


class Copier(Protocol):
    """Copies store tiles into slab slots."""

    depth: int
    gather_depth: int
    notes: tuple[str, ...]

    def start(self, tile: Bytes, slot: int) -> None:
        """Begin to copy one tile."""

    def gather(self, records: Bytes, chosen: I32Vector, slot: int, place: int) -> None:
        """Begin to copy the chosen ones of an expert's records [channels, bytes] to the slot's records from
        `place` on."""

    def finish(self) -> None:
        """Wait for the oldest copy that was started and not yet finished."""

    def close(self) -> None:
        """Wait for all copies and release the slab."""


class ShmCopier:
    """Host to host: the slab of device `cpu` is a shared-memory segment."""

    depth = gather_depth = 1
    notes: tuple[str, ...] = ()

    def __init__(self, slab: Slab) -> None:
        self._slab = slab

    def start(self, tile: Bytes, slot: int) -> None:
        self._slab.slot(slot)[:] = tile

    def gather(self, records: Bytes, chosen: I32Vector, slot: int, place: int) -> None:
        size = records.shape[1]
        out = self._slab.slot(slot)[place * size : (place + len(chosen)) * size]
        take_records(records, chosen, out)

    def finish(self) -> None:
        """The copy was complete when `start` returned."""

    def close(self) -> None:
        self._slab.close()


def take_records(records: Bytes, chosen: I32Vector, out: Bytes) -> None:
    """Write the chosen ones of records [n, bytes] to `out`, one after the other; other threads may run
    meanwhile. The chosen ones exist: the prefetcher has checked that."""
    np.take(records, chosen, axis=0, out=out.reshape(len(chosen), -1), mode="clip")


def gather_threads() -> int:
    """Threads that gather for one link: as many as this process may use half of the cores with."""
    return max(1, min(GATHER_THREADS, len(os.sched_getaffinity(0)) // 2))


class CudaCopier:
    """Host to GPU on a stream of its own, two copies under way so that the link never idles between them.
    Channels are gathered by several threads into page-locked buffers, each of which goes over the link in one
    copy."""

    depth = 2

    def __init__(self, store: Store, device: int, address: int, slot_bytes: int, owned: bool) -> None:
        """`address`: the slab in this process; `owned`: it was opened from an IPC handle, close it."""
        call("cudaSetDevice", device)
        self._address = address
        self._slot_bytes = slot_bytes
        self._owned = owned
        self._stream = call("cudaStreamCreateWithFlags", constant("cudaStreamNonBlocking"))
        threads = gather_threads()
        self.gather_depth = threads + 1  # one of them on the link
        self._device = device
        self._threads = ThreadPoolExecutor(threads, "gather")
        self._chunks: list[Any] = []  # page-locked buffers that no copy uses
        self._spare = [self._new_event() for _ in range(self.gather_depth)]
        self._running: deque[tuple[Any, Future[None] | None, Any]] = deque()  # event, gathering, its buffer
        self._memory = store.segment.array
        self._locked, reason = page_lock(self._memory)
        share = self._locked / self._memory.nbytes
        self.notes: tuple[str, ...] = (f"page-locked {share:.0%} of the store: {reason}",) if reason else ()

    @staticmethod
    def _new_event() -> Any:
        # Blocking: by default a wait for an event spins, on a core that a worker needs.
        flags = constant("cudaEventDisableTiming") | constant("cudaEventBlockingSync")
        return call("cudaEventCreateWithFlags", flags)

    def start(self, tile: Bytes, slot: int) -> None:
        target = self._address + slot * self._slot_bytes
        source = tile.ctypes.data
        kind = constant("cudaMemcpyKind").cudaMemcpyHostToDevice
        for lo, hi in registered_parts(self._memory, source, tile.nbytes):
            call("cudaMemcpyAsync", target + lo, source + lo, hi - lo, kind, self._stream)
        event = self._spare.pop()
        call("cudaEventRecord", event, self._stream)
        self._running.append((event, None, None))

    def gather(self, records: Bytes, chosen: I32Vector, slot: int, place: int) -> None:
        size = records.shape[1]
        target = self._address + slot * self._slot_bytes + place * size
        buffer = self._chunks.pop() if self._chunks else PinnedBuffer()
        event = self._spare.pop()

        def copy() -> None:
            call("cudaSetDevice", self._device)
            out = buffer.array(len(chosen) * size)
            take_records(records, chosen, out)
            kind = constant("cudaMemcpyKind").cudaMemcpyHostToDevice
            call("cudaMemcpyAsync", target, out.ctypes.data, out.nbytes, kind, self._stream)
            call("cudaEventRecord", event, self._stream)

        self._running.append((event, self._threads.submit(copy), buffer))

    def finish(self) -> None:
        event, gathering, buffer = self._running.popleft()
        if gathering is not None:
            gathering.result()
        call("cudaEventSynchronize", event)
        self._spare.append(event)
        if buffer is not None:
            self._chunks.append(buffer)

    def close(self) -> None:
        while self._running:
            self.finish()
        self._threads.shutdown()
        for buffer in self._chunks:
            buffer.close()
        for event in self._spare:
            call("cudaEventDestroy", event)
        call("cudaStreamDestroy", self._stream)
        page_unlock(self._memory, self._locked)
        if self._owned:
            call("cudaIpcCloseMemHandle", self._address)


class PacedCopier:
    """Slows another copier to a link of `gbps` 1e9 bytes a second (emulation). Deadlines accumulate, so
    that the inexactness of each sleep does not. A wait counts as progress, and ticks."""

    def __init__(self, inner: Copier, gbps: float, tick: Tick) -> None:
        self._inner = inner
        self._tick = tick
        self._rate = gbps * 1e9
        self._due: deque[float] = deque()
        self._free_at = 0.0  # when the emulated link has finished what was started
        self.depth, self.gather_depth = inner.depth, inner.gather_depth
        self.notes = inner.notes

    def start(self, tile: Bytes, slot: int) -> None:
        self._occupy(tile.nbytes)
        self._inner.start(tile, slot)

    def gather(self, records: Bytes, chosen: I32Vector, slot: int, place: int) -> None:
        self._occupy(len(chosen) * records.shape[1])
        self._inner.gather(records, chosen, slot, place)

    def _occupy(self, size: int) -> None:
        self._free_at = max(self._free_at, time.perf_counter()) + size / self._rate
        self._due.append(self._free_at)

    def finish(self) -> None:
        self._inner.finish()
        due = self._due.popleft()
        sleep_until(due, self._tick)

    def close(self) -> None:
        self._inner.close()


def open_copier(order: AttachSlab, store: Store, link_gbps: float | None, tick: Tick) -> Copier:
    """The copier for a slab of another process. Raises ShmError or CudaError if it cannot be attached."""
    copier: Copier
    if order.kind == "cuda":
        address = open_ipc_handle(order.device, order.handle)
        copier = CudaCopier(store, order.device, address, order.slot_bytes, owned=True)
    else:
        copier = ShmCopier(Slab.attach(order.handle.decode(), order.slots, order.slot_bytes))
    return paced(copier, link_gbps, tick)


def paced(copier: Copier, link_gbps: float | None, tick: Tick) -> Copier:
    """The copier, slowed to an emulated link; None: not slowed."""
    return copier if link_gbps is None else PacedCopier(copier, link_gbps, tick)
