"""Orders to the prefetcher and their landings: the coordinator's end of one socket.

The prefetcher may be gone for a while: then the link is not `up`, and what was ordered is final where it
stood.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pipeline.experts.peers import ChildServerSocket, Watch
from protocol.messages import AttachSlab, CancelFetch, Fetch, Fetched, Ready, SlabAttached, WorkerDied
from shm.control import ControlLine

DEMANDED, PREDICTED, PLACED = 0, 1, 2  # urgency; smaller overtakes
STALL_LIMIT = 3.0  # seconds without a tile after which the prefetcher hangs
ATTACH_LIMIT = 60.0  # the same while it maps the slab and locks the store's pages


@dataclass
class Order:
    """A Fetch and what is known of it."""

    id: int
    layer: int
    expert: int
    lo: int
    slots: list[int]
    urgency: int
    landed: int = 0  # tiles [lo, lo + landed) are in their slots
    final: bool = False
    cancelled: bool = False
    seconds: float = field(default=0.0)


class FetchLink:
    """Sends orders and keeps their state up to date. Used by the engine's thread alone."""

    def __init__(self, socket: ChildServerSocket, slab: AttachSlab | None, line: ControlLine | None) -> None:
        """`slab`: what each prefetcher that comes is to map; None: it has it already. `line`: where it counts
        its progress; None: it is a thread of this process."""
        self.up = False
        self.notes: tuple[str, ...] = ()  # of the latest prefetcher
        self._socket = socket
        self._slab = slab
        self._line = line
        self._attaching = False
        self._next = 0
        self._orders: dict[int, Order] = {}
        self._watch = Watch()

    def wait_up(self, limit: float) -> bool:
        """Wait until there is a prefetcher that has mapped the slab; False after `limit` seconds."""
        deadline = time.monotonic() + limit
        while not self.up and time.monotonic() < deadline:
            self.update(100)
        return self.up

    def order(self, layer: int, expert: int, lo: int, slots: list[int], urgency: int) -> Order:
        """Ask for tiles [lo, lo + len(slots)) of an expert. The link must be up."""
        order = Order(self._next, layer, expert, lo, slots, urgency)
        self._next += 1
        self._orders[order.id] = order
        self._socket.send(0, Fetch(order.id, layer, expert, lo, tuple(slots), urgency))
        return order

    def cancel(self, order: Order) -> None:
        """Ask to truncate an order; it stays open until it is final."""
        if not (order.cancelled or order.final):
            order.cancelled = True
            self._socket.send(0, CancelFetch(order.id))

    def update(self, wait_ms: int) -> None:
        """Take in what has come; wait at most `wait_ms` for something. Orders of a prefetcher that has died
        become final."""
        messages = self._socket.receive(wait_ms)
        for _, message in messages:
            match message:
                case Fetched(id=id) if id in self._orders:
                    self._landed(self._orders[id], message)
                case Ready() if self._slab is not None:
                    self._attaching = True
                    self._socket.send(0, self._slab)
                case Ready():
                    self._begin()
                case SlabAttached():
                    self.notes = message.notes
                    self._begin()
                case WorkerDied():
                    self.up = self._attaching = False
                    self._watch.rest()
                    for order in self._orders.values():
                        order.final = True
                    self._orders.clear()
        if not messages and (wait_ms or self._attaching):
            self._look_whether_it_hangs()

    def wait(self, order: Order, landed: int) -> None:
        """Return when `landed` tiles of the order are there, or it is final."""
        while order.landed < landed and not order.final:
            self.update(50)

    def _landed(self, order: Order, report: Fetched) -> None:
        if not order.landed <= report.landed <= len(order.slots):
            self._socket.hung(0)  # it does not know what it does; its successor will
            return
        order.landed, order.final, order.seconds = report.landed, report.final, report.seconds
        if order.final:
            del self._orders[order.id]

    def _begin(self) -> None:
        self.up, self._attaching = True, False
        self._watch.rest()
        self._socket.up(0)

    def _look_whether_it_hangs(self) -> None:
        if self._line is None or not (self._orders or self._attaching):
            self._watch.rest()
        elif self._watch.stalled(self._line.ticks) > (STALL_LIMIT if self.up else ATTACH_LIMIT):
            self._socket.hung(0)
