"""Copies whole tiles or chosen channels from the store to slots: in the coordinator, which demands them, and
in the prefetch process. Within host memory here, over the link to a GPU in `workers/cuda_copier.py`.

Coordinator and prefetcher copy over one emulated link (`--link-gbps`). Each notes in its line of the control
segment until when its copies occupy that link, and begins behind what both have noted; so neither waits for
the other process itself, and the death of one costs the other at most the copies that were noted. The
prefetcher begins nothing while demanded tiles occupy the link.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from protocol.messages import I32Vector
from shm.control import ControlLine
from shm.layout import Bytes
from shm.slab import Slab
from shm.store import Store

TICK_SECONDS = 0.5  # most time between two signs of progress


def sleep_until(deadline: float, tick: Callable[[], None]) -> None:
    """Sleep until `time.perf_counter()` reaches the deadline, with ticks: the wait counts as progress."""
    while (rest := deadline - time.perf_counter()) > 0:
        time.sleep(min(rest, TICK_SECONDS))
        tick()


class EmulatedLink:
    """A link of `gbps` 1e9 bytes a second, as one of its two users sees it."""

    def __init__(
        self, gbps: float, own: ControlLine, other: ControlLine, tick: Callable[[], None] | None = None
    ) -> None:
        """`own` and `other`: the lines of this process and of the other one. `tick`: notes progress; None: in
        its own line."""
        self._rate = gbps * 1e9
        self._own, self._other = own, other
        self.tick = tick or own.tick

    @property
    def other_until(self) -> float:
        """The time, by `time.perf_counter()`, until which the other process's copies occupy the link."""
        return self._other.link_until / 1e9

    def free_soon(self) -> bool:
        """Tells whether the other process's copies have moved, or will have in less than a millisecond, which
        this waits."""
        busy = self.other_until - time.perf_counter()
        if busy >= 1e-3:
            return False
        if busy > 0:
            time.sleep(busy)
        return self.other_until <= time.perf_counter()

    def occupy(self, size: int) -> tuple[float, float]:
        """Let so many bytes follow what is on the link. Returns when they have moved, and in how many
        seconds."""
        seconds = size / self._rate
        begin = max(time.perf_counter(), self._own.link_until / 1e9, self.other_until)
        self._own.link_until = int((begin + seconds) * 1e9)
        return begin + seconds, seconds


class TileCopy(NamedTuple):
    """A copy to one slot: a tile of an expert, or with `channels` their records, one after the other."""

    layer: int
    expert: int
    tile: int
    slot: int
    channels: I32Vector | None = None  # counted over the expert
    at: int = 0  # the slot's record that the first channel is copied to
    fence: Any = None  # of the slot's last reader, where that may still read

    def source(self, store: Store) -> Bytes:
        """The tile's bytes, or all records of the expert: [channels, record bytes]."""
        if self.channels is None:
            return store.tiles(self.layer, self.expert, self.tile, self.tile + 1)
        shape = store.layout.shape
        return store.tiles(self.layer, self.expert, 0, shape.tiles).reshape(shape.padded, -1)

    def size(self, store: Store) -> int:
        """The bytes that move."""
        tile_bytes = store.layout.tile_bytes
        if self.channels is None:
            return tile_bytes
        return len(self.channels) * (tile_bytes // store.layout.shape.tile)


class Copier(Protocol):
    """Copies in the order in which they are begun."""

    ahead: int  # copies that may be under way, so that a link does not idle between them

    @property
    def copied(self) -> tuple[int, float]:
        """Whole tiles that were copied so far, and the seconds of that."""

    def begin(self, copies: Sequence[TileCopy]) -> Any:
        """Begin copies, each behind its fence. Returns what `ready` takes."""

    def ready(self, begun: Any) -> None:
        """Return when these slots may be read: by this process's device, or, where another process computes,
        by anybody."""

    def stats(self) -> dict[str, int]:
        """Return how many of the store's bytes are page-locked, where pages are."""

    def close(self) -> None:
        """Wait for all copies and release what they use."""


class _Begun(NamedTuple):
    """Begun copies: when the emulated link has moved them, and in how many seconds."""

    copies: Sequence[TileCopy]
    due: float
    seconds: float


class HostCopier:
    """Host to host: the slab of device `cpu` is a shared-memory segment. Bytes are copied by `ready`, which
    on an emulated link returns when they would have moved: other work goes on meanwhile."""

    ahead = 1

    def __init__(self, store: Store, slab: Slab, link: EmulatedLink | None = None) -> None:
        self._store, self._slab, self._link = store, slab, link
        self.copied = 0, 0.0

    def begin(self, copies: Sequence[TileCopy]) -> _Begun:
        if self._link is None:
            return _Begun(copies, 0.0, 0.0)
        return _Begun(copies, *self._link.occupy(sum(copy.size(self._store) for copy in copies)))

    def ready(self, begun: _Begun) -> None:
        began, tiles = time.perf_counter(), 0
        for copy in begun.copies:
            source, slot = copy.source(self._store), self._slab.slot(copy.slot)
            if copy.channels is None:
                slot[:] = source
                tiles += 1
            else:
                size = source.shape[1]
                first = copy.at * size
                take_records(source, copy.channels, slot[first : first + len(copy.channels) * size])
        seconds = max(begun.seconds, time.perf_counter() - began)
        if self._link is not None:
            sleep_until(begun.due, self._link.tick)
        if tiles:
            self.copied = self.copied[0] + tiles, self.copied[1] + seconds

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self._slab.close()


def take_records(records: Bytes, chosen: I32Vector, out: Bytes) -> None:
    """Write the chosen ones of records [n, bytes] to `out`, one after the other; other threads may run
    meanwhile. The chosen ones exist: whoever orders them has checked that."""
    np.take(records, chosen, axis=0, out=out.reshape(len(chosen), -1), mode="clip")
