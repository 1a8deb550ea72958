"""The ring between the coordinator and one expert worker: a few Works under way and their answers, in place.

A ring is a segment of its own, made by the coordinator for one incarnation of one worker, which removes its
name as soon as it has mapped it. So a write of an earlier incarnation, however late, is to memory that no
process reads any more. Numbers are in the machine's byte order; arrays are contiguous, in C order.

    offset 0    the head, a line of 64 bytes, written before the worker gets the segment's name
                  0 magic "TNDMRING"   8 version int64   16 incarnation int64   24 slots int64
                 32 hidden int64      40 request numbers int64      48 answer numbers int64
          64    written by the coordinator: 0 the worker's doorbell (8 bytes, doorbell.c), 8 letters int64
         128    written by the worker: 0 the coordinator's doorbell, 8 attached int64
         192    slot 0, slot 1, ...

    a slot      0    written by the coordinator, 64 bytes of int64:
                       0 posted   8 abandoned   16 seq   24 layer   32 items n   40 rows k   48 rows of x R
                64   written by the worker, 64 bytes:
                       0 answered int64   8 result int64 (DONE or SKIPPED)   16 busy float64, seconds
                128  the request: items int32 [n, 3], offsets int32 [n + 1], rows int32 [k], weights
                     float32 [k], then from the next multiple of 64 bytes x float32 [R, hidden]
                ...  the answer: y float32 [R, hidden]

Request and answer areas have the same sizes in all slots: `request numbers` and `answer numbers` of 4 bytes,
whole lines. Each byte has one writer. The Works of a ring are numbered as they are posted, from 1; a slot is
in one of these states:

    free         posted == answered, and the coordinator has read the answer
    posted       posted > answered: the slot is the worker's; `posted` is stored after all else of the Work
    answered     posted == answered: it is the coordinator's; `answered` is stored after y, busy and result

`posted` and `answered` are stored with release and loaded with acquire order (`doorbell.py`), and the other
side's doorbell is rung after each. So a reader that sees a number sees all that it stands for: of a process
that is killed at any instruction there is either a whole Work or answer, or none.

`abandoned` is the number of a Work that is no longer needed: a worker that has not begun it answers SKIPPED.
It does that also where it refuses a Work, with a WorkFailed over ZeroMQ. `letters` counts the messages that
the coordinator has sent over ZeroMQ after the segment's name; a worker that has not received as many waits
for its socket instead of its doorbell.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.messages import Partial, Work
from shm.doorbell import Library
from shm.errors import ShmError
from shm.layout import Float32
from shm.segment import Segment, unlink

MAGIC = int.from_bytes(b"TNDMRING", "little")
VERSION = 1
LINE = 64  # bytes: no two writers share a cache line
DONE, SKIPPED = 0, 1
SLOTS = 2  # a layer's Work, and the next layer's where the policy decides it early
ITEMS_PER_ROW = 16  # of a Work with few rows; a wide Work shares experts among its rows

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class RingShape:
    """Sizes of a ring: rows of `hidden` numbers; request and answer in numbers of 4 bytes."""

    hidden: int
    request: int
    answer: int
    slots: int = SLOTS

    @classmethod
    def for_rows(cls, rows: int, hidden: int) -> RingShape:
        """For Works of up to `rows` rows."""
        lists = 6 * rows * ITEMS_PER_ROW + 1
        return cls(hidden, _lines(lists) + _lines(rows * hidden), _lines(rows * hidden))

    @property
    def slot_bytes(self) -> int:
        return 2 * LINE + 4 * (self.request + self.answer)

    @property
    def bytes(self) -> int:
        return 3 * LINE + self.slots * self.slot_bytes


class _Slot:
    """The arrays of one slot, and the addresses of its states."""

    def __init__(self, shape: RingShape, memory: NDArray[np.uint8]) -> None:
        """`memory`: uint8 [slot_bytes]."""
        self._hidden = shape.hidden
        self.request: Int64 = memory[:LINE].view(np.int64)
        self.reply: Int64 = memory[LINE : 2 * LINE].view(np.int64)
        self.busy = self.reply.view(np.float64)
        self.posted, self.answered = int(self.request.ctypes.data), int(self.reply.ctypes.data)
        area = memory[2 * LINE :].view(np.int32)
        self._lists: NDArray[np.int32] = area[: shape.request]
        self._weights = self._lists.view(np.float32)
        self._y = area[shape.request :].view(np.float32)

    def fits(self, work: Work) -> bool:
        rows = len(work.x)
        lists = _lines(4 * len(work.items) + 1 + 2 * len(work.rows))
        return lists + rows * self._hidden <= len(self._lists) and rows * self._hidden <= len(self._y)

    def write(self, work: Work) -> None:
        """All of the Work but `posted`."""
        items, rows, x_rows = len(work.items), len(work.rows), len(work.x)
        self.request[2:7] = work.seq, work.layer, items, rows, x_rows
        parts = self._parts(items, rows)
        lists = self._lists
        lists[parts[0] : parts[1]] = work.items.ravel()
        lists[parts[1] : parts[2]] = work.offsets
        lists[parts[2] : parts[3]] = work.rows
        self._weights[parts[3] : parts[4]] = work.weights
        self._x(parts[4], x_rows)[:] = work.x

    def read(self) -> Work:
        """The posted Work; its arrays are the slot's."""
        seq, layer, items, rows, x_rows = self.request[2:7].tolist()
        parts = self._parts(items, rows)
        lists = self._lists
        return Work(
            seq,
            layer,
            lists[parts[0] : parts[1]].reshape(items, 3),
            lists[parts[1] : parts[2]],
            lists[parts[2] : parts[3]],
            self._weights[parts[3] : parts[4]],
            self._x(parts[4], x_rows),
        )

    def y(self) -> NDArray[np.float32]:
        """float32 [R, hidden] of the posted Work."""
        rows = int(self.request[6])
        return self._y[: rows * self._hidden].reshape(rows, self._hidden)

    def _x(self, lists: int, rows: int) -> NDArray[np.float32]:
        start = _lines(lists)
        return self._weights[start : start + rows * self._hidden].reshape(rows, self._hidden)

    @staticmethod
    def _parts(items: int, rows: int) -> tuple[int, int, int, int, int]:
        offsets = 3 * items
        first = offsets + items + 1
        return 0, offsets, first, first + rows, first + 2 * rows


