"""The coordinator's link to its prefetcher: fetch orders and their landings.

While the prefetcher is being restarted the link is not `up`; orders of the one that exited are final.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from pipeline.experts.peers import ChildServerSocket
from pipeline.experts.progress import ProgressWatch
from protocol.messages import (
    AttachSlab,
    CancelFetch,
    DemandFetch,
    Fetch,
    Fetched,
    Ready,
    SlabAttached,
    WorkerDied,
)
from shm.control import ControlLine

DEMANDED, PREDICTED, PLACED = 0, 1, 2  # urgency; smaller overtakes
STALL_LIMIT = 3.0  # seconds without a tile after which a prefetcher with orders is hung
ATTACH_LIMIT = 60.0  # the same while it maps the slab and page-locks the store


@dataclass
class Order:
    """A Fetch and its progress."""

    id: int
    layer: int
    expert: int
    lo: int
    slots: list[int]
    urgency: int
    landed: int = 0  # tiles [lo, lo + landed) are in their slots
    final: bool = False  # no other tile will land
    cancelled: bool = False


class FetchLink:
    """Sends orders and tracks their progress. Used by the engine's thread alone."""

    def __init__(
        self,
        socket: ChildServerSocket,
        slab: AttachSlab | None,
        line: ControlLine | None,
        *,
        stall_limit: float = STALL_LIMIT,
        attach_limit: float = ATTACH_LIMIT,
    ) -> None:
        """`slab`: the slab that every new prefetcher maps; None for a prefetcher thread, which has it.
        `line`: the prefetcher's progress counter; None for a thread. Limits are seconds without progress."""
        self.notes: tuple[str, ...] = ()  # of the latest prefetcher
        self._socket = socket
        self._slab = slab
        self._line = line
        self._stall_limit = stall_limit
        self._attach_limit = attach_limit
        self._attaching = False
        self._next = 0
        self._orders: dict[int, Order] = {}
        self._watch = ProgressWatch()

    @property
    def up(self) -> bool:
        """A prefetcher has mapped the slab and takes orders."""
        return self._socket.is_up(0)

    def wait_up(self, limit: float) -> bool:
        """Wait until the link is up; False after `limit` seconds."""
        deadline = time.monotonic() + limit
        while not self.up and time.monotonic() < deadline:
            self.update(100)
        return self.up

    def order(self, layer: int, expert: int, lo: int, slots: list[int], urgency: int) -> Order:
        """Order tiles [lo, lo + len(slots)) of an expert. While the link is not up the order is final at
        once: a prefetcher must not get an order before it has mapped the slab."""
        order = Order(self._next, layer, expert, lo, slots, urgency, final=not self.up)
        self._next += 1
        if order.final:
            return order
        self._orders[order.id] = order
        self._socket.send(0, Fetch(order.id, layer, expert, lo, tuple(slots), urgency))
        return order

    def cancel(self, order: Order) -> None:
        """Ask the prefetcher to truncate an order; it stays open until it is final."""
        if not (order.cancelled or order.final):
            order.cancelled = True
            self._socket.send(0, CancelFetch(order.id))

    def demand(self, order: Order, tiles: int) -> None:
        """The order's first `tiles` tiles are demanded now: they move before all that is not, and those after
        them, but for one that is being copied, not at all."""
        if not order.final:
            order.urgency = DEMANDED
            self._socket.send(0, DemandFetch(order.id, tiles))

    def update(self, wait_ms: int) -> None:
        """Apply the messages that are here; wait at most `wait_ms` for the first."""
        messages = self._socket.receive(wait_ms)
        for _, message in messages:
            match message:
                case Fetched(id=id) if id in self._orders:
                    self._landed(self._orders[id], message)
                case Ready() if self._slab is not None:
                    self._attaching = True
                    self._socket.send(0, self._slab)
                case Ready():
                    self._attached(message.incarnation)
                case SlabAttached():
                    self.notes = message.notes
                    self._attached(message.incarnation)
                case WorkerDied():
                    self._attaching = False
                    self._watch.reset()
                    for order in self._orders.values():
                        order.final = True
                    self._orders.clear()
        if not messages and (wait_ms or self._attaching):
            self._check_progress()

    def wait(self, order: Order, landed: int) -> None:
        """Return when `landed` tiles of the order are in their slots, or it is final."""
        while order.landed < landed and not order.final:
            self.update(50)

    def _landed(self, order: Order, report: Fetched) -> None:
        if not order.landed <= report.landed <= len(order.slots):
            self._socket.report_hung(0)  # its reports contradict each other: have it replaced
            return
        order.landed, order.final = report.landed, report.final
        if order.final:
            del self._orders[order.id]

    def _attached(self, incarnation: int) -> None:
        self._attaching = False
        self._watch.reset()
        self._socket.mark_up(0, incarnation)

    def _check_progress(self) -> None:
        if self._line is None or not (self._orders or self._attaching):
            self._watch.reset()
        elif self._watch.stalled(self._line.ticks) > (self._stall_limit if self.up else self._attach_limit):
            self._socket.report_hung(0)
