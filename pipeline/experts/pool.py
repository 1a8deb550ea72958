"""The pool of expert workers: divides a layer's host share, has it computed, adds the partial sums, survives
exits.

A share is divided into a Work for each of W workers, each usually computed by the worker it was cut for.
While that is being restarted, another one computes the Work: the result has the same bits. A Work that was
being computed when a worker crashed is tried once more; if that worker crashes too, the request fails, and
the pool continues.

Without workers (`--workers 0`) the pool has one that is this process itself: each share is one Work, computed
when its result is asked for, with the device's threads. No process has to be woken, and a crash of a kernel
ends the coordinator. With workers, this process computes a Work itself where the caller announces a share and
then only waits for it: that of the worker that sleeps on this thread's core, and need not be woken.

A worker that makes no progress is first *suspect*: an idle worker gets the same Works (the pool hedges), and
the suspect gets no new ones until it answers. After the whole limit it is reported as hung and killed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pipeline.arrays import FloatArray
from pipeline.coordinator_config import WorkerCores
from pipeline.device import Device, Fence
from pipeline.device.partial_sums import sum_on_host
from pipeline.errors import PeerLost, ShardFailed
from pipeline.experts.carriers import Answer, Carrier, Order
from pipeline.experts.division import Divided, Divider, HostPlan, empty_part
from pipeline.experts.peers import ChildServerSocket
from pipeline.experts.progress import ProgressWatch, SilenceLimits
from protocol.messages import Ready, WorkerDied, WorkFailed
from shm.control import ControlSegment
from shm.descriptor import Descriptor
from shm.mask import Tally
from shm.store import Store
from workers.kernels.host import HostKernel

if TYPE_CHECKING:
    from torch import Tensor

Compute = Callable[[Descriptor, FloatArray], Answer]  # a Work of generation 0; raises IndexError, MemoryError

HEDGE_AFTER = 1 / 6  # of a worker's stall limit, after which an idle worker gets the same Works
MAX_CRASHES = 2  # of workers while they computed one Work, by a crash
MAX_EXITS = 8  # the same by any cause: the system may kill workers when memory is short


def computing(kernel: HostKernel, store: Store, slowdown: float = 1.0) -> Compute:
    """Computes Works in this process. `slowdown` > 1 waits after each, to emulate a slower host."""

    def compute(descriptor: Descriptor, x: FloatArray) -> Answer:
        started, y = time.perf_counter(), np.empty(x.shape, np.float32)
        tally = kernel.compute_work(descriptor, x, store, y)
        busy = time.perf_counter() - started
        if slowdown > 1:
            time.sleep(busy * (slowdown - 1))
        return Answer(0, 0, busy * slowdown, y, tally)

    return compute


@dataclass(eq=False)
class Ticket:
    """A layer's host share that the pool has accepted."""

    pool: HostPool
    x: FloatArray  # [R, H]
    tiles: int = 0  # of the share
    orders: list[Order] = field(
        default_factory=list
    )  # in the workers' order; without any the result is zeros
    answers: dict[int, Answer] = field(default_factory=dict)  # by seq
    own: list[Order] = field(default_factory=list)  # which this process computes
    busy: float = 0.0  # seconds of computing, of the slowest worker; set with the result
    failure: str = ""  # the reason why it can never be complete
    needed: bool = True  # an order without an answer reads x

    @property
    def complete(self) -> bool:
        return len(self.answers) == len(self.orders)

    @property
    def tally(self) -> Tally:
        """What the share's mask left out, after the result."""
        return Tally.of(self.answers[order.seq].tally for order in self.orders)

    def result(self) -> FloatArray:
        """Wait for the partial sums and add them in the workers' order: float32 [R, H]. Raises ShardFailed
        where a Work cannot be computed, PeerLost where the engine cannot continue."""
        parts = self.pool.parts(self)
        y = parts[0] if len(self.orders) == len(self.own) == 1 else sum_on_host(parts, self.x.shape)
        self.pool.release(self, None)
        return y

    def result_on(self, device: Device) -> Tensor:
        """The same on the device, with the same bits."""
        y, fence = device.add_parts(self.pool.parts(self), self.x.shape)
        self.pool.release(self, fence)
        return y

    def abandon(self) -> None:
        """Drop the Works that have no answer: `result` will not be called."""
        self.pool.abandon(self)


