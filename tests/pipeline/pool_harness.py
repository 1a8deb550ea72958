"""A pool of workers over real sockets; the test drives its workers, its supervisor and the clock by which
workers hang, so that on a busy machine none does."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from child_messages import LIMIT, PRINT, child_endpoint
from clock import Clock
from descriptor_parts import Parts, parts_of

from pipeline.arrays import FloatArray
from pipeline.config import WorkerCores
from pipeline.experts.carriers import ArenaCarrier, SocketCarrier
from pipeline.experts.division import Divided
from pipeline.experts.peers import ChildServerSocket, ExitEvents
from pipeline.experts.pool import Carrier, Compute, HostPool, Ticket
from protocol.messages import Abandon, AttachLane, Partial, Work, WorkerDied, WorkerUp, WorkFailed
from shm.control import ControlSegment
from shm.descriptor import describe
from shm.lane import LaneShape, Slot, WorkerLane, library
from shm.mask import DENSE, NOTHING, Mask, Tally
from workers.child_endpoint import ChildEndpoint

HIDDEN = 4
SHAPE = LaneShape(HIDDEN, (4, 64), (500, 64))
X = np.ones((1, HIDDEN), np.float32)
_ARENAS = itertools.count()
QUIET = 0.15  # seconds without a message that count as silence
TICK = 0.05  # seconds


@dataclass(frozen=True)
class Tiles:
    """In place of a plan: the tile of expert 0 for each worker; it identifies the Work in the test."""

    tiles: tuple[int, ...]
    rows: int
    mask: Mask

    def divide(self, plan: Tiles, seq: int) -> Divided:
        """A `Divider`."""
        parts = []
        for worker, tile in enumerate(plan.tiles):
            item = [(0, tile, tile + 1)], [0, 1], [0], [1.0]
            parts.append((worker, describe(0, *item, plan.rows, plan.mask, seq + worker)))
        return Divided(parts, len(parts))


@dataclass(frozen=True, eq=False)
class Taken:
    """A Work that a worker was sent."""

    work: Parts
    x: FloatArray
    slot: Slot | None = None

    @property
    def seq(self) -> int:
        return self.work.seq

    @property
    def tile(self) -> int:
        return int(self.work.items[0, 1])


class Worker:
    """An generation of a worker that has announced itself."""

    def __init__(self, harness: PoolHarness, index: int, generation: int) -> None:
        self.index, self.generation = index, generation
        self._harness = harness
        self.line = harness.control.line("worker", index)
        self.endpoint: ChildEndpoint = child_endpoint(
            harness.runtime, "worker", "w", PRINT, index, generation
        )
        self.endpoint.announce()
        self.lane: WorkerLane | None = None
        self._slots: dict[int, Slot] = {}  # of Works that came through the lane, by seq, until their answer

    def take(self, count: int = 1, at_least: bool = False) -> list[Taken]:
        """The next `count` Works, or `at_least` so many; the pool is updated meanwhile."""
        works: list[Taken] = []
        deadline = time.monotonic() + LIMIT
        while len(works) < count and time.monotonic() < deadline:
            self._harness.pool.update(5)
            works += [m for m in self._received() if isinstance(m, Taken)]
        assert len(works) == count or (at_least and works), f"{len(works)} of {count} Works arrived"
        return works

    def messages(self, count: int = 0) -> list[object]:
        """The messages that arrive until there are `count`, and within a while."""
        received: list[object] = []
        deadline = time.monotonic() + LIMIT
        while len(received) < count and time.monotonic() < deadline:
            self._harness.pool.update(5)
            received += self._received()
        self._harness.update_for(QUIET)
        return received + self._received()

    def _received(self) -> list[object]:
        """What has arrived: Works, and those that are no longer needed."""
        received: list[object] = []
        for message in self.endpoint.receive(wait=False):
            if isinstance(message, AttachLane):
                self.lane = WorkerLane(library(), message.hall, message.lane, self.generation)
            elif isinstance(message, Work):
                work = parts_of(message.descriptor)
                assert work.generation == self.generation
                received.append(Taken(work, message.x))
            else:
                received.append(message)
        while self.lane is not None and (slot := self.lane.take()) is not None:
            work = parts_of(slot.descriptor)
            received.append(Taken(work, self.lane.x(slot)[: work.x_rows], slot))
            self._slots[work.seq] = slot
        for seq, slot in list(self._slots.items()):
            if self.lane is not None and self.lane.abandoned(slot):
                received.append(Abandon(seq))
                del self._slots[seq]
        return received

    def refuse(self, taken: Taken, text: str) -> None:
        self.endpoint.send(WorkFailed(taken.seq, self.generation, text))
        if self.lane is not None and taken.slot is not None:
            self._slots.pop(taken.seq, None)
            self.lane.skip(taken.slot)

    def answer(
        self,
        taken: Taken,
        value: float = 0.0,
        busy: float = 0.1,
        tally: Tally = NOTHING,
        rows: int | None = None,
    ) -> None:
        """Every number of the result is `value`; `rows`: of a result with another shape than x."""
        if self.lane is not None and taken.slot is not None:
            self._slots.pop(taken.seq, None)
            taken.slot.y[: len(taken.x)] = value
            self.lane.answer(taken.slot, busy, tally)
        else:
            y = np.full((len(taken.x) if rows is None else rows, HIDDEN), value, np.float32)
            left_out = tally.mass, tally.left, tally.kept, tally.channels
            self.endpoint.send(Partial(taken.seq, self.generation, busy, y, *left_out))

    def warm_up(self) -> None:
        """Answer the first Work, which has no rows, and so be up."""
        (work,) = self.take()
        assert len(work.x) == len(work.work.items) == 0
        self.answer(work)
        up = WorkerUp("worker", self.index, self.generation)
        self._harness.update_until(lambda: up in self._harness.reports)

    def exit(self, over: Taken | None = None, crashed: bool = False) -> None:
        """Exit while computing `over`; the supervisor reports it."""
        self.endpoint.close()
        self._harness.running.remove(self)
        seq = -1 if over is None else over.seq
        self._harness.exits.put(WorkerDied("worker", self.index, self.generation, crashed, seq))


class PoolHarness:
    """A pool, its running workers, and its messages to the supervisor."""

    def __init__(
        self,
        runtime: Path,
        socket: ChildServerSocket,
        control: ControlSegment,
        exits: ExitEvents,
        reports: list[object],
        arena: bool,
        clock: Clock,
    ) -> None:
        """`arena`: Work goes through shared memory. `clock`: the pool's, in which only `let_pass` passes."""
        self.clock = clock
        self.runtime, self.socket, self.control = runtime, socket, control
        self.carrier: Carrier = SocketCarrier(socket, HIDDEN)
        if arena:
            self.prefix = f"/tandem-tests{os.getpid()}-arena-{next(_ARENAS)}-"
            self.carrier = ArenaCarrier(socket, library(), self.prefix, SHAPE)
        self.exits, self.reports = exits, reports
        self.running: list[Worker] = []
        self.pool: HostPool

    def start(
        self,
        workers: int,
        warm: bool = True,
        compute: Compute | None = None,
        cores: WorkerCores | None = None,
    ) -> list[Worker]:
        """A pool with all its workers; with `warm` all of them are up."""
        cores = cores or WorkerCores.equal(workers)
        divider = Tiles((), 0, DENSE)
        self.pool = HostPool(divider, cores, compute, self.socket, self.carrier, self.control)
        started = [self.worker(index) for index in range(workers)]
        self.pool.wait_ready(LIMIT)
        for worker in started if warm else ():
            worker.warm_up()
        return started

    def begin(self, workers: int) -> tuple[list[Worker], Ticket, list[Taken]]:
        """`start`, then one ticket: each worker has taken the Work of the tile with its index."""
        started = self.start(workers)
        ticket = self.submit(*range(workers))
        return started, ticket, [worker.take()[0] for worker in started]

    def worker(self, index: int = 0, generation: int = 0) -> Worker:
        self.running.append(Worker(self, index, generation))
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

    def submit(self, *tiles: int, x: FloatArray = X, mask: Mask = DENSE) -> Ticket:
        """Submit a Work of each of these tiles, for worker 0, 1, ..."""
        return self.pool.submit(Tiles(tiles, len(x), mask), x)  # type: ignore[arg-type]
