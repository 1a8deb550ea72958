"""Process entry: the reader of a partial store. It receives orders for experts, reads them from the store's
file to frames of its memory, and reports each.

Several threads read pieces of the most urgent orders; a disk gives its full rate to no single one. A piece
that cannot be read is tried again a few times, then the order fails with one line. The reader decides
nothing, and nothing is lost with it: what it has not reported is asked of the next one.
"""

from __future__ import annotations

import fcntl
import heapq
import logging
import mmap
import os
import random
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.messages import ExpertRead, ReadExpert
from shm.control import ControlLine, ControlSegment
from shm.disk_cache import CachedStore
from shm.errors import ShmError, StoreDamaged, StoreInvalid
from shm.layout import PAGE, Bytes
from shm.store import Store
from workers.child_endpoint import ChildEndpoint
from workers.lifetime import pin

log = logging.getLogger(__name__)

THREADS = 8  # pieces that are read at the same time
PIECE = 1 << 20  # bytes
TRIES = 3  # of a piece
PAUSE = 0.05  # seconds before it is tried again


@dataclass(eq=False)
class Order:
    """An expert that is being read."""

    id: int
    pieces: deque[tuple[int, Bytes]]  # which no thread has begun: where in the file, and to where
    left: int  # which are not read
    size: int
    error: str = ""


def pieces_of(store: Store, layer: int, expert: int, frame: int) -> deque[tuple[int, Bytes]]:
    """All of an expert, in pieces: where it lies in the file, and to where it is read. Raises IndexError."""
    parts = zip(store.layout.ranges(layer, expert), store.frame(frame), strict=True)
    return deque(
        (at + lo, memory[lo : lo + PIECE]) for (at, size), memory in parts for lo in range(0, size, PIECE)
    )


class Readers:
    """The threads, and the orders that wait for them. `ended` has those that are read or have failed, and
    `bell`, a descriptor, can be read when there are any."""

    def __init__(self, file: CachedStore, line: ControlLine) -> None:
        """`line`: counts the pieces."""
        self._file, self._line = file, line
        self._queue: list[tuple[int, int, Order]] = []  # heap: by urgency, then age
        self._age = 0
        self._changed = threading.Condition()
        self._stopped = False
        self.ended: deque[Order] = deque()
        self.bell, self._rings = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def put(self, order: Order, urgency: int) -> None:
        """Add an order, or one that is known already at another place of the queue."""
        with self._changed:
            heapq.heappush(self._queue, (urgency, self._age, order))
            self._age += 1
            self._changed.notify(len(order.pieces))

    def take_ended(self) -> list[Order]:
        with suppress(BlockingIOError):
            os.read(self.bell, 4096)
        return [self.ended.popleft() for _ in range(len(self.ended))]

    def close(self) -> None:
        """End the threads, each after its piece."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        os.close(self.bell)
        os.close(self._rings)

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            order, at, memory = taken
            error = "" if order.error else self._read(at, memory)
            with self._changed:
                self._line.tick()
                order.error = order.error or error
                order.left -= 1
                if order.left:
                    continue
            self.ended.append(order)
            with suppress(BlockingIOError):  # it rings already
                os.write(self._rings, b"\0")

    def _next(self) -> tuple[Order, int, Bytes] | None:
        """The most urgent piece, waited for; None at the end."""
        with self._changed:
            while not self._stopped:
                while self._queue:
                    order = self._queue[0][2]
                    if order.pieces:
                        return order, *order.pieces.popleft()
                    heapq.heappop(self._queue)
                self._changed.wait()
        return None

    def _read(self, at: int, memory: Bytes) -> str:
        """Read a piece; why it could not be, or nothing."""
        for left in reversed(range(TRIES)):
            try:
                self._file.read_pages(memory, at)
                return ""
            except StoreDamaged as e:
                if not left or self._stopped:
                    return str(e)
            time.sleep(PAUSE)
        return ""


def read_rate(path: Path, seconds: float = 0.5) -> float:
    """Bytes a second that this many threads read of a file in pieces of this size, past the page cache where
    that can be done. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
        size = os.fstat(descriptor).st_size
        piece, last = min(PIECE, size // PAGE * PAGE or PAGE), max(0, size // PIECE - 1)
        places = random.Random(0)
        end = time.perf_counter() + seconds

        def run(_: int) -> int:
            memory, done = mmap.mmap(-1, piece), 0
            while time.perf_counter() < end:
                done += os.preadv(descriptor, [memory], places.randint(0, last) * PIECE)
            return done

        began = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            read = sum(pool.map(run, range(THREADS)))
        return read / (time.perf_counter() - began)
    finally:
        os.close(descriptor)


def serve(peer: ChildEndpoint, store: Store, readers: Readers) -> None:
    """Serve orders until Shutdown."""
    peer.wake_by(readers.bell)
    known: dict[int, Order] = {}
    # Orders that have ended, the latest ones. A change of urgency that comes after as many others as there
    # are frames was sent after the order's report had arrived, which no coordinator does; an order that was
    # taken for a new one would write to a frame that has another expert by then.
    ended: dict[int, None] = {}
    most = store.held.shape.experts
    while not peer.stopped:
        for message in peer.receive(wait=True):
            if not isinstance(message, ReadExpert):
                log.warning("unexpected %s", type(message).__name__)
                continue
            order = known.get(message.id)
            if order is None:
                if message.id in ended:  # a change of urgency, which its report has crossed
                    continue
                pieces = pieces_of(store, message.layer, message.expert, message.frame)
                size = sum(len(memory) for _, memory in pieces)
                order = known[message.id] = Order(message.id, pieces, len(pieces), size)
            readers.put(order, message.urgency)
        for order in readers.take_ended():
            del known[order.id]
            ended[order.id] = None
            if len(ended) > most:
                del ended[next(iter(ended))]
            peer.send(ExpertRead(order.id, peer.generation, order.size, order.error))


def main(config: dict[str, Any]) -> int:
    """Run the reader; returns its exit code."""
    note = pin(config["cores"])
    peer = ChildEndpoint(config, "read.sock")
    try:
        control = ControlSegment.attach(config["control"])
        with Store.attach(config["store"], config["fingerprint"], writable=True) as store:
            path = Path(store.manifest.file)
            file = CachedStore.open(path.parents[1], path.parent.name)
            if file is None:
                raise StoreInvalid(f"the cached store {path} is gone")
            with file:
                file.hold()
                how = "past" if file.pass_page_cache() else "through"
                readers = Readers(file, control.line("reader", 0))
                peer.announce(tuple(filter(None, (note, f"{path} is read {how} the page cache"))))
                serve(peer, store, readers)
                readers.close()
        control.close()
    except ShmError as e:
        peer.fail(str(e))
        return 1
    finally:
        peer.close()
    return 0
