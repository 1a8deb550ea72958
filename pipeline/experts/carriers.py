"""Carries Works to the workers of a pool and their answers back: by ZeroMQ, or through the arena in shared
memory (`shm/lane.py`). Either carries the same descriptors. Starts, exits and refusals come over ZeroMQ.

A GPU writes x into the arena and reads answers where the workers have written them, where that memory can be
shared with it. A slot is then used again, and the lane of a worker that has exited unmapped, once the device
has done what it was given."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from pipeline.experts.peers import SLICE_MS, ChildServerSocket
from pipeline.experts.pool import Answer, Carrier, Task, Ticket
from pipeline.fairness import SparseLog
from protocol.messages import Abandon, AttachLane, Partial, Ready, Work, WorkerDied
from shm.descriptor import GENERATION, address_of, head_of
from shm.errors import ShmError
from shm.lane import CoordinatorLane, LaneShape, Library, Slot, x_areas
from shm.mask import Tally
from shm.segment import Segment, new_name, unlink

if TYPE_CHECKING:  # an expert host imports no torch
    from pipeline.device.base import Device

# Seconds awake of each wait for an answer, a few times what waking a sleeping core takes: the last worker
# ends soon after the first. The worker on this thread's core is given the core at once.
SPIN = 0.0002

log = logging.getLogger(__name__)


class SocketCarrier(Carrier):
    """Carries Works over ZeroMQ, which wakes the workers with each message."""

    def __init__(self, socket: ChildServerSocket, hidden: int) -> None:
        self.hidden = hidden
        self._socket = socket

    def send(self, index: int, task: Task) -> None:
        descriptor = task.descriptor.copy()  # what was sent before may still be in a queue
        head_of(descriptor)[GENERATION] = self._socket.generation(index)
        self._socket.send(index, Work(descriptor, task.ticket.x))

    def abandon(self, index: int, seq: int) -> None:
        self._socket.send(index, Abandon(seq))

    def receive(self, wait_ms: int) -> list[tuple[int, object]]:
        return [
            (index, _answer(message) if isinstance(message, Partial) else message)
            for index, message in self._socket.receive(wait_ms)
        ]

    def stats(self) -> dict[str, Any]:
        return {"name": "zmq"}


def _answer(partial: Partial) -> Answer:
    tally = Tally(partial.mass, partial.left, partial.kept, partial.channels)
    return Answer(partial.seq, partial.generation, partial.busy, partial.y, tally)


class ArenaCarrier(Carrier):
    """Carries Works through shared memory. A Work waits here until a slot of its worker and an area for its x
    are free; an answer that is not read yet is copied where a Work waits for its slot."""

    def __init__(
        self,
        socket: ChildServerSocket,
        library: Library,
        prefix: str,
        shape: LaneShape,
        device: Device | None = None,
    ) -> None:
        """`prefix`: of the segments' names. `device`: one that reads answers in place, if it can. Raises
        NotEnoughMemory, ShmError."""
        self.hidden = shape.hidden
        self._socket = socket
        self._library = library
        self._prefix, self._shape = prefix, shape
        self._hall = Segment.create(new_name(prefix, "hall"), shape.hall_bytes)
        *self._areas, landing = x_areas(self._hall.array, shape)
        self._users: list[Ticket | None] = [None] * len(self._areas)  # whose x each area has
        self._landing = address_of(landing)
        self._lanes: dict[int, CoordinatorLane] = {}  # by the worker's index; the next to wait for is first
        self._waiting: dict[int, deque[Task]] = {}  # by index
        self._bells: dict[int, int] = {}  # by index: of workers that were not yet woken
        self._socket_at = 0.0  # monotonic seconds: when the socket must be looked at again
        self._log = SparseLog(log)
        self._device = None if device is None or device.on_host else device
        self._in_place: set[CoordinatorLane] = set()  # which the device reads
        self._refused = False  # a lane could not be shared with it, and a line has said so
        self._held: dict[CoordinatorLane, list[Answer]] = {}  # answers that are not released
        # Released slots, which the device may read until its next `reads`.
        self._reading: list[tuple[CoordinatorLane, Slot, int]] = []
        if self._device is not None and not self._device.share_memory(self._hall.array):
            self._device.landing = landing

    def send(self, index: int, task: Task) -> None:
        rows, numbers = self._shape.wide
        if len(task.ticket.x) > rows or len(task.descriptor) > numbers:
            task.ticket.failure = f"{len(task.ticket.x)} rows are more than the {rows} of a worker's memory"
        elif index in self._lanes:
            self._waiting[index].append(task)
            self._post(index)

    def abandon(self, index: int, seq: int) -> None:
        if (lane := self._lanes.get(index)) is not None:
            self._waiting[index] = deque(task for task in self._waiting[index] if task.seq != seq)
            lane.abandon(seq)

    def announce(self) -> int | None:
        indices = sorted(self._lanes)
        beside = self._library.rouse(tuple(self._lanes[index].other_bell for index in indices))
        return None if beside < 0 else indices[beside]

    def flush(self) -> None:
        """Ring all doorbells together: a worker that is woken on this thread's core runs at once."""
        if self._bells:
            self._library.ring(tuple(self._bells.values()))
            self._bells.clear()

    def receive(self, wait_ms: int) -> list[tuple[int, object]]:
        messages: list[tuple[int, object]] = []
        end = time.monotonic() + wait_ms / 1000
        while True:
            for index, waiting in self._waiting.items():
                if waiting:
                    self._post(index)
            self.flush()
            messages += self._answers()
            now = time.monotonic()
            if now >= self._socket_at:
                messages += self._from_socket(0)
            if messages or now >= end:
                return messages
            messages += self._wait(end - now)

    def release(self, answer: Answer, on_device: bool = False) -> None:
        lane, slot = answer.lane, answer.slot
        answer.lane = answer.slot = None
        if lane is None or slot is None:
            return
        self._held[lane].remove(answer)
        if on_device and self._device is not None and lane in self._in_place:
            self._reading.append((lane, slot, self._device.reads))
        else:
            lane.free(slot)

    def stats(self) -> dict[str, Any]:
        """Return in how many lanes a GPU reads the answers."""
        return {"name": "shm", "read_by_gpu": len(self._in_place)}

    def close(self) -> None:
        """Remove the names of the hall, and of lanes that no worker has mapped."""
        for index in list(self._lanes):
            self._drop(index)
        if self._device is not None:
            self._device.landing = None
            self._device.unshare_memory(self._hall.array)
        unlink(self._hall.name)

    # --- posting -----------------------------------------------------------------------------------------

    def _post(self, index: int) -> None:
        """Post the Works that wait for this worker, as far as there are slots and areas."""
        lane, waiting = self._lanes[index], self._waiting[index]
        while waiting:
            task = waiting[0]
            size = len(task.ticket.x), len(task.descriptor)
            while (slot := lane.room(*size)) is None and self._free_slot(lane):
                pass
            area = None if slot is None else self._place(task.ticket)
            if slot is None or area is None:
                return
            waiting.popleft()
            lane.post(slot, task.seq, task.descriptor, area)
            self._bells[index] = lane.other_bell

    def _place(self, ticket: Ticket) -> int | None:
        """Return the area that has a ticket's x, which is written once, perhaps by the GPU; None while all
        that it fits are in use."""
        if address_of(ticket.x) == self._landing:
            return len(self._areas)
        if ticket in self._users:
            return self._users.index(ticket)
        rows = len(ticket.x)
        if not rows:
            return 0
        for number, (user, area) in enumerate(zip(self._users, self._areas, strict=True)):
            if (user is None or not user.needed) and rows <= len(area):
                area[:rows] = ticket.x
                self._users[number] = ticket
                return number
        return None

    def _free_slot(self, lane: CoordinatorLane) -> bool:
        """Free a slot of a lane whose answer was accepted: by waiting for the device, or by a copy; False
        where there is none."""
        if any(of is lane for of, *_ in self._reading):
            self._wait_for_device(lane)
        elif held := self._held[lane]:
            held[0].y = held[0].y.copy()
            self.release(held[0])
        else:
            return False
        return True

    def _wait_for_device(self, wanted: CoordinatorLane) -> None:
        """Free the slots that the device has read; where none of this lane is, once it has read all."""
        if self._device is None:
            return
        reads = self._device.reads
        if all(of is not wanted or read == reads for of, _, read in self._reading):
            self._device.wait(self._device.fence())
            reads = -1
        for lane, slot, read in self._reading:
            if read != reads:
                lane.free(slot)
        self._reading = [entry for entry in self._reading if entry[2] == reads]

    # --- waiting -----------------------------------------------------------------------------------------

    def _wait(self, seconds: float) -> list[tuple[int, object]]:
        """Wait for an answer of the first lane that owes one, or for messages, which are returned."""
        index = next((index for index, lane in self._lanes.items() if lane.outstanding), None)
        if index is None:
            return self._from_socket(int(seconds * 1000) + 1)
        self._lanes[index].wait(min(seconds, SLICE_MS / 1000), SPIN)
        if time.monotonic() >= self._socket_at:  # the lane stays silent: wait for another one's answer next
            self._lanes[index] = self._lanes.pop(index)
        return []

    def _answers(self) -> list[tuple[int, object]]:
        answers: list[tuple[int, object]] = []
        for index, lane in self._lanes.items():
            for seq, slot in lane.answers() if lane.outstanding else ():
                answer = Answer(seq, lane.generation, slot.busy, slot.y[: slot.rows], slot.tally, lane, slot)
                self._held[lane].append(answer)
                answers.append((index, answer))
        return answers

    def _from_socket(self, wait_ms: int) -> list[tuple[int, object]]:
        messages = self._socket.receive(wait_ms)
        self._socket_at = time.monotonic() + SLICE_MS / 1000
        for index, message in messages:
            match message:
                case Ready():
                    # Messages wait while the engine starts, or sends: this one may have exited, and its
                    # successor must not get the name of a lane that its WorkerDied removes.
                    if message.generation == self._socket.generation(index):
                        self._make(index, message.generation)
                case WorkerDied():
                    self._drop(index)
        return [pair for pair in messages if not isinstance(pair[1], Partial)]

    # --- lanes -------------------------------------------------------------------------------------------

    def _make(self, index: int, generation: int) -> None:
        """Make a worker's lane. One without a lane is reported as hung: it is restarted, and tried again."""
        self._drop(index)
        try:
            name = new_name(self._prefix, "lane")
            lane = CoordinatorLane(self._library, name, self._shape, generation)
        except (ShmError, OSError) as e:
            self._log.warning(f"worker {index} gets no work: {e}")
            self._socket.report_hung(index)
            return
        if self._device is not None:
            reason = self._device.share_memory(lane.memory)
            if not reason:
                self._in_place.add(lane)
            elif not self._refused:
                log.warning(f"workers' answers are added on the host: the GPU cannot read them: {reason}")
            self._refused = self._refused or bool(reason)
        self._socket.send(index, AttachLane(self._hall.name, lane.name))
        self._lanes[index], self._held[lane], self._waiting[index] = lane, [], deque()

    def _drop(self, index: int) -> None:
        """Let go of an exited worker's lane. Its answers of shares that are not complete are copied."""
        self._bells.pop(index, None)
        self._waiting.pop(index, None)
        lane = self._lanes.pop(index, None)
        if lane is None:
            return
        unlink(lane.name)
        while any(of is lane for of, *_ in self._reading):
            self._wait_for_device(lane)
        while held := self._held[lane]:
            held[0].y = held[0].y.copy()
            self.release(held[0])
        del self._held[lane]
        if lane in self._in_place and self._device is not None:
            self._in_place.remove(lane)
            self._device.unshare_memory(lane.memory)