class _Ring:
    """What both ends have in common. The segment stays mapped until the last array of it is garbage."""

    def __init__(self, library: Library, segment: Segment, shape: RingShape, bell: int, other: int) -> None:
        """`bell`, `other`: lines of the doorbells of this end and of the other one."""
        self.shape = shape
        self._library = library
        memory = segment.array
        self._head: Int64 = memory[: 3 * LINE].view(np.int64).reshape(3, -1)
        first, step = 3 * LINE, shape.slot_bytes
        self._slots = [_Slot(shape, memory[i : i + step]) for i in range(first, shape.bytes, step)]
        self._bell, self.other_bell = (int(self._head[line].ctypes.data) for line in (bell, other))
        self._seen = 0  # rings of this end's doorbell

    @property
    def incarnation(self) -> int:
        return int(self._head[0, 2])

    def wait(self, limit: float, spin: float = 0.0) -> None:
        """Wait until the doorbell rings or has rung since the last wait: `limit` seconds, `spin` awake."""
        self._seen = self._library.wait(self._bell, self._seen, int(spin * 1e9), int(limit * 1e9))


class CoordinatorRing(_Ring):
    """The coordinator's end. Used by one thread."""

    def __init__(self, library: Library, name: str, shape: RingShape, incarnation: int) -> None:
        """Make a ring for this incarnation of a worker. Raises NotEnoughMemory, ShmError."""
        segment = Segment.create(name, shape.bytes)
        super().__init__(library, segment, shape, bell=2, other=1)
        self.name = segment.name
        sizes = (shape.slots, shape.hidden, shape.request, shape.answer)
        self._head[0, :7] = MAGIC, VERSION, incarnation, *sizes
        self._free = list(self._slots)
        self._busy: dict[int, _Slot] = {}  # by the seq of the Work, as they were posted
        self._posts = 0

    @property
    def attached(self) -> bool:
        """The worker has mapped the ring."""
        return bool(self._head[2, 1])

    @property
    def outstanding(self) -> bool:
        """A posted Work has no answer that was read."""
        return bool(self._busy)

    def post(self, work: Work) -> bool:
        """Post a Work; False where no slot is free, or it does not fit. The worker may notice it only when
        its doorbell, `other_bell`, is rung. A Work that is posted already stays as it is."""
        if work.seq in self._busy:
            return True
        if not self._free or not self._free[-1].fits(work):
            return False
        slot = self._free.pop()
        slot.write(work)
        self._busy[work.seq] = slot
        self._posts += 1
        self._library.store(slot.posted, self._posts)
        return True

    def abandon(self, seq: int) -> bool:
        """Mark a Work as no longer needed; False if it is not in this ring. It keeps its slot until it is
        answered."""
        if (slot := self._busy.get(seq)) is None:
            return False
        slot.request[1] = slot.request[0]
        return True

    def count_letter(self) -> None:
        """A message was sent over ZeroMQ: the worker is to receive it, once its doorbell is rung."""
        self._head[1, 1] += 1

    def answers(self) -> list[Partial]:
        """The answers that were not yet read, in the order of their Works; none for skipped ones."""
        found = []
        for seq, slot in list(self._busy.items()):
            if self._library.load(slot.answered) != slot.request[0]:
                continue
            if slot.reply[1] == DONE:
                found.append(Partial(seq, self.incarnation, float(slot.busy[2]), slot.y().copy()))
            del self._busy[seq]
            self._free.append(slot)
        return found


