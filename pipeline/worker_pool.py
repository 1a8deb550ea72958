"""The pool of expert workers: submits a layer's host share, collects the partial sums."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeline.errors import PeerLost, PipelineError
from pipeline.peers import PeerSocket
from pipeline.policies.view import FloatArray, Phase
from pipeline.runs import Run, cut_into_runs, empty_run
from pipeline.split import HostShare
from protocol.messages import Partial, Work, WorkFailed

ANSWER_LIMIT = 120.0  # seconds without any answer after which a worker is given up


@dataclass
class Ticket:
    """A layer's host share under way."""

    rows: int
    hidden: int
    runs: dict[int, Run] = field(default_factory=dict)  # by seq, in run order
    partials: dict[int, FloatArray] = field(default_factory=dict)
    busy: float = 0.0  # seconds, the longest of the workers

    @property
    def complete(self) -> bool:
        return len(self.partials) == len(self.runs)


class WorkerPool:
    """One run to each worker, in order. Used by the engine's thread alone."""

    def __init__(self, socket: PeerSocket, workers: int) -> None:
        self.workers = workers
        self._socket = socket
        self._next = 0
        self._open: dict[int, Ticket] = {}  # by seq

    def wait_ready(self, limit: float) -> None:
        """Wait for all workers to announce themselves. Raises PeerLost."""
        self._socket.wait_ready(self.workers, limit)

    def wake(self, hidden: int) -> None:
        """Have every worker make itself ready to compute (it imports torch with its first Work); waits for
        nothing."""
        self.submit_runs(0, [empty_run()] * self.workers, np.zeros((1, hidden), np.float32))

    def submit(self, layer: int, share: HostShare, x: FloatArray, phase: Phase) -> Ticket:
        """Send the share's runs and return at once. x: float32 [R, H], unchanged until `result`."""
        return self.submit_runs(layer, cut_into_runs(share, self.workers, phase, len(x)), x)

    def submit_runs(self, layer: int, runs: Sequence[Run], x: FloatArray) -> Ticket:
        """Send runs, at most one for each worker."""
        ticket = Ticket(*x.shape)
        for worker, run in enumerate(runs):
            kept = x if len(run.kept) == len(x) else x[run.kept]
            work = Work(self._next, layer, run.items, run.offsets, run.rows, run.weights, kept)
            self._next += 1
            ticket.runs[work.seq] = run
            self._open[work.seq] = ticket
            self._socket.send(worker, work)
        return ticket

    def result(self, ticket: Ticket) -> FloatArray:
        """The sum of the ticket's partials: float32 [R, H], added in run order. Raises PeerLost."""
        deadline = time.monotonic() + ANSWER_LIMIT
        while not ticket.complete:
            if self.update(50):
                deadline = time.monotonic() + ANSWER_LIMIT
            elif time.monotonic() > deadline:
                raise PeerLost(f"no worker has answered for {ANSWER_LIMIT:.0f} s")
        y = np.zeros((ticket.rows, ticket.hidden), np.float32)
        for seq, run in ticket.runs.items():
            y[run.kept] += ticket.partials[seq]
        return y

    def update(self, wait_ms: int) -> bool:
        """Take in partials; True if there were any. A partial nobody waits for is dropped."""
        any_came = False
        for _, message in self._socket.receive(wait_ms):
            match message:
                case Partial():
                    ticket = self._open.pop(message.seq, None)
                    if ticket is not None:
                        ticket.partials[message.seq] = message.y
                        ticket.busy = max(ticket.busy, message.busy)
                        any_came = True
                case WorkFailed():
                    raise PipelineError(f"a worker refused its work: {message.text}")
        return any_came
