"""The exchange with local workers through shared memory: a ring for each running worker (`shm/ring.py`).

Work that fits a ring goes through it, and so does its answer. ZeroMQ carries everything else: Ready, Work
with many rows or for a worker that has not mapped its ring, refusals. Used by the engine's thread alone.

A GPU reads answers in the rings, where they can be shared with it. A slot is then used again only behind the
device's fence; the ring of a worker that has exited is kept for as long, and unmapped when the next one is
made.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

from pipeline.device import Device, Fence
from pipeline.experts.peers import SLICE_MS, ChildServerSocket
from pipeline.rate_limit import SparseLog
from protocol.messages import Abandon, AttachRing, Partial, Ready, Work, WorkerDied, WorkFailed
from shm.doorbell import Library
from shm.errors import ShmError
from shm.ring import CoordinatorRing
from shm.segment import unlink
from shm.slot import SlotShape

# Seconds awake of each wait for an answer, a few times what waking a sleeping core takes: the last worker
# ends soon after the first. The worker on this thread's core is given the core at once.
SPIN = 0.0002
ATTACH_LIMIT = 5.0
MIXED_MS = 1  # milliseconds of a wait for the socket, while there may be answers in rings too

log = logging.getLogger(__name__)

Answer = tuple[int, int, int]  # of a worker: index, incarnation, seq


class RingExchange:
    """A `WorkerExchange`."""

    def __init__(
        self,
        socket: ChildServerSocket,
        library: Library,
        prefix: str,
        shape: SlotShape,
        attach_limit: float = ATTACH_LIMIT,
        device: Device | None = None,
    ) -> None:
        """`prefix`: of the segments' names, which a number follows. `attach_limit`: seconds at the start for
        all workers to map their rings; a later one gets Work over ZeroMQ until it has. `device`: one that
        reads answers in place, if it can."""
        self._socket = socket
        self._library = library
        self._prefix = prefix
        self._shape = shape
        self._attach_limit = attach_limit
        self._made = 0
        self._rings: dict[int, CoordinatorRing] = {}  # by the worker's index; the next to wait for is first
        self._letters: dict[int, set[int]] = {}  # by index: Works that were sent over ZeroMQ
        self._bells: dict[int, int] = {}  # by index: of workers that were not yet woken
        self._attached: tuple[list[int], tuple[int, ...]] | None = None  # once all are: see _find_attached
        self._early: list[tuple[int, object]] = []  # received by `wait_ready`
        self._socket_at = 0.0  # monotonic seconds: when the socket must be looked at again
        self._log = SparseLog(log)
        self._works = [0, 0]  # through rings, over ZeroMQ
        self._device = None if device is None or device.on_host else device
        self._refused = False  # a ring could not be shared with it, and a line has said so
        self._held: dict[Answer, CoordinatorRing] = {}  # answers that are read in place
        # of them: the slots of these seqs are free behind the device's fences
        self._passing: dict[CoordinatorRing, deque[tuple[Fence, int]]] = {}
        self._exited: list[CoordinatorRing] = []  # rings of exited workers that the device may still read

    def wait_ready(self, count: int, limit: float) -> None:
        """As ChildServerSocket.wait_ready; also waits a while for the workers to map their rings."""
        self._socket.wait_ready(count, limit)
        end = time.monotonic() + self._attach_limit
        self._early += self._from_socket(0)
        while time.monotonic() < end and not all(ring.attached for ring in self._rings.values()):
            self._early += self._from_socket(MIXED_MS)

    def is_up(self, index: int) -> bool:
        return self._socket.is_up(index)

    def mark_up(self, index: int, incarnation: int) -> None:
        self._socket.mark_up(index, incarnation)

    def report_hung(self, index: int) -> None:
        self._socket.report_hung(index)

    def send(self, index: int, message: Work | Abandon) -> None:
        """As WorkerExchange.send."""
        ring = self._rings.get(index)
        if ring is not None and ring.attached:
            if isinstance(message, Abandon):
                if ring.abandon(message.seq):
                    return
            else:
                self._free_slot(ring)
                if ring.post(message):
                    self._works[0] += 1
                    self._bells[index] = ring.other_bell
                    return
        if isinstance(message, Work):
            self._works[1] += 1
            self._letters.setdefault(index, set()).add(message.seq)
        else:
            self._letters.get(index, set()).discard(message.seq)
        self._socket.send(index, message)
        if ring is not None:
            ring.count_letter()
            self._bells[index] = ring.other_bell

    def release(self, index: int, partial: Partial, fence: Fence) -> None:
        """As WorkerExchange.release."""
        ring = self._held.pop((index, partial.incarnation, partial.seq), None)
        if ring is None:
            return
        if fence is None:
            ring.release(partial.seq)
        else:
            self._passing.setdefault(ring, deque()).append((fence, partial.seq))

    def announce(self) -> int | None:
        """As WorkerExchange.announce."""
        indices, bells = self._attached or self._find_attached()
        beside = self._library.rouse(bells)
        return None if beside < 0 else indices[beside]

    def flush(self) -> None:
        """Ring all doorbells together: a worker that is woken on this thread's core runs at once."""
        if self._bells:
            self._library.ring(tuple(self._bells.values()))
            self._bells.clear()

    def receive(self, wait_ms: int) -> list[tuple[int, object]]:
        """As WorkerExchange.receive."""
        self.flush()
        messages, self._early = self._early, []
        end = time.monotonic() + wait_ms / 1000
        while True:
            messages += self._answers()
            now = time.monotonic()
            if now >= self._socket_at:
                messages += self._from_socket(0)
            if messages or now >= end:
                return messages
            messages += self._wait(end - now)

    def stats(self) -> dict[str, Any]:
        """What carried the Works so far, and in how many rings a GPU reads the answers. From any thread."""
        in_place = sum(ring.in_place for ring in list(self._rings.values()))
        works = {"through_rings": self._works[0], "over_zmq": self._works[1]}
        return {"name": "shm", "read_by_gpu": in_place} | works

    def close(self) -> None:
        """Remove the names of rings that no worker has mapped."""
        for index in list(self._rings):
            self._drop(index)
        self._unmap_exited(waits=True)

    def _find_attached(self) -> tuple[list[int], tuple[int, ...]]:
        """The indices of the workers that have mapped their rings, and their doorbells."""
        indices = sorted(index for index, ring in self._rings.items() if ring.attached)
        found = indices, tuple(self._rings[index].other_bell for index in indices)
        if len(indices) == len(self._rings):
            self._attached = found
        return found

    def _wait(self, seconds: float) -> list[tuple[int, object]]:
        """Wait for an answer of the first ring that owes one, or for messages, which are returned."""
        index = next((index for index, ring in self._rings.items() if ring.outstanding), None)
        if index is None or any(self._letters.values()):
            wait_ms = int(seconds * 1000) + 1 if index is None else MIXED_MS
            return self._from_socket(wait_ms)
        ring = self._rings[index]
        ring.wait(min(seconds, SLICE_MS / 1000), SPIN)
        if time.monotonic() >= self._socket_at:  # the ring stays silent: wait for another one's answer next
            self._rings[index] = self._rings.pop(index)
        return []

    def _answers(self) -> list[tuple[int, object]]:
        found: list[tuple[int, object]] = []
        for index, ring in self._rings.items():
            if ring.outstanding:
                for partial in ring.answers():
                    found.append((index, partial))
                    if ring.in_place:
                        self._held[index, partial.incarnation, partial.seq] = ring
        return found

    def _free_slot(self, ring: CoordinatorRing) -> None:
        """Where no slot is free: wait until the device has read the oldest answer that it reads."""
        passing = self._passing.get(ring)
        if ring.full and passing and self._device is not None:
            fence, seq = passing.popleft()
            self._device.wait(fence)
            ring.release(seq)

    def _from_socket(self, wait_ms: int) -> list[tuple[int, object]]:
        messages = self._socket.receive(wait_ms)
        self._socket_at = time.monotonic() + SLICE_MS / 1000
        for index, message in messages:
            match message:
                case Ready():
                    self._make(index, message.incarnation)
                case WorkerDied():
                    self._drop(index)
                case Partial() | WorkFailed():
                    self._letters.get(index, set()).discard(message.seq)
        return messages

    def _make(self, index: int, incarnation: int) -> None:
        self._drop(index)
        self._unmap_exited()
        self._made += 1
        try:
            ring = CoordinatorRing(self._library, f"{self._prefix}{self._made}", self._shape, incarnation)
        except (ShmError, OSError) as e:
            self._log.warning(f"worker {index} gets its work over ZeroMQ: {e}")
            return
        if self._device is not None:
            reason = self._device.share_memory(ring.memory)
            ring.in_place = not reason
            if reason and not self._refused:
                log.warning(f"workers' answers are added on the host: the GPU cannot read them: {reason}")
            self._refused = self._refused or bool(reason)
        self._socket.send(index, AttachRing(ring.name))
        self._rings[index] = ring

    def _drop(self, index: int) -> None:
        self._attached = None
        self._letters.pop(index, None)
        self._bells.pop(index, None)
        ring = self._rings.pop(index, None)
        if ring is not None:
            unlink(ring.name)
            if ring.in_place:
                self._exited.append(ring)

    def _unmap_exited(self, waits: bool = False) -> None:
        """Let go of exited workers' rings that the device has read. With `waits`, of all: nothing else reads
        them."""
        device = self._device
        for ring in list(self._exited):
            if device is None or (not waits and ring in self._held.values()):
                continue  # it has answers of a share that is not complete
            for fence, _ in self._passing.pop(ring, ()):
                device.wait(fence)
            device.unshare_memory(ring.memory)
            self._exited.remove(ring)
