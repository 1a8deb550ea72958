"""What carries Works to the workers of a pool and their answers back: ZeroMQ, or the arena in shared memory
(`shm/lane.py`). Either carries the same descriptors. Starts, exits and refusals come over ZeroMQ. Used by the
engine's thread alone.

A GPU reads answers where the workers have written them, where their lanes can be shared with it. A slot is
then used again only behind the device's fence; the lane of a worker that has exited is kept for as long, and
unmapped when the next one is made."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.arrays import FloatArray
from pipeline.device import Device, Fence
from pipeline.experts.peers import SLICE_MS, ChildServerSocket
from pipeline.rate_limit import SparseLog
from protocol.messages import Abandon, AttachLane, Partial, Ready, Work, WorkerDied
from shm.descriptor import GENERATION, Descriptor, head_of
from shm.errors import ShmError
from shm.lane import CoordinatorLane, LaneShape, Library, Slot, x_areas
from shm.mask import Tally
from shm.segment import Segment, unlink

# Seconds awake of each wait for an answer, a few times what waking a sleeping core takes: the last worker
# ends soon after the first. The worker on this thread's core is given the core at once.
SPIN = 0.0002

log = logging.getLogger(__name__)


class Share(Protocol):
    """What a Work is a part of."""

    x: FloatArray  # [R, H]
    answers: dict[int, Answer]  # by seq
    needed: bool  # an order without an answer reads x
    busy: float
    failure: str

    @property
    def complete(self) -> bool:
        """Every order is answered."""


@dataclass(eq=False)
class Order:
    """A Work for a worker."""

    seq: int
    descriptor: Descriptor
    ticket: Share
    preferred: int  # the worker that it was cut for
    warm_up: bool = False  # a new worker's first Work: it belongs to no request
    crashes: int = 0
    exits: int = 0


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


class Carrier(Protocol):
    """Used by the engine's thread alone."""

    hidden: int  # numbers of a row

    def send(self, index: int, order: Order) -> None:
        """Send to a worker, which may notice it only after `flush`; dropped where it has exited (`receive`
        delivers that). x must not change until its answer. Raises PeerLost where a running worker takes no
        message for too long."""

    def abandon(self, index: int, seq: int) -> None:
        """This Work of a worker is no longer needed: it is skipped if it has not been started."""

    def announce(self) -> int | None:
        """A layer's Works follow in a moment: wake the workers, where that takes time, but for one that
        sleeps on this thread's core. The index of that one, where it is known."""

    def flush(self) -> None:
        """Wake the workers to which Works were sent."""

    def receive(self, wait_ms: int) -> list[tuple[int, object]]:
        """Messages as (index, message): Answer, WorkFailed, and in order among them the Ready of each new
        worker and the WorkerDied of each that exited; waits at most `wait_ms` for the first. Raises PeerLost
        where the engine cannot continue."""

    def release(self, answer: Answer, fence: Fence) -> None:
        """The y of an answer is not read any more once the device has passed the fence; None where it is not
        read by the device."""


class SocketCarrier:
    """A `Carrier` over ZeroMQ."""

    def __init__(self, socket: ChildServerSocket, hidden: int) -> None:
        self.hidden = hidden
        self._socket = socket

    def send(self, index: int, order: Order) -> None:
        descriptor = order.descriptor.copy()  # another worker may be sent the same
        head_of(descriptor)[GENERATION] = self._socket.generation(index)
        self._socket.send(index, Work(descriptor, order.ticket.x))

    def abandon(self, index: int, seq: int) -> None:
        self._socket.send(index, Abandon(seq))

    def announce(self) -> int | None:
        """None: a message wakes a worker soon enough."""
        return None

    def flush(self) -> None:
        """Does nothing: ZeroMQ wakes the workers with each message."""

    def receive(self, wait_ms: int) -> list[tuple[int, object]]:
        return [
            (index, _answer(message) if isinstance(message, Partial) else message)
            for index, message in self._socket.receive(wait_ms)
        ]

    def release(self, answer: Answer, fence: Fence) -> None:
        """Does nothing: an answer's memory is its own."""

    def stats(self) -> dict[str, Any]:
        """From any thread."""
        return {"name": "zmq"}

    def close(self) -> None:
        """Does nothing: the socket is its owner's."""


def _answer(partial: Partial) -> Answer:
    tally = Tally(partial.mass, partial.left, partial.kept, partial.channels)
    return Answer(partial.seq, partial.incarnation, partial.busy, partial.y, tally)


