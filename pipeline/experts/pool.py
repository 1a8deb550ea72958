"""The pool of expert workers: divides a layer's host share, has it computed, adds it up, survives exits.

A share is divided into a Work for each of W workers, each usually computed by the worker it was cut for.
While that is being restarted, another one computes the Work: the result has the same bits. A Work that was
being computed when a worker crashed is tried once more; if that worker crashes too, the request fails, and
the pool continues. A worker that makes no progress is reported as hung, and killed.

Without workers (`--workers 0`) the pool has one that is this process itself: each share is one Work, computed
when its result is asked for, with the device's threads. No process has to be woken, and a crash of a kernel
ends the coordinator. With workers, this process computes a Work itself where the caller announces a share and
then only waits for it: that of the worker that sleeps on this thread's core, and need not be woken."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.arrays import FloatArray, sum_on_host
from pipeline.config import WorkerCores
from pipeline.counters import Elsewhere
from pipeline.errors import DiskFailed, PeerLost, ShardFailed
from pipeline.experts.disk_tier import DiskTier
from pipeline.experts.division import Divided, Divider, Split, empty_part
from pipeline.experts.peers import ChildServerSocket, ProgressWatch
from protocol.messages import Ready, WorkerDied, WorkFailed
from shm.control import ControlSegment
from shm.descriptor import SEQ, Descriptor, head_of
from shm.lane import CoordinatorLane, Slot
from shm.mask import Tally
from workers.kernels.native import WorkKernel

MAX_CRASHES = 2  # of workers while they computed one Work, by a crash
MAX_EXITS = 8  # the same by any cause: the system may kill workers when memory is short
# Seconds without a sign of progress.
STALL_LIMIT = 3.0  # without a tile: the worker is hung
STALL_LIMIT_ROW = 0.02  # added for each row that it computes
FIRST_ANSWER_LIMIT = 60.0  # instead of these, while it imports: that does not count as progress
POOL_LIMIT = 120.0  # without a message from any worker: the engine fails


@dataclass(eq=False)
class Answer:
    """A worker's partial sum for a Work."""

    seq: int
    generation: int
    busy: float  # seconds the worker computed, without waiting and transport
    y: FloatArray  # [R, H]
    tally: Tally
    lane: CoordinatorLane | None = None  # where y lies in one, until it is released
    slot: Slot | None = None


@dataclass(eq=False)
class Task:
    """A Work for a worker."""

    seq: int
    descriptor: Descriptor
    ticket: Ticket
    preferred: int  # the worker that it was cut for
    warm_up: bool = False  # a new worker's first Work: it belongs to no request
    crashes: int = 0
    exits: int = 0


@dataclass(eq=False)
class Ticket:
    """A layer's host share that the pool has accepted."""

    pool: HostPool
    x: FloatArray  # [R, H]
    tiles: int = 0  # of the share
    tasks: list[Task] = field(default_factory=list)  # in the workers' order; without any the result is zeros
    answers: dict[int, Answer] = field(default_factory=dict)  # by seq
    own: list[Task] = field(default_factory=list)  # which this process computes
    held: list[Task] = field(default_factory=list)  # which wait for experts that are read from disk
    busy: float = 0.0  # seconds of computing, of the slowest worker; set with the result
    elsewhere: dict[str, Elsewhere] = field(default_factory=dict)  # by machine; set with the result
    failure: str = ""  # the reason why it can never be complete
    dropped: bool = False

    @property
    def complete(self) -> bool:
        """Every Work is answered."""
        return len(self.answers) == len(self.tasks)

    @property
    def empty(self) -> bool:
        """There is nothing to be computed."""
        return not self.tasks

    @property
    def needed(self) -> bool:
        """A Work without an answer that counts reads x."""
        return not (self.dropped or self.complete)

    @property
    def tally(self) -> Tally:
        """The channels and sums that the share's mask left out, after the result."""
        return Tally.of(self.answers[task.seq].tally for task in self.tasks)

    def result(self) -> FloatArray:
        """Wait for the partial sums and add them in the workers' order: float32 [R, H]. Raises ShardFailed
        where a Work cannot be computed, PeerLost where the engine cannot continue."""
        parts = self.pool.parts(self)
        y = parts[0] if len(self.tasks) == len(self.own) == 1 else sum_on_host(parts, self.x.shape)
        self.pool.release(self)
        return y

    def begin_held(self) -> None:
        """Wait until each Work's experts are in memory, and begin those that waited. Raises DiskFailed."""
        self.pool.begin_held(self)

    def parts(self) -> list[FloatArray]:
        """Wait for the partial sums, in the workers' order: float32 [R, H] each, perhaps the workers' memory
        until `release`. Raises as `result`."""
        return self.pool.parts(self)

    def release(self) -> None:
        """Its partial sums are not read any more, but perhaps by work that the device was given."""
        self.pool.release(self, on_device=True)

    def abandon(self) -> None:
        """Drop the Works that have no answer: `result` will not be called."""
        self.pool.abandon(self)


