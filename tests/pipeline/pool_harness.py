"""A worker pool over real sockets; the test drives its workers, its supervisor and the clock by which workers
are suspected, so that a busy machine makes none suspect."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from child_messages import LIMIT, PRINT, child_endpoint
from clock import Clock

from pipeline.coordinator_config import WorkerCores
from pipeline.experts.exchange import WorkerExchange
from pipeline.experts.host_shards import HostShard
from pipeline.experts.peers import ChildServerSocket, ExitEvents
from pipeline.experts.progress import SilenceLimits
from pipeline.experts.ring_exchange import RingExchange
from pipeline.experts.worker_pool import Compute, WorkerPool, WorkerTicket
from protocol.messages import Abandon, AttachRing, Partial, Work, WorkerDied, WorkerUp, WorkFailed
from shm.control import ControlSegment
from shm.doorbell import Library, library
from shm.mask import NOTHING, Tally
from shm.ring import WorkerRing
from shm.slot import Slot, SlotShape
from workers.child_endpoint import ChildEndpoint

HIDDEN = 4
X = np.ones((1, HIDDEN), np.float32)
_RINGS = itertools.count()
QUIET = 0.15  # seconds without a message that count as silence
TICK = 0.01  # seconds


def shard_of(tile: int, worker: int = 0) -> HostShard:
    """A worker's shard of one tile of expert 0; the tile identifies it in the test."""
    return HostShard(
        np.array([[0, tile, tile + 1]], np.int32),
        np.array([0, 1], np.int32),
        np.zeros(1, np.int32),
        np.ones(1, np.float32),
        np.zeros(1, np.intp),
        worker,
    )


def doorbells() -> Library:
    functions = library()
    if functions is None:
        pytest.skip("shm/doorbell.c was not compiled")
    return functions


def tile_of(work: Work) -> int:
    return int(work.items[0, 1])


class Worker:
    """An incarnation of a worker that has announced itself."""

    def __init__(self, harness: PoolHarness, index: int, incarnation: int) -> None:
        self.index, self.incarnation = index, incarnation
        self._harness = harness
        self.line = harness.control.line("worker", index)
        self.endpoint: ChildEndpoint = child_endpoint(
            harness.runtime, "worker", "w", PRINT, index, incarnation
        )
        self.endpoint.announce()
        self.ring: WorkerRing | None = None
        self._slots: dict[int, Slot] = {}  # of Works that came through the ring, by seq, until their answer
        self._abandoned: set[int] = set()  # of these

    def take(self, count: int = 1) -> list[Work]:
        """The next `count` Works; the pool is updated meanwhile."""
        works: list[Work] = []
        deadline = time.monotonic() + LIMIT
        while len(works) < count and time.monotonic() < deadline:
            self._harness.pool.update(5)
            works += [m for m in self._received() if isinstance(m, Work)]
        assert len(works) == count, f"{len(works)} of {count} Works arrived"
        return works

    def messages(self) -> list[object]:
        """The messages that arrive within a while."""
        self._harness.update_for(QUIET)
        return self._received()

    def _received(self) -> list[object]:
        """What has arrived over ZeroMQ, and through the ring: Works, and those that are no longer needed."""
        found: list[object] = self._taken_from_ring()
        for message in self.endpoint.receive(wait=False):
            if isinstance(message, AttachRing):
                self.ring = WorkerRing(doorbells(), message.name, self.incarnation)
            else:
                found.append(message)
        return found + self._abandoned_in_ring()

    def _taken_from_ring(self) -> list[object]:
        found: list[object] = []
        if self.ring is not None:
            while (slot := self.ring.take()) is not None:
                found.append(slot.read())
                self._slots[slot.seq] = slot
        return found

    def _abandoned_in_ring(self) -> list[object]:
        found: list[object] = []
        if self.ring is not None:
            for seq, slot in self._slots.items():
                if seq not in self._abandoned and self.ring.abandoned(slot):
                    found.append(Abandon(seq))
                    self._abandoned.add(seq)
        return found

    def refuse(self, work: Work, text: str) -> None:
        self.endpoint.send(WorkFailed(work.seq, self.incarnation, text))
        if self.ring is not None and (slot := self._slots.pop(work.seq, None)) is not None:
            self.ring.skip(slot)

    def answer(
        self,
        work: Work,
        value: float = 0.0,
        busy: float = 0.1,
        rows: int | None = None,
        tally: Tally = NOTHING,
    ) -> None:
        """Every number of the result is `value`; `rows`: of a result with another shape than x."""
        y = np.full((len(work.x) if rows is None else rows, HIDDEN), value, np.float32)
        if self.ring is not None and work.seq in self._slots and rows is None:
            slot = self._slots.pop(work.seq)
            slot.y()[:] = y
            slot.tally = tally
            self.ring.answer(slot, busy)
        else:
            left_out = tally.mass, tally.left, tally.kept, tally.channels
            self.endpoint.send(Partial(work.seq, self.incarnation, busy, y, *left_out))

    def warm_up(self) -> None:
        """Answer the first Work, which has no items, and so be up."""
        (work,) = self.take()
        assert len(work.items) == 0
        self.answer(work)
        up = WorkerUp("worker", self.index, self.incarnation)
        self._harness.update_until(lambda: up in self._harness.reports)

    def exit(self, over: Work | None = None, crashed: bool = False) -> None:
        """Exit while computing `over`; the supervisor reports it."""
        self.endpoint.close()
        self._harness.running.remove(self)
        seq = -1 if over is None else over.seq
        self._harness.exits.put(WorkerDied("worker", self.index, self.incarnation, crashed, seq))


