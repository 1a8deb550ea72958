"""An expert worker's end of the exchange of Work and answers with the coordinator: over ZeroMQ, and through
the ring that the coordinator may have made for it (`shm/ring.py`). Either way the Work is computed in a slot:
the ring's own, or a copy.

Each Work is answered on the way on which it came; a refusal always over ZeroMQ. While the worker waits for
its ring's doorbell, it looks for messages of the supervisor every SLICE seconds.
"""

from __future__ import annotations

import logging
import time
from collections import deque

from protocol.messages import Abandon, AttachRing, Work, WorkFailed
from shm.doorbell import library
from shm.errors import ShmError
from shm.ring import WorkerRing
from shm.slot import OwnSlot, Slot
from workers.child_endpoint import POLL_LIMIT_MS, ChildEndpoint

SLICE = 0.1  # seconds, at most, between two looks for messages that no doorbell announces
AWAKE = 0.001  # seconds awake for a Work that was announced: longer than the coordinator plans it
LETTER_MS = 10  # milliseconds of one wait for a message that was announced: Work may come meanwhile

log = logging.getLogger(__name__)


class WorkExchange:
    """Used by one thread."""

    def __init__(self, peer: ChildEndpoint, hidden: int) -> None:
        self._peer = peer
        self._waiting: deque[Work] = deque()  # that came over ZeroMQ
        self._own = OwnSlot(hidden)  # for them
        self._ring: WorkerRing | None = None
        self._before_ring = 0  # messages of the coordinator before the ring was attached
        self._announced = False  # the doorbell rang before there was a Work
        self._looked_at = 0.0  # monotonic seconds: the last look for messages

    def next(self) -> Slot | None:
        """The next Work; None if none has come for a while, or the process is to stop. Its slot is valid
        until its answer."""
        ring = self._ring
        if ring is None:
            self._receive(wait=not self._waiting)
        else:
            if (slot := ring.take()) is None and not self._waiting:
                rang = False
                if self._missing(ring):
                    self._receive(wait=True, limit_ms=LETTER_MS)
                else:
                    rang = ring.wait(SLICE, AWAKE if self._announced else 0.0)
                slot = ring.take()
                self._announced = rang and slot is None
            if self._missing(ring) or time.monotonic() - self._looked_at > SLICE:
                self._receive(wait=False)
            if slot is not None:
                return slot
        return self._copied(self._waiting.popleft()) if self._waiting else None

    def answer(self, slot: Slot, busy: float) -> None:
        """Answer the Work that `next` has returned last: y and tally are in its slot."""
        ring = self._ring
        if ring is not None and ring.holds(slot):
            ring.answer(slot, busy)
        else:
            slot.busy = busy
            self._peer.send(slot.partial(self._peer.incarnation))

    def refuse(self, slot: Slot, text: str) -> None:
        """Refuse the Work that `next` has returned last."""
        self._peer.send(self._refusal(slot.seq, text))
        if self._ring is not None and self._ring.holds(slot):
            self._ring.skip(slot)

    def _copied(self, work: Work) -> Slot | None:
        """A Work that came over ZeroMQ, in a slot; refused where its arrays do not fit each other."""
        try:
            return self._own.put(work)
        except (ValueError, MemoryError) as e:
            self._peer.send(self._refusal(work.seq, str(e)))
            return None

    def _refusal(self, seq: int, text: str) -> WorkFailed:
        return WorkFailed(seq, self._peer.incarnation, text or "not enough memory")

    def _missing(self, ring: WorkerRing) -> bool:
        """The coordinator has sent messages that were not yet received."""
        return self._peer.received - self._before_ring < ring.letters

    def _receive(self, wait: bool, limit_ms: int = POLL_LIMIT_MS) -> None:
        for message in self._peer.receive(wait, limit_ms):
            match message:
                case Work():
                    self._waiting.append(message)
                case Abandon():
                    self._waiting = deque(work for work in self._waiting if work.seq != message.seq)
                case AttachRing():
                    self._attach(message.name)
                case _:
                    log.warning("unexpected %s", type(message).__name__)
        self._looked_at = time.monotonic()

    def _attach(self, name: str) -> None:
        functions = library()
        try:
            if functions is None:
                raise ShmError("shm/doorbell.c was not compiled")
            self._ring = WorkerRing(functions, name, self._peer.incarnation)
            self._before_ring = self._peer.received
        except (ShmError, OSError) as e:
            log.warning("this worker's Work comes over ZeroMQ: %s", e)
