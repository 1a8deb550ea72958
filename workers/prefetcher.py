"""Process entry: the prefetcher of one device. It receives orders, copies from the store to slab slots, and
reports each landing once its copy has completed.

An order is for whole tiles or for chosen channels. Orders wait by urgency and then by age, and are taken tile
by tile, or chunk by chunk of channels. Tiles and channels land in the order's order, and a cancelled order is
truncated, so what has landed of it is always a prefix. A landed tile is reported at once, channels when their
slot is full or the order ends. The order of the present copy stands in the process's line of the control
segment, so that who demands its tiles knows that one of them moves.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from protocol.messages import AttachSlab, CancelFetch, Fetch, Fetched, SlabAttached
from shm.control import ControlLine, ControlSegment
from shm.errors import ShmError
from shm.store import Store
from workers.child_endpoint import POLL_LIMIT_MS, ChildEndpoint
from workers.copiers import Copier, EmulatedLink, TileCopy
from workers.cuda import CudaError
from workers.cuda_copier import open_copier
from workers.lifetime import pin

log = logging.getLogger(__name__)

# Of channels that are gathered for one copy: FloE's 50 of Mixtral, in bf16. Fewer cost more in the starts of
# copies, more let a demand wait.
CHUNK_BYTES = 50 * 16384


@dataclass(order=True)
class Order:
    """A Fetch that is being carried out, counted in tiles or channels. Ordered by urgency, then age."""

    urgency: int
    age: int
    fetch: Fetch = field(compare=False)
    wanted: int = field(compare=False)  # fewer than those of `fetch` once it is truncated
    started: int = field(default=0, compare=False)  # with a copy under way or completed
    landed: int = field(default=0, compare=False)
    seconds: float = field(default=0.0, compare=False)

    @property
    def exhausted(self) -> bool:
        """Returns whether all tiles of the order that will land have landed."""
        return self.started >= self.wanted and self.landed == self.started


class CopyLoop:
    """Copies tiles for one coordinator."""

    def __init__(
        self, peer: ChildEndpoint, store: Store, line: ControlLine, link: EmulatedLink | None = None
    ) -> None:
        """`line`: this process's, for its progress and its present order."""
        self._peer, self._store, self._line, self._link = peer, store, line, link
        self._copier: Copier | None = None
        self._orders: dict[int, Order] = {}  # those without a final Fetched so far
        self._queue: list[Order] = []  # heap
        self._running: deque[tuple[Order, int, Any]] = deque()  # how many of the order's, and their copy
        self._age = 0

    def serve(self) -> None:
        """Serve orders until Shutdown."""
        while not self._peer.stopped:
            limit_ms = self._wait_ms()
            for message in self._peer.receive(wait=limit_ms > 0, limit_ms=limit_ms):
                self._accept(message)
            self._line.tick()
            if self._copier is not None:
                self._start_copies(self._copier)
                if self._running:
                    self._finish_copy(self._copier)
        if self._copier is not None:
            self._copier.close()

    def _wait_ms(self) -> int:
        """Returns how long to wait for a message: while demanded tiles occupy an emulated link, nothing is
        begun."""
        if self._running or (self._queue and self._link is None):
            return 0
        if not self._queue or self._link is None:
            return POLL_LIMIT_MS
        busy = self._link.other_until - time.perf_counter()
        return min(POLL_LIMIT_MS, max(0, int(busy * 1000)))

    def _accept(self, message: object) -> None:
        match message:
            case AttachSlab():
                try:
                    self._copier = open_copier(message, self._store, self._link)
                except CudaError as e:  # another process's GPU memory cannot be mapped everywhere
                    self._peer.send(SlabAttached(self._peer.generation, error=str(e)))
                    return
                self._peer.send(SlabAttached(self._peer.generation))
            case Fetch():
                self._check(message)
                order = Order(
                    message.urgency, self._age, message, len(message.channels) or len(message.slots)
                )
                self._age += 1
                self._orders[message.id] = order
                heapq.heappush(self._queue, order)
            case CancelFetch():
                self._truncate(self._orders.get(message.id))
            case _:
                log.warning("unexpected %s", type(message).__name__)

    def _check(self, fetch: Fetch) -> None:
        """Raises IndexError for channels that do not exist or find no room."""
        shape, channels = self._store.layout.shape, fetch.channels
        outside = len(channels) and not 0 <= int(channels.min()) <= int(channels.max()) < shape.padded
        if outside or len(channels) > len(fetch.slots) * shape.tile:
            raise IndexError(f"an order of {len(channels)} channels to {len(fetch.slots)} slots")

    def _truncate(self, order: Order | None) -> None:
        if order is not None:
            order.wanted = order.started
            if order.exhausted:
                self._report(order)  # now, because the coordinator may be waiting for it

    def _start_copies(self, copier: Copier) -> None:
        while self._queue and len(self._running) < copier.ahead:
            order = self._queue[0]
            if order.started >= order.wanted:
                heapq.heappop(self._queue)
                if order.exhausted:
                    self._report(order)  # it had no tiles
                continue
            if self._link is not None and not self._link.free_soon():
                return
            self._line.begin(order.fetch.id)
            count, copy = self._next_copy(order)
            order.started += count
            self._running.append((order, count, copier.begin([copy])))

    def _next_copy(self, order: Order) -> tuple[int, TileCopy]:
        """The order's next tile or chunk of channels, and how many these are."""
        fetch, index = order.fetch, order.started
        if not len(fetch.channels):
            return 1, TileCopy(fetch.layer, fetch.expert, fetch.lo + index, fetch.slots[index])
        layout = self._store.layout
        slot, place = divmod(index, layout.shape.tile)
        chunk = max(1, CHUNK_BYTES * layout.shape.tile // layout.tile_bytes)
        count = min(chunk, order.wanted - index, layout.shape.tile - place)
        channels = fetch.channels[index : index + count]
        return count, TileCopy(fetch.layer, fetch.expert, 0, fetch.slots[slot], channels, place)

    def _finish_copy(self, copier: Copier) -> None:
        order, count, begun = self._running.popleft()
        _, before = copier.copied
        copier.ready(begun)
        order.seconds += copier.copied[1] - before
        landed = order.landed
        order.landed += count
        channels = self._store.layout.shape.tile if len(order.fetch.channels) else 1
        if order.exhausted or order.landed // channels > landed // channels:
            self._report(order)

    def _report(self, order: Order) -> None:
        fetch = order.fetch
        if fetch.id not in self._orders:
            return  # its final report has been sent
        if order.exhausted:
            del self._orders[fetch.id]
            if self._line.seq == fetch.id:
                self._line.end()  # before the report, after which nothing of it moves
        report = Fetched(fetch.id, self._peer.generation, order.landed, order.exhausted, order.seconds)
        self._peer.send(report)


def main(config: dict[str, Any]) -> int:
    """Run the prefetcher; returns its exit code."""
    note = pin(config["cores"])
    peer = ChildEndpoint(config, "fetch.sock")
    try:
        control = ControlSegment.attach(config["control"])
        index, gbps = config["index"], config["link_gbps"]
        line = control.line("prefetcher", index)
        line.end()
        link = None if gbps is None else EmulatedLink(gbps, line, control.line("coordinator", index))
        with Store.attach(config["store"], config["fingerprint"], writable=True) as store:
            peer.announce((note,) if note else ())
            CopyLoop(peer, store, line, link).serve()
        control.close()
    except (ShmError, CudaError) as e:
        peer.fail(str(e))
        return 1
    finally:
        peer.close()
    return 0