class Carrier:
    """Carries Works to workers and their answers back; this one has no workers. Used by the engine's
    thread alone."""

    hidden = 0  # numbers of a row

    def send(self, index: int, task: Task) -> None:
        """Send to a worker, which may notice it only after `flush`; dropped where it has exited (`receive`
        delivers that). x must not change until its answer. Raises PeerLost where a running worker takes no
        message for too long."""
        raise NotImplementedError

    def abandon(self, index: int, seq: int) -> None:
        """This Work of a worker is no longer needed: it is skipped if it has not been started."""

    def announce(self) -> int | None:
        """A layer's Works follow in a moment: wake the workers, where that takes time, but for one that
        sleeps on this thread's core. The index of that one, where it is known."""
        return None

    def flush(self) -> None:
        """Wake the workers to which Works were sent, where `send` has not."""

    def receive(self, wait_ms: int) -> list[tuple[int, object]]:
        """Return messages as (index, message): Answer, WorkFailed, and in order among them the Ready of each
        new worker and the WorkerDied of each that exited; wait at most `wait_ms` for the first. Raises
        PeerLost where the engine cannot continue."""
        return []

    def release(self, answer: Answer, on_device: bool = False) -> None:
        """The y of an answer is not read any more, but perhaps by work that the device was given."""

    def close(self) -> None:
        """Release what it has made."""

    def stats(self) -> dict[str, Any]:
        """Return its name, and figures. May be called by any thread."""
        raise NotImplementedError


Compute = Callable[[Descriptor, FloatArray], Answer]  # a Work of generation 0; raises IndexError, MemoryError


def computing(kernel: WorkKernel, slowdown: float = 1.0) -> Compute:
    """Return what computes Works in this process. `slowdown` > 1 waits after each, to emulate a slower
    host."""

    def compute(descriptor: Descriptor, x: FloatArray) -> Answer:
        started, y = time.perf_counter(), np.empty(x.shape, np.float32)
        tally = kernel.compute(descriptor, x, y)
        busy = time.perf_counter() - started
        if slowdown > 1:
            time.sleep(busy * (slowdown - 1))
        return Answer(0, 0, busy * slowdown, y, tally)

    return compute


