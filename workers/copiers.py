"""Copies into slots, of whole tiles or of gathered channels: what every copier does, within host memory, and
on an emulated link. Over the link to a GPU: `workers/cuda_copier.py`.

`start` and `gather` begin a copy and `finish` returns when it has completed. Copies complete in the order of
their start; at most `depth` may be under way, or `gather_depth` of gathered channels. `depth` may change.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from protocol.messages import I32Vector
from shm.landing_flags import NONE
from shm.layout import Bytes
from shm.slab import Slab
from workers.emulation import sleep_until

Tick = Callable[[], None]
PACED_GATHERS = 2  # chunks under way on an emulated link, one of them being gathered


class Copier(Protocol):
    """Copies store tiles into slab slots."""

    gather_depth: int
    flags: bool  # whether `start` writes numbers

    @property
    def depth(self) -> int:
        """Copies of tiles that may be under way."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for a person; they may change."""

    @property
    def locked(self) -> tuple[int, int]:
        """How many bytes of the store are page-locked so far, of how many; (0, 0) where none need be."""

    def start(self, tile: Bytes, slot: int, number: int = NONE) -> None:
        """Begin to copy one tile; behind it, write this number to the slot's flag."""

    def gather(self, records: Bytes, chosen: I32Vector, slot: int, place: int) -> None:
        """Begin to copy the chosen ones of an expert's records [channels, bytes] to the slot's records from
        `place` on."""

    def finish(self) -> int:
        """Wait for the oldest copy that was started and not yet finished. Returns how many of them, at least
        that one, have completed; they are finished."""

    def close(self) -> None:
        """Wait for all copies and release the slab."""


class ShmCopier:
    """Host to host: the slab of device `cpu` is a shared-memory segment."""

    depth = gather_depth = 1
    flags = False
    notes: tuple[str, ...] = ()
    locked = 0, 0

    def __init__(self, slab: Slab) -> None:
        self._slab = slab

    def start(self, tile: Bytes, slot: int, number: int = NONE) -> None:
        self._slab.slot(slot)[:] = tile

    def gather(self, records: Bytes, chosen: I32Vector, slot: int, place: int) -> None:
        size = records.shape[1]
        out = self._slab.slot(slot)[place * size : (place + len(chosen)) * size]
        take_records(records, chosen, out)

    def finish(self) -> int:
        """The copy was complete when `start` returned."""
        return 1

    def close(self) -> None:
        self._slab.close()


def take_records(records: Bytes, chosen: I32Vector, out: Bytes) -> None:
    """Write the chosen ones of records [n, bytes] to `out`, one after the other; other threads may run
    meanwhile. The chosen ones exist: the prefetcher has checked that."""
    np.take(records, chosen, axis=0, out=out.reshape(len(chosen), -1), mode="clip")


class PacedCopier:
    """Slows another copier to a link of `gbps` 1e9 bytes a second (emulation). Deadlines accumulate, so
    that the inexactness of each sleep does not. A wait counts as progress, and ticks."""

    flags = False  # the GPU would write them ahead of the emulated link

    def __init__(self, inner: Copier, gbps: float, tick: Tick) -> None:
        self._inner = inner
        self._tick = tick
        self._rate = gbps * 1e9
        self._due: deque[float] = deque()
        self._free_at = 0.0  # when the emulated link has finished what was started
        # as on a link, the next chunk is gathered while this one moves
        self.gather_depth = max(inner.gather_depth, PACED_GATHERS)

    @property
    def depth(self) -> int:
        return self._inner.depth

    @property
    def notes(self) -> tuple[str, ...]:
        return self._inner.notes

    @property
    def locked(self) -> tuple[int, int]:
        return self._inner.locked

    def start(self, tile: Bytes, slot: int, number: int = NONE) -> None:
        self._occupy(tile.nbytes)
        self._inner.start(tile, slot)

    def gather(self, records: Bytes, chosen: I32Vector, slot: int, place: int) -> None:
        self._occupy(len(chosen) * records.shape[1])
        self._inner.gather(records, chosen, slot, place)

    def _occupy(self, size: int) -> None:
        self._free_at = max(self._free_at, time.perf_counter()) + size / self._rate
        self._due.append(self._free_at)

    def finish(self) -> int:
        count = self._inner.finish()
        for _ in range(count):
            sleep_until(self._due.popleft(), self._tick)
        return count

    def close(self) -> None:
        self._inner.close()


def paced(copier: Copier, link_gbps: float | None, tick: Tick) -> Copier:
    """The copier, slowed to an emulated link; None: not slowed."""
    return copier if link_gbps is None else PacedCopier(copier, link_gbps, tick)