class WorkerRing(_Ring):
    """The worker's end. Used by one thread."""

    def __init__(self, library: Library, name: str, incarnation: int) -> None:
        """Map the ring and remove its name. Raises ShmError where it is not for this incarnation."""
        segment = Segment.attach(name, writable=True)
        head = segment.array[:LINE].view(np.int64).tolist() if segment.size >= LINE else [0] * 8
        shape = RingShape(hidden=head[4], request=head[5], answer=head[6], slots=head[3])
        if head[:3] != [MAGIC, VERSION, incarnation] or segment.size != shape.bytes:
            raise ShmError(f"the shared-memory segment {name} is no ring for this process")
        unlink(name)
        super().__init__(library, segment, shape, bell=1, other=2)
        self._taken: dict[int, _Slot] = {}  # by the seq of the Work
        self._head[2, 1] = 1

    @property
    def letters(self) -> int:
        """Messages that the coordinator has sent over ZeroMQ after the ring's name."""
        return int(self._head[1, 1])

    def take(self) -> Work | None:
        """The oldest Work that was not taken yet and is still needed. Its arrays are the slot's until it is
        answered."""
        waiting = []
        for slot in self._slots:
            number = self._library.load(slot.posted)
            if number != slot.reply[0] and slot not in self._taken.values():
                waiting.append((number, slot))
        for _, slot in sorted(waiting, key=lambda each: each[0]):
            work = slot.read()
            self._taken[work.seq] = slot
            if not self.abandoned(work.seq):
                return work
            self.skip(work.seq)
        return None

    def abandoned(self, seq: int) -> bool:
        """A Work that was taken is no longer needed."""
        request = self._taken[seq].request
        return bool(request[1] == request[0])

    def holds(self, seq: int) -> bool:
        """A Work was taken and not yet answered."""
        return seq in self._taken

    def answer(self, seq: int, busy: float, y: Float32) -> None:
        """Answer a Work that was taken. y: float32 [R, hidden]."""
        slot = self._taken[seq]
        slot.y()[:] = y
        slot.busy[2] = busy
        self._finish(seq, DONE)

    def skip(self, seq: int) -> None:
        """Answer a Work that was taken without a result."""
        self._finish(seq, SKIPPED)

    def _finish(self, seq: int, result: int) -> None:
        slot = self._taken.pop(seq)
        slot.reply[1] = result
        self._library.store(slot.answered, int(slot.request[0]))
        self._library.ring((self.other_bell,))


def _lines(numbers: int) -> int:
    """Numbers of 4 bytes in whole lines."""
    return -(-numbers // (LINE // 4)) * (LINE // 4)
