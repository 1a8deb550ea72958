"""Carries orders to the prefetch process, and its landings back.

While the prefetcher is being restarted the link is not `up`; orders of the one that exited are final.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pipeline.arrays import IntArray
from pipeline.experts.mover import Key, Link, Order
from pipeline.experts.peers import ChildServerSocket, ProgressWatch
from protocol.messages import AttachSlab, CancelFetch, Fetch, Fetched, Ready, SlabAttached, WorkerDied
from shm.control import ControlLine

log = logging.getLogger(__name__)

Place = Callable[[int, int], tuple[int, int]]

STALL_LIMIT = 3.0  # seconds without a tile after which a prefetcher with orders is hung
ATTACH_LIMIT = 60.0  # the same while it maps the slab
NO_CHANNELS: IntArray = np.zeros(0, np.int32)


class PrefetchLink(Link):
    """Sends orders and tracks their progress. Used by the engine's thread alone."""

    def __init__(
        self,
        socket: ChildServerSocket,
        slab: AttachSlab | None,
        line: ControlLine,
        index: int = 0,
        place: Place = lambda layer, expert: (layer, expert),
    ) -> None:
        """`slab`: what every new prefetcher maps; None where it cannot be shared, so that the link stays
        down. `line`: the prefetcher's, with its progress and the order that it moves. `index`: the device's,
        and so the prefetcher's. `place`: as Store.place."""
        self.refusal = "" if slab is not None else "the slab cannot be shared"  # why it is not mapped
        self.copied = (0, 0.0)  # tiles so far, and the seconds in which the prefetcher copied them
        self._socket, self._slab, self._line, self._index = socket, slab, line, index
        self._place = place
        self._attaching = False
        self._next = 0
        self._orders: dict[int, Order] = {}
        self._seconds: dict[int, float] = {}  # of copying, by order
        self._watch = ProgressWatch()

    @property
    def up(self) -> bool:
        """A prefetcher has mapped the slab and takes orders."""
        return self._socket.is_up(self._index)

    @property
    def keys(self) -> set[Key]:
        return {order.key for order in self._orders.values()}

    def wait_up(self, limit: float) -> bool:
        """Wait until the link is up; False after `limit` seconds, or once the slab cannot be mapped. It is
        not up where an exit was reported before this call."""
        self.update(0)
        deadline = time.monotonic() + limit
        while not self.up and not self.refusal and time.monotonic() < deadline:
            self.update(100)
        return self.up

    def order(
        self,
        layer: int,
        expert: int,
        lo: int,
        slots: list[int],
        urgency: int,
        channels: IntArray | None = None,
    ) -> Order:
        """Order tiles or channels, as Link says. While the link is not up the order is final at once: a
        prefetcher must not get an order before it has mapped the slab."""
        order = Order(self._next, layer, expert, lo, slots, urgency, channels, final=not self.up)
        self._next += 1
        if order.final:
            return order
        self._orders[order.id] = order
        chosen = NO_CHANNELS if channels is None else channels
        place = self._place(layer, expert)
        self._socket.send(self._index, Fetch(order.id, *place, lo, tuple(slots), urgency, chosen))
        return order

    def cancel(self, order: Order) -> None:
        """Ask the prefetcher to truncate an order; it stays open until it is final."""
        if not order.final:
            self._socket.send(self._index, CancelFetch(order.id))

    def moving(self, order: Order) -> bool:
        """Return whether the prefetcher is copying a part of this order."""
        return not order.final and self._line.seq == order.id

    def update(self, wait_ms: int) -> None:
        """Apply the messages that are here; wait at most `wait_ms` for the first."""
        messages = self._socket.receive_of(self._index, wait_ms)
        for message in messages:
            match message:
                case Fetched(id=id) if id in self._orders:
                    self._landed(self._orders[id], message)
                case Ready() if self._slab is not None:
                    self._attaching = True
                    self._socket.send(self._index, self._slab)
                case SlabAttached(error=""):
                    self._attaching = False
                    self._watch.reset()
                    self._socket.mark_up(self._index, message.generation)
                case SlabAttached():
                    self._attaching, self.refusal = False, message.error
                case WorkerDied():
                    self._attaching = False
                    self._watch.reset()
                    self._line.end()
                    for order in self._orders.values():
                        order.final = True
                    self._orders.clear()
                    self._seconds.clear()
        if not messages:
            self._check_progress()

    def wait(self, order: Order, landed: int) -> None:
        """Return when `landed` tiles or channels of the order are in their slots, or it is final: a
        prefetcher that makes no progress is replaced."""
        while order.landed < landed and not order.final:
            self.update(50)

    def _landed(self, order: Order, report: Fetched) -> None:
        if not order.landed <= report.landed <= order.size:
            self._socket.report_hung(self._index)  # its reports contradict each other: have it replaced
            return
        if report.landed > order.landed and order.channels is None:
            tiles, seconds = self.copied
            before = self._seconds.get(order.id, 0.0)
            self.copied = tiles + report.landed - order.landed, seconds + report.seconds - before
            self._seconds[order.id] = report.seconds
        order.landed, order.final = report.landed, report.final
        if report.final:
            del self._orders[order.id]
            self._seconds.pop(order.id, None)

    def stats(self) -> dict[str, Any]:
        """Return whether tiles are prefetched, or why not."""
        return {"up": self.up} | ({"refusal": self.refusal} if self.refusal else {})

    def _check_progress(self) -> None:
        if not (self._orders or self._attaching):
            self._watch.reset()
        elif self._watch.stalled(self._line.ticks) > (STALL_LIMIT if self.up else ATTACH_LIMIT):
            self._socket.report_hung(self._index)
