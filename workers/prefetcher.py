"""Process entry: the prefetcher. It receives orders, copies from the store to slab slots, and reports each
landing once its copy has completed.

An order is for whole tiles (Fetch) or for chosen channels (Gather). Orders wait by urgency and then by age,
and are taken tile by tile, or chunk by chunk of channels: a demanded order overtakes a predicted one between
two of these, and so does a predicted one that is demanded now. Tiles and channels land in the order's order,
and a cancelled order is truncated, so what has landed of it is always a prefix. A landed tile is reported at
once, channels when their slot is full or the order ends.

A demanded tile waits for the copies that are under way: so these are one other tile at most, or on a GPU's
link as many small ones as move in 150 us (`workers/cuda_copier.py`). Chunks are small: several may always be
under way.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol.messages import (
    AttachSlab,
    CancelFetch,
    DemandFetch,
    Fetch,
    Fetched,
    Gather,
    PagesLocked,
    SlabAttached,
)
from shm.control import ControlSegment
from shm.errors import ShmError
from shm.landing_flags import NONE
from shm.store import Store
from workers import mps
from workers.child_endpoint import ChildEndpoint
from workers.copiers import Copier, Tick
from workers.cuda import CudaError
from workers.cuda_copier import open_copier
from workers.lifetime import pin

log = logging.getLogger(__name__)

DEMANDED = 0  # urgency
# Of channels that are gathered for one copy: FloE's 50 of Mixtral, in bf16. Fewer cost more in the starts of
# copies, more let a demanded order wait.
CHUNK_BYTES = 50 * 16384


@dataclass(order=True)
class Order:
    """A Fetch or Gather that is being carried out, counted in tiles or channels. Ordered by urgency, then
    age."""

    urgency: int
    age: int
    fetch: Fetch | Gather = field(compare=False)
    wanted: int = field(compare=False)  # fewer than those of `fetch` once it is truncated
    started: int = field(default=0, compare=False)  # with a copy under way or completed
    landed: int = field(default=0, compare=False)
    seconds: float = field(default=0.0, compare=False)

    @property
    def exhausted(self) -> bool:
        return self.started >= self.wanted


class CopyLoop:
    """Copies tiles for one coordinator: in a process of its own, or in a thread of the coordinator."""

    def __init__(self, peer: ChildEndpoint, store: Store, link_gbps: float | None, tick: Tick) -> None:
        """`tick` is called with every progress."""
        self._tick = tick
        self._peer = peer
        self._store = store
        self._link_gbps = link_gbps
        self._copier: Copier | None = None
        self._notes: tuple[str, ...] = ()  # that the coordinator knows
        self._locked = (0, 0)  # the same
        self._orders: dict[int, Order] = {}  # those without a final Fetched so far
        self._queue: list[Order] = []  # heap
        self._running: deque[tuple[Order, int, float]] = deque()  # how many of the order's, since when
        self._age = 0
        self._copied_at = 0.0  # when the last copy completed

    def serve(self) -> None:
        """Serve orders until Shutdown."""
        while not self._peer.stopped:
            busy = bool(self._queue or self._running)
            for message in self._peer.receive(wait=not busy):
                self._accept(message)
            self._tick()
            self._start_copies()
            if self._running:
                self._finish_copies()
            if self._copier is not None and self._copier.notes != self._notes:
                self._announce(self._copier)
            if self._copier is not None and self._copier.locked != self._locked:
                self._locked = self._copier.locked
                self._peer.send(PagesLocked(self._peer.incarnation, *self._locked))
        if self._copier is not None:
            self._copier.close()

    def attach(self, copier: Copier) -> None:
        """Use this copier; for the coordinator's thread, which has the slab in its address space."""
        self._copier = copier

    def _accept(self, message: object) -> None:
        match message:
            case AttachSlab():
                try:
                    copier = open_copier(message, self._store, self._link_gbps, self._tick)
                except CudaError as e:  # another process's GPU memory cannot be mapped everywhere
                    self._peer.send(SlabAttached(self._peer.incarnation, error=str(e)))
                    return
                self.attach(copier)
                self._announce(copier)
            case Fetch():
                if len(message.numbers) not in (0, len(message.slots)):
                    raise IndexError(f"{len(message.numbers)} numbers for {len(message.slots)} slots")
                self._take(Order(message.urgency, self._age, message, len(message.slots)))
            case Gather():
                self._check(message)
                self._take(Order(message.urgency, self._age, message, len(message.channels)))
            case CancelFetch():
                self._truncate(self._orders.get(message.id), 0)
            case DemandFetch():
                demanded = self._orders.get(message.id)
                if demanded is not None:
                    demanded.urgency, demanded.age = DEMANDED, self._age
                    self._age += 1
                    heapq.heapify(self._queue)
                self._truncate(demanded, message.tiles)
            case _:
                log.warning("unexpected %s", type(message).__name__)

    def _announce(self, copier: Copier) -> None:
        self._notes = copier.notes
        self._peer.send(SlabAttached(self._peer.incarnation, self._notes, flags=copier.flags))

    def _take(self, order: Order) -> None:
        self._age += 1
        self._orders[order.fetch.id] = order
        heapq.heappush(self._queue, order)

    def _check(self, gather: Gather) -> None:
        """Raises IndexError for channels that do not exist or find no room."""
        shape, channels = self._store.layout.shape, gather.channels
        outside = len(channels) and not 0 <= int(channels.min()) <= int(channels.max()) < shape.padded
        if outside or len(channels) > len(gather.slots) * shape.tile:
            raise IndexError(f"an order of {len(channels)} channels to {len(gather.slots)} slots")

    def _truncate(self, order: Order | None, tiles: int) -> None:
        if order is not None:
            order.wanted = min(order.wanted, max(tiles, order.started))
            if order.exhausted and order.landed == order.started:
                self._report(order)  # now, because the coordinator may be waiting for it

    def _start_copies(self) -> None:
        while self._copier is not None and self._queue:
            order = self._queue[0]
            if order.exhausted:
                heapq.heappop(self._queue)
                if order.landed == order.started:
                    self._report(order)  # it had no tiles
                continue
            if not self._may_start(order, self._copier):
                return
            began = time.perf_counter()
            count = self._start_copy(order, self._copier)
            order.started += count
            self._running.append((order, count, began))

    def _may_start(self, order: Order, copier: Copier) -> bool:
        running = len(self._running)
        if isinstance(order.fetch, Gather):
            return running < copier.gather_depth
        return running < (copier.depth if order.urgency == DEMANDED else max(1, copier.depth - 1))

    def _start_copy(self, order: Order, copier: Copier) -> int:
        """Begin with the order's next tile or chunk. Returns the tiles or channels in it."""
        fetch, index = order.fetch, order.started
        if isinstance(fetch, Fetch):
            tile = self._store.tiles(fetch.layer, fetch.expert, fetch.lo + index, fetch.lo + index + 1)
            copier.start(tile, fetch.slots[index], fetch.numbers[index] if fetch.numbers else NONE)
            return 1
        shape = self._store.layout.shape
        slot, place = divmod(index, shape.tile)
        records = self._store.tiles(fetch.layer, fetch.expert, 0, shape.tiles).reshape(shape.padded, -1)
        chunk = max(1, CHUNK_BYTES // records.shape[1])
        count = min(chunk, order.wanted - index, shape.tile - place)
        copier.gather(records, fetch.channels[index : index + count], fetch.slots[slot], place)
        return count

    def _finish_copies(self) -> None:
        assert self._copier is not None
        count = self._copier.finish()
        now, last = time.perf_counter(), self._copied_at
        finished = [self._running.popleft() for _ in range(count)]
        # the first may have waited for the copy before it
        seconds = (now - max(finished[0][2], last)) / count
        reported = {}
        for order, number, _ in finished:
            before = order.landed
            order.landed += number
            order.seconds += seconds
            slot_full = isinstance(order.fetch, Fetch)
            if not slot_full:
                channels = self._store.layout.shape.tile
                slot_full = order.landed // channels > before // channels
            if slot_full or (order.exhausted and order.landed == order.started):
                reported[order.fetch.id] = order
        self._copied_at = now
        for order in reported.values():
            self._report(order)

    def _report(self, order: Order) -> None:
        fetch = order.fetch
        if fetch.id not in self._orders:
            return  # its final report has been sent
        final = order.exhausted and order.landed == order.started
        if final:
            del self._orders[fetch.id]
        self._peer.send(Fetched(fetch.id, self._peer.incarnation, order.landed, final, order.seconds))


def main(config: dict[str, Any]) -> int:
    """Run the prefetcher; returns its exit code."""
    note = pin(config["cores"])
    if not config["mps"]:
        mps.decline(Path(config["runtime"]))
    peer = ChildEndpoint(config, "fetch.sock")
    try:
        control = ControlSegment.attach(config["control"])
        with Store.attach(config["store"], config["fingerprint"], writable=True) as store:
            peer.announce((note,) if note else ())
            CopyLoop(peer, store, config["link_gbps"], control.line("prefetcher", 0).tick).serve()
        control.close()
    except (ShmError, CudaError) as e:
        peer.fail(str(e))
        return 1
    finally:
        peer.close()
    return 0
