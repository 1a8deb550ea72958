"""An expert worker's end of the exchange of Works and answers with the coordinator: over ZeroMQ, or through
the lane that the coordinator has made for it (`shm/lane.py`), from when it says so.

Each Work is answered on the way on which it came; a refusal always over ZeroMQ. While the worker waits for
its lane's doorbell, it looks for messages of the supervisor every SLICE seconds."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from protocol.messages import Abandon, AttachLane, Partial, Work, WorkFailed
from shm.descriptor import HEADER, SEQ, X_ROWS, Descriptor, head_of
from shm.formats import Float32
from shm.lane import Slot, WorkerLane, library
from shm.mask import Tally
from workers.child_endpoint import ChildEndpoint

SLICE = 0.1  # seconds, at most, between two looks for messages that no doorbell announces
AWAKE = 0.001  # seconds awake for a Work that was announced: longer than the coordinator plans it

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Task:
    """A Work that was taken: its numbers are not checked yet. x and y: its rows, or more."""

    seq: int
    descriptor: Descriptor
    x: Float32
    y: Float32
    slot: Slot | None = None  # in the lane

    @property
    def warm_up(self) -> bool:
        return head_of(self.descriptor)[X_ROWS] == 0


class WorkExchange:
    """Takes Works from the coordinator and answers them. Used by one thread."""

    def __init__(self, peer: ChildEndpoint, hidden: int) -> None:
        self._peer, self._hidden = peer, hidden
        self._waiting: deque[Task] = deque()  # that came over ZeroMQ
        self._lane: WorkerLane | None = None
        self._announced = False  # the doorbell rang before there was a Work
        self._looked_at = 0.0  # monotonic seconds: the last look for messages

    def next(self) -> Task | None:
        """The next Work; None if none has come for a while, or the process is to stop. In a lane its arrays
        are valid until its answer. Raises ShmError where the lane cannot be mapped."""
        lane = self._lane
        if lane is None:
            self._receive(wait=not self._waiting)
            return self._waiting.popleft() if self._waiting else None
        if (slot := lane.take()) is None:
            rang = lane.wait(SLICE, AWAKE if self._announced else 0.0)
            slot = lane.take()
            self._announced = rang and slot is None
        if time.monotonic() - self._looked_at > SLICE:
            self._receive(wait=False)
        if slot is None:
            return None
        return Task(head_of(slot.descriptor)[SEQ], slot.descriptor, lane.x(slot), slot.y, slot)

    def answer(self, task: Task, busy: float, tally: Tally) -> None:
        """Answer a Work: y is computed."""
        if task.slot is not None and self._lane is not None:
            self._lane.answer(task.slot, busy, tally)
        else:
            left_out = tally.mass, tally.left, tally.kept, tally.channels
            self._peer.send(Partial(task.seq, self._peer.generation, busy, task.y, *left_out))

    def refuse(self, task: Task, text: str) -> None:
        """Refuse a Work."""
        self._peer.send(WorkFailed(task.seq, self._peer.generation, text or "not enough memory"))
        if task.slot is not None and self._lane is not None:
            self._lane.skip(task.slot)

    def _receive(self, wait: bool) -> None:
        for message in self._peer.receive(wait):
            match message:
                case Work():
                    self._put(message)
                case Abandon():
                    self._waiting = deque(task for task in self._waiting if task.seq != message.seq)
                case AttachLane():
                    self._attach(message)
                case _:
                    log.warning("unexpected %s", type(message).__name__)
        self._looked_at = time.monotonic()

    def _put(self, work: Work) -> None:
        """Queue a Work of a message; one whose arrays do not fit each other is refused."""
        descriptor, x = work.descriptor, work.x
        if len(descriptor) < HEADER:
            log.warning("dropped a Work without a header")
            return
        head = head_of(descriptor)
        task = Task(head[SEQ], descriptor, x, np.empty(x.shape, np.float32))
        if x.shape == (head[X_ROWS], self._hidden):
            self._waiting.append(task)
        else:
            self.refuse(task, f"x of {x.shape} instead of {(head[X_ROWS], self._hidden)}")

    def _attach(self, message: AttachLane) -> None:
        self._lane = WorkerLane(library(), message.hall, message.lane, self._peer.generation)
