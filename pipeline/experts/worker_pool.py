"""The pool of expert workers: submits a layer's host share, collects the partial sums, whoever dies.

A run is cut for one of W workers and usually computed by that one. Where it died, is being replaced, or has
not yet imported what it computes with, another computes it: which one changes nothing in the result. A Work
that was being computed when a worker crashed is tried once more; if that one crashes too, the Work is given
up, and not the pool.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeline.arrays import FloatArray, Phase
from pipeline.coordinator_config import WorkerCores
from pipeline.errors import PeerLost, ShardFailed
from pipeline.experts.host_shards import HostShard, cut_into_shards, empty_shard
from pipeline.experts.peers import ChildServerSocket, Watch
from pipeline.experts.shares import HostShare
from protocol.messages import Abandon, Partial, Ready, Work, WorkerDied, WorkFailed
from shm.control import ControlSegment

ANSWER_LIMIT = 120.0  # seconds without any answer, and any worker, after which the engine is given up
STALL_LIMIT = 3.0  # seconds without a tile after which a worker hangs
STALL_LIMIT_ROW = 0.02  # and for each row of what it computes: a tile of many rows takes longer
DOUBT = 1 / 6  # of that time, after which an idle worker is given the same work: whoever is first
WAKE_LIMIT = 60.0  # the same until its first answer: importing torch is no progress that is counted
CRASHES = 2  # of workers over one Work, by their own doing
KILLS = 8  # of workers over one Work, whoever did it: perhaps the system, whose memory it exhausts


@dataclass
class Ticket:
    """A layer's host share under way."""

    rows: int
    hidden: int
    runs: dict[int, HostShard] = field(default_factory=dict)  # by seq, in run order
    partials: dict[int, FloatArray] = field(default_factory=dict)
    busy: float = 0.0  # seconds, the longest of the workers
    failure: str = ""  # why it will never be complete

    @property
    def complete(self) -> bool:
        return len(self.partials) == len(self.runs)


@dataclass
class _Order:
    """A Work that has not been answered."""

    work: Work
    ticket: Ticket
    home: int  # the worker that its run was cut for
    wakes: bool = False  # it only wakes that worker, and nobody waits for it
    crashes: int = 0
    kills: int = 0


@dataclass
class _Worker:
    """A living worker."""

    up: bool = False  # it has answered once
    doubted: bool = False  # it makes no progress: others are given what it has, and it nothing more
    orders: dict[int, _Order] = field(default_factory=dict)  # by seq, as they were sent
    watch: Watch = field(default_factory=Watch)


