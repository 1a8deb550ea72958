"""Copies over the link to a GPU, and the copier for a slab that another process has made."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from protocol.messages import AttachSlab, I32Vector
from shm.landing_flags import NONE, LandingFlags
from shm.layout import Bytes
from shm.slab import Slab
from shm.store import Store
from workers.copiers import Copier, ShmCopier, Tick, paced, take_records
from workers.cuda import (
    CudaError,
    PageLocks,
    PinnedBuffer,
    blocking_event,
    call,
    constant,
    open_ipc_handle,
    passed,
    registered_parts,
)
from workers.device_flags import DeviceFlags

log = logging.getLogger(__name__)

GATHER_THREADS = 4  # at most, so that a link is not slower than what is gathered for it
# Copies are started ahead for so many seconds of the link: starting one and waiting for it takes about 70 us,
# in which a fast link would idle. A demand waits for what was started.
AHEAD_SECONDS = 150e-6
MOST_AHEAD = 16
FIRST_RATE = 12e9  # bytes a second, of a link that was not timed yet


def gather_threads() -> int:
    """Threads that gather for one link: as many as this process may use half of the cores with."""
    return max(1, min(GATHER_THREADS, len(os.sched_getaffinity(0)) // 2))


@dataclass
class _Copy:
    """One that is under way."""

    event: Any
    bytes: int
    began: float
    gathering: Future[None] | None = None
    buffer: PinnedBuffer | None = None  # that it reads


class CudaCopier:
    """Host to GPU on a stream of its own, with copies under way ahead so that the link never idles between
    them. The store is page-locked meanwhile (`PageLocks`). Channels are gathered by several threads into
    page-locked buffers, each of which goes over the link in one copy."""

    def __init__(
        self,
        store: Store,
        device: int,
        address: int,
        slot_bytes: int,
        owned: bool,
        flags: DeviceFlags | None = None,
    ) -> None:
        """`address`: the slab in this process; `owned`: it and its flags were opened here, close them.
        `flags`: of the slab, where streams can write them."""
        call("cudaSetDevice", device)
        self.flags = flags is not None
        self._flags, self._thread = flags, threading.get_ident()
        self._address = address
        self._slot_bytes = slot_bytes
        self._owned = owned
        self._stream = call("cudaStreamCreateWithFlags", constant("cudaStreamNonBlocking"))
        threads = gather_threads()
        self.gather_depth = threads + 1  # one of them on the link
        self._device = device
        self._threads = ThreadPoolExecutor(threads, "gather")
        self._chunks: list[PinnedBuffer] = []  # that no copy uses
        self._spare: list[Any] = []  # events
        self._running: deque[_Copy] = deque()
        self._rate, self._ended = FIRST_RATE, 0.0  # of the link; when the last copy ended
        self._memory = store.segment.array
        self.locks = PageLocks(self._memory, device)

    @property
    def notes(self) -> tuple[str, ...]:
        note = self.locks.note
        return (note,) if note else ()

    @property
    def locked(self) -> tuple[int, int]:
        return self.locks.locked, self._memory.nbytes

    @property
    def depth(self) -> int:
        ahead = int(AHEAD_SECONDS * self._rate / self._slot_bytes)
        return min(MOST_AHEAD, max(2, 1 + ahead))

    def _event(self) -> Any:
        return self._spare.pop() if self._spare else blocking_event()

    def start(self, tile: Bytes, slot: int, number: int = NONE) -> None:
        if threading.get_ident() != self._thread:  # the driver wants the context current in each thread
            call("cudaSetDevice", self._device)
            self._thread = threading.get_ident()
        target = self._address + slot * self._slot_bytes
        source = tile.ctypes.data
        kind = constant("cudaMemcpyKind").cudaMemcpyHostToDevice
        copy = _Copy(self._event(), tile.nbytes, time.perf_counter())
        for lo, hi in registered_parts(self._memory, source, tile.nbytes):
            call("cudaMemcpyAsync", target + lo, source + lo, hi - lo, kind, self._stream)
        if number != NONE and self._flags is not None:
            self._flags.write(self._stream, slot, number)
        call("cudaEventRecord", copy.event, self._stream)
        self._running.append(copy)

    def gather(self, records: Bytes, chosen: I32Vector, slot: int, place: int) -> None:
        size = records.shape[1]
        target = self._address + slot * self._slot_bytes + place * size
        buffer = self._chunks.pop() if self._chunks else PinnedBuffer()
        event = self._event()

        def copy() -> None:
            call("cudaSetDevice", self._device)
            out = buffer.array(len(chosen) * size)
            take_records(records, chosen, out)
            kind = constant("cudaMemcpyKind").cudaMemcpyHostToDevice
            call("cudaMemcpyAsync", target, out.ctypes.data, out.nbytes, kind, self._stream)
            call("cudaEventRecord", event, self._stream)

        began = time.perf_counter()
        self._running.append(_Copy(event, len(chosen) * size, began, self._threads.submit(copy), buffer))

    def finish(self) -> int:
        self._wait()
        count = 1
        while self._running and self._running[0].gathering is None and passed(self._running[0].event):
            self._wait()
            count += 1
        return count

    def _wait(self) -> None:
        copy = self._running[0]
        if copy.gathering is not None:
            copy.gathering.result()
        call("cudaEventSynchronize", copy.event)
        self._running.popleft()
        self._spare.append(copy.event)
        if copy.buffer is not None:
            self._chunks.append(copy.buffer)
        elif self._running and copy.began < self._ended:  # the link was busy before and after it
            took = time.perf_counter() - self._ended
            self._rate += (copy.bytes / max(took, 1e-6) - self._rate) / 8
        self._ended = time.perf_counter()

    def close(self) -> None:
        """The pages stay locked: the process ends next, which is far faster than unlocking them."""
        while self._running:
            self._wait()
        self._threads.shutdown()
        self.locks.stop()
        for buffer in self._chunks:
            buffer.close()
        for event in self._spare:
            call("cudaEventDestroy", event)
        call("cudaStreamDestroy", self._stream)
        if self._owned:
            call("cudaIpcCloseMemHandle", self._address)
            if self._flags is not None:
                self._flags.close()
                self._flags.flags.close()


def open_copier(order: AttachSlab, store: Store, link_gbps: float | None, tick: Tick) -> Copier:
    """The copier for a slab of another process. Raises ShmError or CudaError if it cannot be attached."""
    copier: Copier
    if order.kind == "cuda":
        try:
            address = open_ipc_handle(order.device, order.handle)
        except CudaError:
            with suppress(CudaError):
                call("cudaDeviceReset")  # its context takes half a gigabyte of the device's memory
            raise
        flags = _open_flags(order) if order.flags and link_gbps is None else None
        copier = CudaCopier(store, order.device, address, order.slot_bytes, owned=True, flags=flags)
    else:
        copier = ShmCopier(Slab.attach(order.handle.decode(), order.slots, order.slot_bytes))
    return paced(copier, link_gbps, tick)


def _open_flags(order: AttachSlab) -> DeviceFlags | None:
    """Raises ShmError where the slab's flags cannot be mapped; None where this process cannot write them."""
    flags = LandingFlags.attach(order.flags, order.slots)
    try:
        return DeviceFlags(flags, order.device, spare=1)
    except CudaError as e:
        log.info(f"landings are reported and not written to flags: {e}")
        flags.close()
        return None