class PoolHarness:
    """A pool, its running workers, and its messages to the supervisor."""

    def __init__(
        self,
        runtime: Path,
        socket: ChildServerSocket,
        control: ControlSegment,
        exits: ExitEvents,
        reports: list[object],
        rings: bool,
        clock: Clock,
    ) -> None:
        """`rings`: Work goes through shared memory. `clock`: the pool's, in which only `let_pass` passes."""
        self.clock = clock
        self.runtime, self.socket, self.control = runtime, socket, control
        self.exchange: WorkerExchange = socket
        if rings:
            self.prefix = f"/tandem-tests{os.getpid()}-exchange-{next(_RINGS)}-"
            self.exchange = RingExchange(socket, doorbells(), self.prefix, SlotShape.for_rows(4, HIDDEN), 0.0)
        self.exits, self.reports = exits, reports
        self.running: list[Worker] = []
        self.pool: WorkerPool

    def start(
        self,
        workers: int,
        warm: bool = True,
        limits: SilenceLimits | None = None,
        compute: Compute | None = None,
        cores: WorkerCores | None = None,
    ) -> list[Worker]:
        """A pool with all its workers; with `warm` all of them are up."""
        cores = cores or WorkerCores.equal(workers)
        self.pool = WorkerPool(self.exchange, self.control, cores, HIDDEN, limits, compute)
        started = [self.worker(index) for index in range(workers)]
        self.pool.wait_ready(LIMIT)
        for worker in started if warm else ():
            worker.warm_up()
        return started

    def begin(
        self, workers: int, limits: SilenceLimits | None = None
    ) -> tuple[list[Worker], WorkerTicket, list[Work]]:
        """`start`, then one ticket: each worker has taken the Work of the tile with its index."""
        started = self.start(workers, limits=limits)
        ticket = self.submit(*range(workers))
        return started, ticket, [worker.take()[0] for worker in started]

    def worker(self, index: int = 0, incarnation: int = 0) -> Worker:
        self.running.append(Worker(self, index, incarnation))
        return self.running[-1]

    def update_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.pool.update(5)

    def let_pass(self, seconds: float) -> None:
        """This time passes by the pool's clock, in slices that count whole."""
        for _ in range(round(seconds / TICK)):
            self.clock.now += TICK
            self.pool.update(0)

    def update_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < deadline
            self.pool.update(5)

    def submit(self, *tiles: int) -> WorkerTicket:
        """Submit a shard of each of these tiles, for worker 0, 1, ..."""
        return self.pool.submit(0, [shard_of(tile, worker) for worker, tile in enumerate(tiles)], X)