class ArenaCarrier:
    """A `Carrier` through shared memory. A Work waits here until a slot of its worker and an area for its x
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
        self._hall = Segment.create(f"{prefix}hall-0", shape.hall_bytes)
        self._areas = x_areas(self._hall.array, shape)
        self._users: list[Share | None] = [None] * len(self._areas)  # the share whose x each area has
        self._made = 0
        self._lanes: dict[int, CoordinatorLane] = {}  # by the worker's index; the next to wait for is first
        self._waiting: dict[int, deque[Order]] = {}  # by index
        self._bells: dict[int, int] = {}  # by index: of workers that were not yet woken
        self._socket_at = 0.0  # monotonic seconds: when the socket must be looked at again
        self._log = SparseLog(log)
        self._device = None if device is None or device.on_host else device
        self._in_place: set[CoordinatorLane] = set()  # which the device reads
        self._refused = False  # a lane could not be shared with it, and a line has said so
        self._held: dict[CoordinatorLane, list[Answer]] = {}  # answers that are not released
        self._passing: dict[
            CoordinatorLane, deque[tuple[Fence, Slot]]
        ] = {}  # slots behind the device's fences
        self._exited: list[CoordinatorLane] = []  # of exited workers, that the device may still read

    def send(self, index: int, order: Order) -> None:
        rows, numbers = self._shape.wide
        if len(order.ticket.x) > rows or len(order.descriptor) > numbers:
            order.ticket.failure = f"{len(order.ticket.x)} rows are more than the {rows} of a worker's memory"
        elif index in self._lanes:
            self._waiting[index].append(order)
            self._post(index)

    def abandon(self, index: int, seq: int) -> None:
        if (lane := self._lanes.get(index)) is not None:
            self._waiting[index] = deque(order for order in self._waiting[index] if order.seq != seq)
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

    def release(self, answer: Answer, fence: Fence) -> None:
        lane, slot = answer.lane, answer.slot
        answer.lane = answer.slot = None
        if lane is None or slot is None:
            return
        self._held[lane].remove(answer)
        if fence is None or lane not in self._in_place:
            lane.free(slot)
        else:
            self._passing.setdefault(lane, deque()).append((fence, slot))

    def stats(self) -> dict[str, Any]:
        """In how many lanes a GPU reads the answers. From any thread."""
        return {"name": "shm", "read_by_gpu": len(self._in_place.intersection(list(self._lanes.values())))}

    def close(self) -> None:
        """Remove the names of the hall, and of lanes that no worker has mapped."""
        for index in list(self._lanes):
            self._drop(index)
        self._unmap_exited(waits=True)
        unlink(self._hall.name)

    # --- posting -----------------------------------------------------------------------------------------

    def _post(self, index: int) -> None:
        """Post the Works that wait for this worker, as far as there are slots and areas."""
        lane, waiting = self._lanes[index], self._waiting[index]
        while waiting:
            order = waiting[0]
            size = len(order.ticket.x), len(order.descriptor)
            while (slot := lane.room(*size)) is None and self._free_slot(lane):
                pass
            area = None if slot is None else self._place(order.ticket)
            if slot is None or area is None:
                return
            waiting.popleft()
            lane.post(slot, order.seq, order.descriptor, area)
            self._bells[index] = lane.other_bell

    def _place(self, share: Share) -> int | None:
        """The area that has a share's x, which is written once; None while all that it fits are in use."""
        if share in self._users:
            return self._users.index(share)
        rows = len(share.x)
        if not rows:
            return 0
        for number, (user, area) in enumerate(zip(self._users, self._areas, strict=True)):
            if (user is None or not user.needed) and rows <= len(area):
                area[:rows] = share.x
                self._users[number] = share
                return number
        return None

    def _free_slot(self, lane: CoordinatorLane) -> bool:
        """Free a slot whose answer was accepted: behind the device's fence, or by a copy; False where there
        is none."""
        if (passing := self._passing.get(lane)) and self._device is not None:
            fence, slot = passing.popleft()
            self._device.wait(fence)
            lane.free(slot)
        elif held := self._held.get(lane):
            held[0].y = held[0].y.copy()
            self.release(held[0], None)
        else:
            return False
        return True

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
                    self._make(index, message.incarnation)
                case WorkerDied():
                    self._drop(index)
        return [pair for pair in messages if not isinstance(pair[1], Partial)]

    # --- lanes -------------------------------------------------------------------------------------------

    def _make(self, index: int, generation: int) -> None:
        """A worker without a lane is reported as hung: it is restarted, and tried again."""
        self._drop(index)
        self._unmap_exited()
        self._made += 1
        try:
            lane = CoordinatorLane(self._library, f"{self._prefix}lane-{self._made}", self._shape, generation)
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
        self._bells.pop(index, None)
        self._waiting.pop(index, None)
        lane = self._lanes.pop(index, None)
        if lane is not None:
            unlink(lane.name)
            self._exited.append(lane)

    def _unmap_exited(self, waits: bool = False) -> None:
        """Let go of exited workers' lanes that are not read any more. With `waits`, of all: nothing reads
        them."""
        for lane in list(self._exited):
            if self._held[lane] and not waits:
                continue  # it has answers of a share that is not complete
            for fence, _ in self._passing.pop(lane, ()):
                if self._device is not None:
                    self._device.wait(fence)
            if lane in self._in_place and self._device is not None:
                self._device.unshare_memory(lane.memory)
            self._in_place.discard(lane)
            del self._held[lane]
            self._exited.remove(lane)


def lane_shape(hidden: int, narrow: int, wide: int, numbers: tuple[int, int]) -> LaneShape:
    """For Works of up to `narrow` rows and of up to `wide` rows, whose descriptors have these numbers at
    most."""
    return LaneShape(hidden, (narrow, numbers[0]), (max(narrow, wide), max(numbers)))