@dataclass
class _Worker:
    """A running worker, as the pool sees it."""

    tasks: dict[int, Task] = field(default_factory=dict)  # by seq, in sending order
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
    ) -> None:
        """`cores`: of the expected workers, among which `divider` divides. `compute`: in this process: all
        Works where there is no carrier to workers; otherwise one now and then, as a worker on one core.
        `control`: the workers' progress counters."""
        self.cores = cores
        self.workers = 0 if carrier is None else len(cores)  # processes
        self._divider = divider
        self._compute = compute
        self._socket, self._carrier = socket, carrier or Carrier()
        self._lines = [control.line("worker", index) for index in range(self.workers)] if control else []
        self._beside: int | None = None  # the worker on this thread's core, for an announced share
        self._next = 1  # seq
        self._running: dict[int, _Worker] = {}  # by index
        self._unassigned: list[Task] = []  # while no worker runs
        self.tier: DiskTier | None = None  # of a store of which only some experts are in memory
        self.interruptible = False  # a step that waits may raise StepInterrupted

    def wait_ready(self, limit: float) -> None:
        """Wait until all workers have announced themselves; they import their kernels meanwhile. Raises
        PeerLost after `limit` seconds."""
        if self._socket is not None:
            self._socket.wait_ready(self.workers, limit)
            self.update(0)

    def announce(self) -> None:
        """A layer's share is probably submitted in a moment: wake the workers on other cores."""
        if self._compute is not None:
            self._beside = self._carrier.announce()

    def submit(self, split: Split, x: FloatArray, waits: bool = True) -> Ticket:
        """Begin the host's share and return at once. x: float32 [R, H], unchanged until the ticket's result.
        `waits`: the caller only waits for the result."""
        return self.submit_parts(self._divider.divide(split, self._next), x, waits)

    def submit_empty(self, x: FloatArray) -> Ticket:
        """Submit a Work without items for every worker: its result takes a round trip."""
        parts = [empty_part(worker, self._next + worker, len(x)) for worker in range(self.workers)]
        return self.submit_parts(Divided(parts, 0), x, False)

    def submit_parts(self, divided: Divided, x: FloatArray, waits: bool = True) -> Ticket:
        """Begin a share that was divided with the next seqs; as `submit`."""
        ticket = Ticket(self, np.ascontiguousarray(x, np.float32), divided.tiles)
        beside, self._beside = self._beside if waits else None, None
        for worker, descriptor in divided.parts:
            self._begin(Task(self._next + worker, descriptor, ticket, worker), beside)
        self._next += len(self.cores)
        self._carrier.flush()
        return ticket

    def submit_in_turn(self, descriptors: Sequence[Descriptor], x: FloatArray, waits: bool = True) -> Ticket:
        """Begin a share that was divided for any number of workers, which take its Works in turn; as
        `submit`. Writes their seqs."""
        ticket = Ticket(self, np.ascontiguousarray(x, np.float32))
        beside, self._beside = self._beside if waits else None, None
        for number, descriptor in enumerate(descriptors):
            head_of(descriptor)[SEQ] = self._next + number
            task = Task(self._next + number, descriptor, ticket, number % len(self.cores))
            self._begin(task, beside)
        self._next += len(descriptors)
        self._carrier.flush()
        return ticket

    def parts(self, ticket: Ticket) -> list[FloatArray]:
        """Wait for the partial sums, in the workers' order; until `release` they may be the workers'
        memory."""
        self.begin_held(ticket)
        for task in ticket.own:
            self._compute_own(task)
        deadline = time.monotonic() + POOL_LIMIT
        while not ticket.complete:
            if ticket.failure:
                self.abandon(ticket)
                raise ShardFailed(ticket.failure)
            if self.update(50):
                deadline = time.monotonic() + POOL_LIMIT
            elif time.monotonic() > deadline:
                raise PeerLost(f"no worker has started or answered for {POOL_LIMIT:.0f} s")
        return [ticket.answers[task.seq].y for task in ticket.tasks]

    def release(self, ticket: Ticket, on_device: bool = False) -> None:
        """The ticket's partial sums are not read any more, but perhaps by work that the device was given."""
        for answer in ticket.answers.values():
            self._carrier.release(answer, on_device)

    def abandon(self, ticket: Ticket) -> None:
        """Drop the ticket's Works that have no answer: its `result` will not be called."""
        ticket.dropped = True
        self.release(ticket)
        for index, worker in self._running.items():
            for seq in [seq for seq, task in worker.tasks.items() if task.ticket is ticket]:
                del worker.tasks[seq]
                self._carrier.abandon(index, seq)
        self._unassigned = [task for task in self._unassigned if task.ticket is not ticket]

    def update(self, wait_ms: int) -> bool:
        """Handle the workers' messages, starts and exits; False if nothing has arrived."""
        messages = self._carrier.receive(wait_ms)
        for index, message in messages:
            match message:
                case Answer():
                    self._on_answer(index, message)
                case WorkFailed():
                    self._running[index].watch.reset()
                    task = self._running[index].tasks.pop(message.seq, None)
                    if task is not None:
                        task.ticket.failure = f"a worker refused its work: {message.text}"
                case Ready():
                    self._on_ready(index)
                case WorkerDied():
                    self._on_exit(index, message)
        if not messages:
            self._check_progress()
        return bool(messages)

    @property
    def _peers(self) -> ChildServerSocket:
        assert self._socket is not None
        return self._socket

    # --- assignment --------------------------------------------------------------------------------------

    def _begin(self, task: Task, beside: int | None) -> None:
        """Begin a ticket's next task."""
        task.ticket.tasks.append(task)
        self._place(task, beside)

    def _place(self, task: Task, beside: int | None = None) -> None:
        """Have a task computed: here where no worker need be woken for it; later where an expert of it is on
        disk."""
        if self.tier is not None:
            if (placed := self.tier.placed(task.descriptor)) is None:
                task.ticket.held.append(task)
                return
            task.descriptor = placed
        if not self.workers or (task.preferred == beside and self.cores.cores[beside] == 1):
            task.ticket.own.append(task)
        else:
            self._assign(task)

    def begin_held(self, ticket: Ticket) -> None:
        """Begin the tasks that wait for the disk as their experts land, and compute own ones meanwhile.
        Raises DiskFailed."""
        while ticket.held:
            assert self.tier is not None
            if self.begin_stored(ticket):
                continue
            if own := next((task for task in ticket.own if task.seq not in ticket.answers), None):
                self._compute_own(own)
                continue
            try:
                self.tier.wait(task.descriptor for task in ticket.held)
            except DiskFailed:
                self.abandon(ticket)
                raise
            self.update(0)

    def begin_stored(self, ticket: Ticket) -> bool:
        """Begin those of the tasks that wait for the disk whose experts have landed; False where there are
        none."""
        held, ticket.held = ticket.held, []
        for task in held:
            self._place(task)
        if begun := len(ticket.held) < len(held):
            self._carrier.flush()
        return begun

    def _assign(self, task: Task) -> None:
        """Send a task to the worker it was cut for if that is up or no other is; else to the least loaded."""
        chosen = task.preferred
        if chosen not in self._running or not self._peers.is_up(chosen):
            able = [index for index in self._running if self._peers.is_up(index)] or list(self._running)
            if not able:
                self._unassigned.append(task)
                return
            if chosen not in able:
                chosen = min(able, key=lambda index: (len(self._running[index].tasks), index))
        self._send(task, chosen)

    def _send(self, task: Task, index: int) -> None:
        self._running[index].tasks[task.seq] = task
        self._carrier.send(index, task)

    def _compute_own(self, task: Task) -> None:
        """Compute a Work here. Where that fails a worker gets it, if there is one: whatever is wrong with it,
        one answers for it."""
        ticket = task.ticket
        if self._compute is None or task.seq in ticket.answers:
            return
        try:
            answer = self._compute(task.descriptor, ticket.x)
        except (IndexError, MemoryError) as e:
            if self.workers:
                self._assign(task)
            else:
                ticket.failure = str(e) or "not enough memory"
            return
        ticket.answers[task.seq] = answer
        ticket.busy = max(ticket.busy, answer.busy)

    # --- messages ----------------------------------------------------------------------------------------

    def _on_ready(self, index: int) -> None:
        """Warm a new worker up, and send it the unassigned tasks."""
        self._running[index] = _Worker()
        _, descriptor = empty_part(index, self._next, rows=0)
        nobody = Ticket(self, np.zeros((0, self._carrier.hidden), np.float32))
        self._send(Task(self._next, descriptor, nobody, index, warm_up=True), index)
        self._next += 1
        unassigned, self._unassigned = self._unassigned, []
        for task in unassigned:
            self._assign(task)

    def _on_answer(self, index: int, answer: Answer) -> None:
        worker = self._running[index]
        worker.watch.reset()
        self._peers.mark_up(index, answer.generation)
        task = worker.tasks.pop(answer.seq, None)
        if task is None or task.warm_up:  # None: it was abandoned
            self._carrier.release(answer)
            return
        ticket = task.ticket
        if answer.y.shape != ticket.x.shape:
            self._carrier.release(answer)
            ticket.failure = f"a worker answered {ticket.x.shape} rows with {answer.y.shape}"
            return
        ticket.answers[answer.seq] = answer
        ticket.busy = max(ticket.busy, answer.busy)

    def _on_exit(self, index: int, exited: WorkerDied) -> None:
        """Send the worker's tasks to others; the one it was computing fails after too many exits."""
        worker = self._running.pop(index)
        for seq, task in worker.tasks.items():
            if task.warm_up:
                continue
            if seq == exited.seq:
                task.exits += 1
                task.crashes += exited.crashed
            if task.crashes >= MAX_CRASHES or task.exits >= MAX_EXITS:
                task.ticket.failure = f"computing this request ended {task.exits} workers"
            else:
                self._assign(task)

    def _check_progress(self) -> None:
        """Report workers that have tasks and make no progress."""
        for index, worker in self._running.items():
            if not worker.tasks:
                worker.watch.reset()
                continue
            rows = max(len(task.ticket.x) for task in worker.tasks.values())
            up = self._peers.is_up(index)
            limit = STALL_LIMIT + rows * STALL_LIMIT_ROW if up else FIRST_ANSWER_LIMIT
            if worker.watch.stalled(self._lines[index].ticks) > limit:
                self._peers.report_hung(index)
