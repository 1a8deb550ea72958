"""The coordinator's link to its prefetcher: fetch orders and their landings.

While the prefetcher is being restarted the link is not `up`; orders of the one that exited are final.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any

from pipeline.arrays import IntArray
from pipeline.errors import PeerLost
from pipeline.experts.landings import Landings
from pipeline.experts.peers import ChildServerSocket
from pipeline.experts.progress import CopyProgress, LockProgress, ProgressWatch
from protocol.messages import (
    AttachSlab,
    CancelFetch,
    DemandFetch,
    Fetch,
    Fetched,
    Gather,
    PagesLocked,
    Ready,
    SlabAttached,
    WorkerDied,
)
from shm.control import ControlLine
from workers.copy_trial import Kind

log = logging.getLogger(__name__)

DEMANDED, PREDICTED, PLACED = 0, 1, 2  # urgency; smaller overtakes
STALL_LIMIT = 3.0  # seconds without a tile after which a prefetcher with orders is hung
THREAD_STALL_LIMIT = 10.0  # of a thread, which nobody replaces; the landings' guard may release it before
ATTACH_LIMIT = 60.0  # the same while it maps the slab
# For so long a wait looks at flags again and again, and gives its core, which is the coordinator's where a
# GPU computes, to any thread that wants it: behind the last tile's kernel the device is idle until that
# landing is seen. Then it sleeps between two looks.
WATCH_SECONDS = 5e-3
LOOKS = 32  # at flags, for each at messages


@dataclass
class Order:
    """A Fetch or Gather and its progress, counted in tiles or in channels."""

    id: int
    layer: int
    expert: int
    lo: int  # the first tile of a Fetch
    slots: list[int]
    urgency: int
    channels: IntArray | None = None  # of a Gather
    landed: int = 0  # tiles [lo, lo + landed), or the first of the channels, are in their slots
    final: bool = False  # nothing else will land
    cancelled: bool = False
    seconds: float = 0.0  # of copying
    reported: int = 0  # as `landed`, as far as messages say it
    numbers: tuple[int, ...] = ()  # of each slot's landing flag, where the prefetcher writes flags
    # what it will bring; less than its size where it was cancelled or truncated
    reach: int = field(init=False)

    def __post_init__(self) -> None:
        self.reach = self.size

    @property
    def size(self) -> int:
        """Its tiles or channels."""
        return len(self.slots if self.channels is None else self.channels)


class FetchLink:
    """Sends orders and tracks their progress. Used by the engine's thread alone."""

    def __init__(
        self,
        socket: ChildServerSocket,
        slab: AttachSlab | None,
        line: ControlLine | CopyProgress | None,
        *,
        index: int = 0,
        kind: Kind = "process",
        landings: Landings | None = None,
        stall_limit: float = STALL_LIMIT,
        attach_limit: float = ATTACH_LIMIT,
    ) -> None:
        """`slab`: the slab that every new prefetcher maps; None for a prefetcher thread, which has it.
        `line`: the prefetcher's progress counter; None: it is not measured. `index`: which prefetcher it is,
        of those that the socket knows. `kind`: of one that maps the slab. `landings`: of a slab with flags; a
        thread writes them. Limits are seconds without progress."""
        self.kind: Kind = "thread" if slab is None else kind
        self.notes: tuple[str, ...] = ()  # of the latest prefetcher
        self.refusal = ""  # why it cannot map the slab
        self._socket = socket
        self._index = index
        self._slab = slab
        self._line = line
        self._stall_limit = stall_limit
        self._attach_limit = attach_limit
        self._attaching = False
        self._landings = landings
        self._flags = slab is None  # the prefetcher writes flags, if there are any
        self.locks = LockProgress()
        self.copied = (0, 0.0)  # tiles so far, and the seconds in which the prefetcher copied them
        self._moving_since = 0.0  # the present tile, as far as it is known here
        self._next = 0
        self._orders: dict[int, Order] = {}
        self._watch = ProgressWatch()

    @property
    def up(self) -> bool:
        """A prefetcher has mapped the slab and takes orders."""
        return self._socket.is_up(self._index)

    @property
    def landings(self) -> Landings | None:
        """Of orders that are sent now; None where their landings are only reported."""
        usable = self._flags and self._landings is not None and self._landings.trusted
        return self._landings if usable else None

    def wait_up(self, limit: float) -> bool:
        """Wait until the link is up; False after `limit` seconds, or once the slab cannot be mapped. It is
        not up where an exit was reported before this call."""
        self.update(0)
        deadline = time.monotonic() + limit
        while not self.up and not self.refusal and time.monotonic() < deadline:
            self.update(100)
        return self.up

    def order(self, layer: int, expert: int, lo: int, slots: list[int], urgency: int) -> Order:
        """Order tiles [lo, lo + len(slots)) of an expert. While the link is not up the order is final at
        once: a prefetcher must not get an order before it has mapped the slab."""
        order = Order(self._next, layer, expert, lo, slots, urgency)
        if self.up and self.landings is not None:
            order.numbers = tuple(map(self.landings.issue, slots))
        return self._send(order, Fetch(order.id, layer, expert, lo, tuple(slots), urgency, order.numbers))

    def gather(self, layer: int, expert: int, channels: IntArray, slots: list[int], urgency: int) -> Order:
        """Order channels of an expert (ascending), as many to each slot as a tile has. As `order`."""
        order = Order(self._next, layer, expert, 0, slots, urgency, channels)
        return self._send(order, Gather(order.id, layer, expert, channels, tuple(slots), urgency))

    def _send(self, order: Order, message: Fetch | Gather) -> Order:
        self._next += 1
        order.final = not self.up
        if order.final:
            return order
        if not self._orders:
            self._moving_since = time.monotonic()
        self._orders[order.id] = order
        self._socket.send(self._index, message)
        return order

    def cancel(self, order: Order) -> None:
        """Ask the prefetcher to truncate an order; it stays open until it is final."""
        if not (order.cancelled or order.final):
            order.cancelled = True
            order.reach = order.landed
            self._socket.send(self._index, CancelFetch(order.id))

    def demand(self, order: Order, tiles: int) -> None:
        """The first `tiles` tiles of the order (or channels) are demanded now: they move before all else, and
        those after them, but for one that is being copied, not at all."""
        if not order.final:
            order.urgency = DEMANDED
            order.reach = max(tiles, order.landed)
            self._socket.send(self._index, DemandFetch(order.id, tiles))

    def stats(self) -> dict[str, Any]:
        """What the prefetcher is, how its landings are known, and the store's page-locked bytes."""
        landings = "messages" if self.landings is None else "flags"
        return {"kind": self.kind, "landings": landings} | self.locks.stats()

    def under_way(self) -> list[Order]:
        """The orders of which tiles will land, in the order in which the prefetcher takes them."""
        live = [o for o in self._orders.values() if o.channels is None and o.landed < o.reach]
        return sorted(live, key=lambda order: (order.urgency, order.id))

    def moving_for(self) -> float:
        """Seconds since the present tile began to move, as far as it is known here."""
        return time.monotonic() - self._moving_since

    def update(self, wait_ms: int) -> None:
        """Apply the messages that are here; wait at most `wait_ms` for the first."""
        messages = self._socket.receive(wait_ms)
        for index, message in messages:
            if index != self._index:
                continue
            match message:
                case Fetched(id=id) if id in self._orders:
                    self._landed(self._orders[id], message)
                case Ready() if self._slab is not None:
                    self._attaching = True
                    self._socket.send(self._index, self._slab)
                case Ready():
                    self._attached(message.incarnation)
                case SlabAttached(error=""):
                    self._flags = message.flags
                    self.notes = message.notes
                    for note in message.notes:
                        log.info(note)
                    self._attached(message.incarnation)
                case PagesLocked():
                    self.locks.report(message.locked, message.total)
                case SlabAttached():
                    self._attaching, self.refusal = False, message.error
                case WorkerDied():
                    self._attaching = False
                    self._watch.reset()
                    for order in self._orders.values():
                        order.final = True
                    self._orders.clear()
        for order in list(self._orders.values()):
            self._read_flags(order)
        if not messages and (wait_ms or self._attaching):
            self._check_progress()

    def wait(self, order: Order, landed: int) -> None:
        """Return when `landed` tiles or channels of the order are in their slots, or it is final."""
        until = time.perf_counter() + WATCH_SECONDS
        for looks in itertools.count(1):
            if order.landed >= landed or order.final:
                return
            if not order.numbers:
                self.update(50)
            elif time.perf_counter() > until:
                self.update(1)
            elif looks % LOOKS:
                self._read_flags(order)
                os.sched_yield()  # time.sleep(0) may take 80 us
            else:
                self.update(0)

    def wait_reported(self) -> None:
        """Return when `copied` has all tiles that have landed: flags are ahead of reports."""
        while any(order.reported < order.landed for order in self._orders.values()):
            self.update(50)

    def _read_flags(self, order: Order) -> None:
        """Book the tiles whose flags say that they have landed."""
        there = order.landed
        for slot, number in zip(order.slots[there:], order.numbers[there:], strict=False):
            if self._landings is None or not self._landings.landed(slot, number):
                break
            there += 1
        if there > order.landed:
            self._advance(order, there)
            order.final = order.final or there == order.size  # the report that follows is for the statistics

    def _landed(self, order: Order, report: Fetched) -> None:
        if not order.reported <= report.landed <= order.size:
            self._socket.report_hung(self._index)  # its reports contradict each other: have it replaced
            return
        if report.landed > order.reported and order.channels is None:
            tiles, seconds = self.copied
            self.copied = tiles + report.landed - order.reported, seconds + report.seconds - order.seconds
        order.reported, order.seconds = report.landed, report.seconds
        if report.landed > order.landed:
            self._advance(order, report.landed)
        order.final = order.final or report.final
        if report.final:
            del self._orders[order.id]

    def _advance(self, order: Order, landed: int) -> None:
        if order.channels is None:
            self._moving_since = time.monotonic()
        order.landed, order.reach = landed, max(order.reach, landed)

    def _attached(self, incarnation: int) -> None:
        self._attaching = False
        self._watch.reset()
        self._socket.mark_up(self._index, incarnation)

    def _check_progress(self) -> None:
        if self._line is None or not (self._orders or self._attaching):
            self._watch.reset()
        elif self._watch.stalled(self._line.ticks) > (self._stall_limit if self.up else self._attach_limit):
            if self._slab is None:
                raise PeerLost(f"the prefetcher's thread has made no progress for {self._stall_limit:g} s")
            self._socket.report_hung(self._index)
