"""Orders to the prefetcher and their landings: the coordinator's end of one socket."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pipeline.errors import PeerLost
from pipeline.peers import PeerSocket
from protocol.messages import AttachSlab, CancelFetch, Fetch, Fetched, SlabAttached

DEMANDED, PLACED = 0, 2  # urgency; smaller overtakes


@dataclass
class Order:
    """A Fetch and what is known of it."""

    id: int
    layer: int
    expert: int
    lo: int
    slots: list[int]
    landed: int = 0  # tiles [lo, lo + landed) are in their slots
    final: bool = False
    cancelled: bool = False
    seconds: float = field(default=0.0)


class FetchLink:
    """Sends orders and keeps their state up to date. Used by the engine's thread alone."""

    def __init__(self, socket: PeerSocket) -> None:
        self._socket = socket
        self._next = 0
        self._orders: dict[int, Order] = {}

    def wait_ready(self, limit: float) -> None:
        """Wait for the prefetcher to announce itself. Raises PeerLost."""
        self._socket.wait_ready(1, limit)

    def attach(self, slab: AttachSlab, limit: float) -> tuple[str, ...]:
        """Have the prefetcher map the slab. Returns its notes. Raises PeerLost."""
        self._socket.send(0, slab)
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            for _, message in self._socket.receive(100):
                if isinstance(message, SlabAttached):
                    return message.notes
        raise PeerLost(f"the prefetcher did not attach the slab within {limit:.0f} s")

    def order(self, layer: int, expert: int, lo: int, slots: list[int], urgency: int) -> Order:
        """Ask for tiles [lo, lo + len(slots)) of an expert."""
        order = Order(self._next, layer, expert, lo, slots)
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
        """Take in what the prefetcher has reported; wait at most `wait_ms` for something."""
        for _, message in self._socket.receive(wait_ms):
            if isinstance(message, Fetched) and message.id in self._orders:
                order = self._orders[message.id]
                order.landed, order.final, order.seconds = message.landed, message.final, message.seconds
                if order.final:
                    del self._orders[order.id]

    def wait(self, order: Order, landed: int, limit: float) -> None:
        """Return when `landed` tiles of the order are there, or it is final. Raises PeerLost after `limit`
        seconds without any landing."""
        deadline = time.monotonic() + limit
        known = order.landed
        while order.landed < landed and not order.final:
            self.update(50)
            if order.landed > known:
                known, deadline = order.landed, time.monotonic() + limit
            elif time.monotonic() > deadline:
                raise PeerLost(f"the prefetcher has copied nothing for {limit:.0f} s")
