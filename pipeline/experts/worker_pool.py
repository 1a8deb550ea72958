"""The pool of expert workers: submits a layer's host share, collects the partial sums, survives worker exits.

A shard is cut for one of W workers and usually computed by that worker. While it is being restarted, another
worker computes the shard: the result has the same bits. A Work that was being computed when a worker crashed
is tried once more; if that worker crashes too, the request fails, and the pool continues.

Where the caller announces a share, and then only waits for it, this process computes a shard itself: that of
the worker that sleeps on this thread's core, and need not be woken.

A worker that makes no progress is first *suspect*: an idle worker gets the same Works (the pool hedges), and
the suspect gets no new ones until it answers. After the whole limit it is reported as hung and killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pipeline.arrays import FloatArray
from pipeline.coordinator_config import WorkerCores
from pipeline.device import Device, Fence
from pipeline.device.partial_sums import Part, sum_on_host
from pipeline.errors import PeerLost, ShardFailed
from pipeline.experts.exchange import WorkerExchange
from pipeline.experts.host_shards import HostShard, empty_shard
from pipeline.experts.progress import ProgressWatch, SilenceLimits
from protocol.messages import Abandon, Partial, Ready, Work, WorkerDied, WorkFailed
from shm.control import ControlSegment
from shm.mask import DENSE, Mask, Tally

if TYPE_CHECKING:
    from torch import Tensor

Compute = Callable[[Work], Partial]

HEDGE_AFTER = 1 / 6  # of a worker's stall limit, after which an idle worker gets the same Works
MAX_CRASHES = 2  # of workers while they computed one Work, by a crash
MAX_EXITS = 8  # the same by any cause: the system may kill workers when memory is short


@dataclass
class WorkerTicket:
    """A layer's submitted host share: a `host_pool.Ticket`."""

    pool: WorkerPool
    shape: tuple[int, ...]  # of the result
    shards: dict[int, HostShard] = field(default_factory=dict)  # by seq, in shard order
    partials: dict[int, Partial] = field(default_factory=dict)
    held: list[tuple[int, Partial]] = field(default_factory=list)  # with their workers; not yet released
    own: _PendingWork | None = None  # which this process computes
    busy: float = 0.0  # seconds of computing, of the slowest worker
    failure: str = ""  # the reason why it can never be complete

    @property
    def complete(self) -> bool:
        return len(self.partials) == len(self.shards)

    @property
    def tally(self) -> Tally:
        return Tally.of(self.partials[seq] for seq in self.shards)

    def result(self) -> FloatArray:
        y = sum_on_host(self.pool.parts(self), self.shape)
        self.pool.release(self, None)
        return y

    def result_on(self, device: Device) -> Tensor:
        y, fence = device.add_parts(self.pool.parts(self), self.shape)
        self.pool.release(self, fence)
        return y

    def abandon(self) -> None:
        self.pool.abandon(self)


@dataclass
class _PendingWork:
    """A Work without an answer."""

    work: Work
    ticket: WorkerTicket
    preferred: int  # the worker that its shard was cut for
    warm_up: bool = False  # a new worker's first Work: it belongs to no request
    crashes: int = 0
    exits: int = 0


@dataclass
class _Worker:
    """A running worker."""

    suspect: bool = False  # no progress for a while: the pool hedges its Works and sends it no others
    orders: dict[int, _PendingWork] = field(default_factory=dict)  # by seq, in sending order
    watch: ProgressWatch = field(default_factory=ProgressWatch)


