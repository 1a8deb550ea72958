"""Copies of tiles into slots: within host memory, or over the link to a GPU.

`start` begins a copy and `finish` returns when it has completed. Copies complete in the order of their start;
at most `depth` may be under way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from protocol.messages import AttachSlab
from shm.layout import Bytes
from shm.slab import Slab
from shm.store import Store
from workers.cuda import call, constant, open_ipc_handle, page_lock, page_unlock, registered_parts
from workers.emulation import sleep_until

Tick = Callable[[], None]


class Copier(Protocol):
    """Copies store tiles into slab slots."""

    depth: int
    notes: tuple[str, ...]

    def start(self, tile: Bytes, slot: int) -> None:
        """Begin to copy one tile."""

    def finish(self) -> None:
        """Wait for the oldest copy that was started and not yet finished."""

    def close(self) -> None:
        """Wait for all copies and release the slab."""


class ShmCopier:
    """Host to host: the slab of device `cpu` is a shared-memory segment."""

    depth = 1
    notes: tuple[str, ...] = ()

    def __init__(self, slab: Slab) -> None:
        self._slab = slab

    def start(self, tile: Bytes, slot: int) -> None:
        self._slab.slot(slot)[:] = tile

    def finish(self) -> None:
        """The copy was complete when `start` returned."""

    def close(self) -> None:
        self._slab.close()


class CudaCopier:
    """Host to GPU on a stream of its own, two copies under way so that the link never idles between them."""

    depth = 2

    def __init__(self, store: Store, device: int, address: int, slot_bytes: int, owned: bool) -> None:
        """`address`: the slab in this process; `owned`: it was opened from an IPC handle, close it."""
        call("cudaSetDevice", device)
        self._address = address
        self._slot_bytes = slot_bytes
        self._owned = owned
        self._stream = call("cudaStreamCreateWithFlags", constant("cudaStreamNonBlocking"))
        self._spare = [self._new_event() for _ in range(self.depth)]
        self._running: deque[Any] = deque()
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
        self._running.append(event)

    def finish(self) -> None:
        event = self._running.popleft()
        call("cudaEventSynchronize", event)
        self._spare.append(event)

    def close(self) -> None:
        while self._running:
            self.finish()
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
        self.depth = inner.depth
        self.notes = inner.notes

    def start(self, tile: Bytes, slot: int) -> None:
        self._free_at = max(self._free_at, time.perf_counter()) + tile.nbytes / self._rate
        self._due.append(self._free_at)
        self._inner.start(tile, slot)

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