class WorkerPool:
    """Used by the engine's thread alone."""

    def __init__(
        self, socket: ChildServerSocket, control: ControlSegment, workers: WorkerCores, hidden: int
    ) -> None:
        """`workers`: whom shares are cut for, all of them expected. `control`: where they count their
        progress."""
        self.workers = len(workers)
        self._cut_for = workers
        self._socket = socket
        self._lines = [control.line("worker", index) for index in range(self.workers)]
        self._hidden = hidden
        self._next = 0
        self._team: dict[int, _Worker] = {}  # those that live, by index
        self._homeless: list[_Order] = []  # nobody lives to do them

    def wait_ready(self, limit: float) -> None:
        """Wait for all workers to announce themselves. Raises PeerLost. They make themselves ready to compute
        (with its first Work, where that takes torch) while the caller goes on."""
        self._socket.wait_ready(self.workers, limit)
        self.update(0)

    def submit(self, layer: int, share: HostShare, x: FloatArray, phase: Phase) -> Ticket:
        """Send the share's runs and return at once. x: float32 [R, H], unchanged until `result`."""
        return self.submit_shards(layer, cut_into_shards(share, self._cut_for, phase, len(x)), x)

    def submit_shards(self, layer: int, runs: Sequence[HostShard], x: FloatArray) -> Ticket:
        """Send runs, at most one for each worker."""
        ticket = Ticket(*x.shape)
        for home, run in enumerate(runs):
            kept = x if len(run.kept) == len(x) else x[run.kept]
            work = self._work(layer, run, kept)
            ticket.runs[work.seq] = run
            self._give(_Order(work, ticket, home))
        return ticket

    def result(self, ticket: Ticket) -> FloatArray:
        """The sum of the ticket's partials: float32 [R, H], added in shard order. Raises ShardFailed where a
        shard cannot be computed, PeerLost where the engine is to end."""
        deadline = time.monotonic() + ANSWER_LIMIT
        while not ticket.complete:
            if ticket.failure:
                self.abandon(ticket)
                raise ShardFailed(ticket.failure)
            if self.update(50):
                deadline = time.monotonic() + ANSWER_LIMIT
            elif time.monotonic() > deadline:
                raise PeerLost(f"no worker has come or answered for {ANSWER_LIMIT:.0f} s")
        y = np.zeros((ticket.rows, ticket.hidden), np.float32)
        for seq, run in ticket.runs.items():
            y[run.kept] += ticket.partials[seq]
        return y

    def abandon(self, ticket: Ticket) -> None:
        """Nobody waits for what is left of it."""
        for index, worker in self._team.items():
            for seq in [seq for seq, order in worker.orders.items() if order.ticket is ticket]:
                del worker.orders[seq]
                self._socket.send(index, Abandon(seq))
        self._homeless = [order for order in self._homeless if order.ticket is not ticket]

    def update(self, wait_ms: int) -> bool:
        """Take in what has come, and who came or died; True if there was anything. A partial nobody waits for
        is dropped."""
        messages = self._socket.receive(wait_ms)
        for index, message in messages:
            match message:
                case Partial():
                    self._answered(index, message)
                case WorkFailed():
                    order = self._team[index].orders.pop(message.seq, None)
                    if order is not None:
                        order.ticket.failure = f"a worker refused its work: {message.text}"
                case Ready():
                    self._came(index)
                case WorkerDied():
                    self._died(index, message)
        if not messages:
            self._look_for_hung()
        return bool(messages)

    # --- who does what -----------------------------------------------------------------------------------

    def _give(self, order: _Order) -> None:
        """Have a worker do it: the one it was cut for, if that one is as ready as any; else the least busy of
        those that are."""
        able = self._able() or list(self._team)
        if not able:
            self._homeless.append(order)
            return
        chosen = order.home
        if chosen not in able:
            chosen = min(able, key=lambda index: (len(self._team[index].orders), index))
        self._hand(order, chosen)

    def _hand(self, order: _Order, index: int) -> None:
        self._team[index].orders[order.work.seq] = order
        self._socket.send(index, order.work)

    def _able(self) -> list[int]:
        """The workers that do what they are given, as far as is known."""
        return [index for index, worker in self._team.items() if worker.up and not worker.doubted]

    def _is_done(self, order: _Order) -> bool:
        """Nobody more is needed for it: there is an answer, or a worker that will give one."""
        seq = order.work.seq
        return seq in order.ticket.partials or any(seq in self._team[i].orders for i in self._able())

    def _came(self, index: int) -> None:
        """A worker announced itself: wake it, and give it what nobody else can do."""
        worker = self._team[index] = _Worker()
        wake = self._work(0, empty_shard(), np.zeros((1, self._hidden), np.float32))
        worker.orders[wake.seq] = _Order(wake, Ticket(1, self._hidden), index, wakes=True)
        self._socket.send(index, wake)
        homeless, self._homeless = self._homeless, []
        for order in homeless:
            self._give(order)

    def _answered(self, index: int, partial: Partial) -> None:
        worker = self._team[index]
        worker.doubted = False
        worker.watch.rest()  # an answer is progress
        if not worker.up:
            worker.up = True
            self._socket.up(index)
        order = worker.orders.pop(partial.seq, None)
        if order is None or partial.seq in order.ticket.partials:
            return
        if partial.y.shape != order.work.x.shape:
            order.ticket.failure = f"a worker answered {order.work.x.shape} rows with {partial.y.shape}"
        else:
            order.ticket.partials[partial.seq] = partial.y
            order.ticket.busy = max(order.ticket.busy, partial.busy)

    def _died(self, index: int, death: WorkerDied) -> None:
        """Give its orders to others, unless the one it was computing has done harm enough."""
        worker = self._team.pop(index)
        for seq, order in worker.orders.items():
            if order.wakes:
                continue
            if seq == death.seq:
                order.kills += 1
                order.crashes += death.crashed
            if order.crashes >= CRASHES or order.kills >= KILLS:
                order.ticket.failure = (
                    f"what this request needs has ended {order.kills} workers that tried to compute it"
                )
            elif not self._is_done(order):
                self._give(order)

    def _look_for_hung(self) -> None:
        for index, worker in self._team.items():
            if not worker.orders:
                worker.doubted = False
                worker.watch.rest()
                continue
            rows = max(len(order.work.x) for order in worker.orders.values())
            limit = STALL_LIMIT + rows * STALL_LIMIT_ROW if worker.up else WAKE_LIMIT
            stalled = worker.watch.stalled(self._lines[index].ticks)
            if stalled > limit:
                self._socket.hung(index)
            elif stalled > limit * DOUBT and worker.up:
                self._ask_another(worker)

    def _ask_another(self, slow: _Worker) -> None:
        """Before a worker is given up, have an idle one do what it has: it changes nothing in the result."""
        slow.doubted = True
        for order in slow.orders.values():
            idle = [index for index in self._able() if not self._team[index].orders]
            if idle and not self._is_done(order):
                self._hand(order, min(idle))

    def _work(self, layer: int, run: HostShard, x: FloatArray) -> Work:
        self._next += 1
        return Work(self._next, layer, run.items, run.offsets, run.rows, run.weights, x)