class WorkerPool:
    """Used by the engine's thread alone."""

    def __init__(
        self,
        exchange: WorkerExchange,
        control: ControlSegment,
        workers: WorkerCores,
        hidden: int,
        limits: SilenceLimits | None = None,
        compute: Compute | None = None,
    ) -> None:
        """`workers`: the expected workers, for which shards are cut. `control`: their progress counters.
        `compute`: a Work in this process, as a worker on one core; raises IndexError, MemoryError."""
        self.workers = len(workers)
        self.cores = workers
        self._exchange = exchange
        self._lines = [control.line("worker", index) for index in range(self.workers)]
        self._hidden = hidden
        self._limits = limits or SilenceLimits()
        self._compute = compute
        self._beside: int | None = None  # the worker on this thread's core, for an announced share
        self._next = 0
        self._running: dict[int, _Worker] = {}  # by index
        self._unassigned: list[_PendingWork] = []  # while no worker runs

    def wait_ready(self, limit: float) -> None:
        """Wait until all workers have announced themselves; they import their kernels meanwhile."""
        self._exchange.wait_ready(self.workers, limit)
        self.update(0)

    def announce(self) -> None:
        """As HostPool.announce."""
        self._beside = self._exchange.announce()

    def submit(
        self,
        layer: int,
        shards: Sequence[HostShard],
        x: FloatArray,
        waits: bool = True,
        mask: Mask = DENSE,
    ) -> WorkerTicket:
        """As HostPool.submit."""
        ticket = WorkerTicket(self, x.shape)
        beside, self._beside = self._beside if waits else None, None
        for shard in shards:
            kept = x if len(shard.kept) == len(x) else x[shard.kept]
            work = self._work(layer, shard, kept, mask)
            ticket.shards[work.seq] = shard
            order = _PendingWork(work, ticket, shard.worker)
            if self._compute is not None and shard.worker == beside and self.cores.cores[beside] == 1:
                ticket.own = order
            else:
                self._assign(order)
        self._exchange.flush()
        return ticket

    def parts(self, ticket: WorkerTicket) -> list[Part]:
        """Wait for the partial sums, in shard order; until `release` they may be the workers' memory."""
        self._compute_own(ticket)
        limit = self._limits.pool
        deadline = time.monotonic() + limit
        while not ticket.complete:
            if ticket.failure:
                self.abandon(ticket)
                raise ShardFailed(ticket.failure)
            if self.update(50):
                deadline = time.monotonic() + limit
            elif time.monotonic() > deadline:
                raise PeerLost(f"no worker has started or answered for {limit:.0f} s")
        return [Part(ticket.partials[seq].y, shard.kept) for seq, shard in ticket.shards.items()]

    def release(self, ticket: WorkerTicket, fence: Fence) -> None:
        """The ticket's partial sums are not read any more once the device has passed the fence."""
        for index, partial in ticket.held:
            self._exchange.release(index, partial, fence)
        ticket.held.clear()

    def abandon(self, ticket: WorkerTicket) -> None:
        """Drop the ticket's Works that have no answer: its `result` will not be called."""
        self.release(ticket, None)
        for index, worker in self._running.items():
            for seq in [seq for seq, order in worker.orders.items() if order.ticket is ticket]:
                del worker.orders[seq]
                self._exchange.send(index, Abandon(seq))
        self._unassigned = [order for order in self._unassigned if order.ticket is not ticket]

    def update(self, wait_ms: int) -> bool:
        """As HostPool.update."""
        messages = self._exchange.receive(wait_ms)
        for index, message in messages:
            match message:
                case Partial():
                    self._on_partial(index, message)
                case WorkFailed():
                    self._clear_suspicion(self._running[index])
                    order = self._running[index].orders.pop(message.seq, None)
                    if order is not None:
                        order.ticket.failure = f"a worker refused its work: {message.text}"
                case Ready():
                    self._on_ready(index)
                case WorkerDied():
                    self._on_exit(index, message)
        if not messages:
            self._check_progress()
        return bool(messages)

    # --- assignment --------------------------------------------------------------------------------------

    def _assign(self, order: _PendingWork) -> None:
        """Send an order to the worker it was cut for, if able or no other is; else to the least loaded."""
        chosen = order.preferred
        if not self._is_able(chosen):
            able = self._able() or list(self._running)
            if not able:
                self._unassigned.append(order)
                return
            if chosen not in able:
                chosen = min(able, key=lambda index: (len(self._running[index].orders), index))
        self._send(order, chosen)

    def _send(self, order: _PendingWork, index: int) -> None:
        self._running[index].orders[order.work.seq] = order
        self._exchange.send(index, order.work)

    def _able(self) -> list[int]:
        """The workers that are able to compute a Work."""
        return [index for index in self._running if self._is_able(index)]

    def _is_able(self, index: int) -> bool:
        """The worker runs, has answered before, and is not suspect."""
        worker = self._running.get(index)
        return worker is not None and not worker.suspect and self._exchange.is_up(index)

    def _compute_own(self, ticket: WorkerTicket) -> None:
        """Where that fails a worker gets the shard: whatever is wrong with it, one answers for it."""
        order, ticket.own = ticket.own, None
        if order is None or self._compute is None:
            return
        started = time.perf_counter()
        try:
            ticket.partials[order.work.seq] = self._compute(order.work)
        except (IndexError, MemoryError):
            self._assign(order)
        ticket.busy = time.perf_counter() - started

    def _covered(self, order: _PendingWork) -> bool:
        """The order is answered, or an able worker has it."""
        seq = order.work.seq
        return seq in order.ticket.partials or any(seq in self._running[i].orders for i in self._able())

    def _work(self, layer: int, shard: HostShard, x: FloatArray, mask: Mask) -> Work:
        self._next += 1
        return shard.work(self._next, layer, x, mask)

    # --- messages ----------------------------------------------------------------------------------------

    def _on_ready(self, index: int) -> None:
        """Warm a new worker up, and send it the unassigned orders."""
        self._running[index] = _Worker()
        x = np.zeros((1, self._hidden), np.float32)
        work = self._work(0, empty_shard(index), x, DENSE)
        self._send(_PendingWork(work, WorkerTicket(self, x.shape), index, warm_up=True), index)
        unassigned, self._unassigned = self._unassigned, []
        for order in unassigned:
            self._assign(order)

    def _on_partial(self, index: int, partial: Partial) -> None:
        worker = self._running[index]
        self._clear_suspicion(worker)
        self._exchange.mark_up(index, partial.incarnation)
        order = worker.orders.pop(partial.seq, None)
        if order is None or partial.seq in order.ticket.partials or order.warm_up:
            self._exchange.release(index, partial, None)
            return  # abandoned, or a hedged Work's second answer
        order.ticket.held.append((index, partial))
        if partial.y.shape != order.work.x.shape:
            order.ticket.failure = f"a worker answered {order.work.x.shape} rows with {partial.y.shape}"
        else:
            order.ticket.partials[partial.seq] = partial
            order.ticket.busy = max(order.ticket.busy, partial.busy)

    def _on_exit(self, index: int, exited: WorkerDied) -> None:
        """Send the worker's orders to others; the one it was computing fails after too many exits."""
        worker = self._running.pop(index)
        for seq, order in worker.orders.items():
            if order.warm_up:
                continue
            if seq == exited.seq:
                order.exits += 1
                order.crashes += exited.crashed
            if order.crashes >= MAX_CRASHES or order.exits >= MAX_EXITS:
                order.ticket.failure = f"computing this request ended {order.exits} workers"
            elif not self._covered(order):
                self._assign(order)

    # --- silent workers ----------------------------------------------------------------------------------

    def _check_progress(self) -> None:
        limits = self._limits
        for index, worker in self._running.items():
            if not worker.orders:
                self._clear_suspicion(worker)
                continue
            rows = max(len(order.work.x) for order in worker.orders.values())
            up = self._exchange.is_up(index)
            limit = limits.stall + rows * limits.stall_row if up else limits.first_answer
            stalled = worker.watch.stalled(self._lines[index].ticks)
            if stalled > limit:
                self._exchange.report_hung(index)
            elif stalled > limit * HEDGE_AFTER and up:
                self._hedge(worker)

    def _hedge(self, slow: _Worker) -> None:
        """Send a suspect's Works to idle workers too; the first answer counts."""
        slow.suspect = True
        for order in slow.orders.values():
            idle = [index for index in self._able() if not self._running[index].orders]
            if idle and not self._covered(order):
                self._send(order, min(idle))

    @staticmethod
    def _clear_suspicion(worker: _Worker) -> None:
        worker.suspect = False
        worker.watch.reset()
