"""A worker pool whose workers are the test's: each does as it says, over real sockets. And the supervisor's
part: who comes and who dies."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from moving_parts import peer_of
from peer_words import LIMIT, PRINT

from pipeline.coordinator_config import WorkerCores
from pipeline.experts.host_shards import HostShard
from pipeline.experts.peers import ChildServerSocket, ExitEvents
from pipeline.experts.worker_pool import Ticket, WorkerPool
from protocol.messages import Partial, Work, WorkerDied, WorkerUp
from shm.control import ControlSegment
from workers.child_endpoint import ChildEndpoint

HIDDEN = 4
X = np.ones((1, HIDDEN), np.float32)
QUIET = 0.15  # seconds in which nothing comes


def run_of(tile: int) -> HostShard:
    """A run of one tile of expert 0, by which a test knows it."""
    return HostShard(
        np.array([[0, tile, tile + 1]], np.int32),
        np.array([0, 1], np.int32),
        np.zeros(1, np.int32),
        np.ones(1, np.float32),
        np.zeros(1, np.intp),
    )


def tile_of(work: Work) -> int:
    return int(work.items[0, 1])


class Worker:
    """One life of a worker: it has announced itself, and does what the test says."""

    def __init__(self, scene: Scene, index: int, incarnation: int) -> None:
        self.index, self.incarnation = index, incarnation
        self._scene = scene
        self.peer: ChildEndpoint = peer_of(scene.runtime, "worker", "w", PRINT, index, incarnation)
        self.peer.announce()

    def got(self, count: int = 1) -> list[Work]:
        """The next so many Works, while the pool goes on."""
        works: list[Work] = []
        deadline = time.monotonic() + LIMIT
        while len(works) < count and time.monotonic() < deadline:
            self._scene.pool.update(5)
            works += [m for m in self.peer.receive(wait=False) if isinstance(m, Work)]
        assert len(works) == count, f"{len(works)} of {count} Works came"
        return works

    def quiet(self) -> bool:
        """Whether nothing comes for a while."""
        return not self.hears()

    def hears(self) -> list[object]:
        """What comes for a while."""
        self._scene.go_on(QUIET)
        return list(self.peer.receive(wait=False))

    def answer(self, work: Work, value: float = 0.0) -> None:
        y = np.full((len(work.x), HIDDEN), value, np.float32)
        self.peer.send(Partial(work.seq, self.incarnation, 0.1, y))

    def wake(self) -> None:
        """Do its first Work, which holds nothing, and so be up."""
        (work,) = self.got()
        assert len(work.items) == 0
        self.answer(work)
        self._scene.until(lambda: WorkerUp("worker", self.index, self.incarnation) in self._scene.said)

    def die(self, over: Work | None = None, crashed: bool = False, news: bool = True) -> None:
        """`over`: what it was computing; `news`: the supervisor says so."""
        self.peer.close()
        self._scene.alive.remove(self)
        if news:
            seq = -1 if over is None else over.seq
            self._scene.deaths.put(WorkerDied("worker", self.index, self.incarnation, crashed, seq))


class Scene:
    """A pool, and the supervisor's part: who comes and who dies."""

    def __init__(
        self, runtime: Path, socket: ChildServerSocket, control: ControlSegment, deaths: ExitEvents
    ) -> None:
        self.runtime, self.control, self.deaths = runtime, control, deaths
        self.said: list[object] = []
        self.alive: list[Worker] = []
        self._socket = socket
        self.pool: WorkerPool

    def begin(self, workers: int, awake: bool = True) -> list[Worker]:
        """A pool of so many, all up."""
        self.pool = WorkerPool(self._socket, self.control, WorkerCores.alike(workers), HIDDEN)
        made = [self.worker(index) for index in range(workers)]
        self.pool.wait_ready(LIMIT)
        for worker in made if awake else ():
            worker.wake()
        return made

    def worker(self, index: int = 0, incarnation: int = 0) -> Worker:
        self.alive.append(Worker(self, index, incarnation))
        return self.alive[-1]

    def go_on(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.pool.update(5)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < deadline
            self.pool.update(5)

    def submit(self, *tiles: int) -> Ticket:
        return self.pool.submit_shards(0, [run_of(tile) for tile in tiles], X)