@dataclass
class _Worker:
    """A running worker."""

    suspect: bool = False  # no progress for a while: the pool hedges its Works and sends it no others
    orders: dict[int, Order] = field(default_factory=dict)  # by seq, in sending order
    watch: ProgressWatch = field(default_factory=ProgressWatch)


class HostPool:
    """Computes the host's share of layers. Used by the engine's thread alone."""

    def __init__(
        self,
        divider: Divider,
        cores: WorkerCores,
        compute: Compute | None,
        socket: ChildServerSocket | None = None,
        carrier: Carrier | None = None,
        control: ControlSegment | None = None,
        limits: SilenceLimits | None = None,
    ) -> None:
        """`cores`: of the expected workers, among which `divider` divides. `compute`: in this process: all
        Works where there is no carrier to workers; otherwise one now and then, as a worker on one core.
        `control`: the workers' progress counters."""
        self.cores = cores
        self.workers = 0 if carrier is None else len(cores)  # processes
        self._divider = divider
        self._compute = compute
        self._socket, self._carrier = socket, carrier
        self._lines = [control.line("worker", index) for index in range(self.workers)] if control else []
        self._limits = limits or SilenceLimits()
        self._beside: int | None = None  # the worker on this thread's core, for an announced share
        self._next = 1  # seq
        self._running: dict[int, _Worker] = {}  # by index
        self._unassigned: list[Order] = []  # while no worker runs

    def wait_ready(self, limit: float) -> None:
        """Wait until all workers have announced themselves; they import their kernels meanwhile. Raises
        PeerLost after `limit` seconds."""
        if self._socket is not None:
            self._socket.wait_ready(self.workers, limit)
            self.update(0)

    def announce(self) -> None:
        """A layer's share is probably submitted in a moment: wake the workers on other cores."""
        if self._carrier is not None and self._compute is not None:
            self._beside = self._carrier.announce()

    def submit(self, plan: HostPlan, x: FloatArray, waits: bool = True) -> Ticket:
        """Begin a share and return at once. x: float32 [R, H], unchanged until the ticket's result. `waits`:
        the caller only waits for the result."""
        return self.submit_parts(self._divider.divide(plan, self._next), x, waits)

    def submit_empty(self, x: FloatArray) -> Ticket:
        """A Work without items for every worker: its result takes a round trip."""
        parts = [empty_part(worker, self._next + worker, len(x)) for worker in range(self.workers)]
        return self.submit_parts(Divided(parts, 0), x, False)

    def submit_parts(self, divided: Divided, x: FloatArray, waits: bool = True) -> Ticket:
        """As `submit`, of a share that was divided with the next seqs."""
        ticket = Ticket(self, np.ascontiguousarray(x, np.float32), divided.tiles)
        beside, self._beside = self._beside if waits else None, None
        for worker, descriptor in divided.parts:
            order = Order(self._next + worker, descriptor, ticket, worker)
            ticket.orders.append(order)
            if self._carrier is None or (worker == beside and self.cores.cores[worker] == 1):
                ticket.own.append(order)
            else:
                self._assign(order)
        self._next += len(self.cores)
        if self._carrier is not None:
            self._carrier.flush()
        return ticket

    def parts(self, ticket: Ticket) -> list[FloatArray]:
        """Wait for the partial sums, in the workers' order; until `release` they may be the workers'
        memory."""
        for order in ticket.own:
            self._compute_own(order)
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
        ticket.needed = False
        return [ticket.answers[order.seq].y for order in ticket.orders]

    def release(self, ticket: Ticket, fence: Fence) -> None:
        """The ticket's partial sums are not read any more once the device has passed the fence."""
        ticket.needed = False
        for answer in ticket.answers.values() if self._carrier is not None else ():
            self._carrier.release(answer, fence)  # type: ignore[union-attr]

    def abandon(self, ticket: Ticket) -> None:
        """Drop the ticket's Works that have no answer: its `result` will not be called."""
        self.release(ticket, None)
        for index, worker in self._running.items():
            for seq in [seq for seq, order in worker.orders.items() if order.ticket is ticket]:
                del worker.orders[seq]
                self._carried.abandon(index, seq)
        self._unassigned = [order for order in self._unassigned if order.ticket is not ticket]

    def update(self, wait_ms: int) -> bool:
        """Handle the workers' messages, starts and exits; False if nothing has arrived."""
        if self._carrier is None:
            return False
        messages = self._carrier.receive(wait_ms)
        for index, message in messages:
            match message:
                case Answer():
                    self._on_answer(index, message)
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

    @property
    def _carried(self) -> Carrier:
        assert self._carrier is not None
        return self._carrier

    @property
    def _peers(self) -> ChildServerSocket:
        assert self._socket is not None
        return self._socket

    # --- assignment --------------------------------------------------------------------------------------

    def _assign(self, order: Order) -> None:
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

    def _send(self, order: Order, index: int) -> None:
        self._running[index].orders[order.seq] = order
        self._carried.send(index, order)

    def _able(self) -> list[int]:
        """The workers that are able to compute a Work."""
        return [index for index in self._running if self._is_able(index)]

    def _is_able(self, index: int) -> bool:
        """The worker runs, has answered before, and is not suspect."""
        worker = self._running.get(index)
        return worker is not None and not worker.suspect and self._peers.is_up(index)

    def _compute_own(self, order: Order) -> None:
        """Where that fails a worker gets the Work, if there is one: whatever is wrong with it, one answers
        for it."""
        ticket = order.ticket
        if self._compute is None or order.seq in ticket.answers:
            return
        try:
            answer = self._compute(order.descriptor, ticket.x)
        except (IndexError, MemoryError) as e:
            if self._carrier is None:
                ticket.failure = str(e) or "not enough memory"
            else:
                self._assign(order)
            return
        ticket.answers[order.seq] = answer
        ticket.busy = max(ticket.busy, answer.busy)

    def _covered(self, order: Order) -> bool:
        """The order is answered, or an able worker has it."""
        return order.seq in order.ticket.answers or any(
            order.seq in self._running[i].orders for i in self._able()
        )

    # --- messages ----------------------------------------------------------------------------------------

    def _on_ready(self, index: int) -> None:
        """Warm a new worker up, and send it the unassigned orders."""
        self._running[index] = _Worker()
        _, descriptor = empty_part(index, self._next, rows=0)
        nobody = Ticket(self, np.zeros((0, self._carried.hidden), np.float32))
        self._send(Order(self._next, descriptor, nobody, index, warm_up=True), index)
        self._next += 1
        unassigned, self._unassigned = self._unassigned, []
        for order in unassigned:
            self._assign(order)

    def _on_answer(self, index: int, answer: Answer) -> None:
        worker = self._running[index]
        self._clear_suspicion(worker)
        self._peers.mark_up(index, answer.generation)
        order = worker.orders.pop(answer.seq, None)
        if order is None or answer.seq in order.ticket.answers or order.warm_up:
            self._carried.release(answer, None)
            return  # abandoned, or a hedged Work's second answer
        ticket = order.ticket
        if answer.y.shape != ticket.x.shape:
            self._carried.release(answer, None)
            ticket.failure = f"a worker answered {ticket.x.shape} rows with {answer.y.shape}"
            return
        ticket.answers[answer.seq] = answer
        ticket.busy = max(ticket.busy, answer.busy)
        ticket.needed = not ticket.complete

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
            rows = max(len(order.ticket.x) for order in worker.orders.values())
            up = self._peers.is_up(index)
            limit = limits.stall + rows * limits.stall_row if up else limits.first_answer
            stalled = worker.watch.stalled(self._lines[index].ticks)
            if stalled > limit:
                self._peers.report_hung(index)
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
