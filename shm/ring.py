"""The ring between the coordinator and one expert worker: a few Works under way and their answers, in place.

A ring is a segment of its own, made by the coordinator for one incarnation of one worker, which removes its
name as soon as it has mapped it. So a write of an earlier incarnation, however late, is to memory that no
process reads any more. Numbers are in the machine's byte order.

    offset 0    the head, a line of 64 bytes, written before the worker gets the segment's name
                  0 magic "TNDMRING"   8 version int64   16 incarnation int64   24 slots int64
                 32 hidden int64      40 request numbers int64      48 answer numbers int64
          64    written by the coordinator: 0 the worker's doorbell (8 bytes, doorbell.c), 8 letters int64
         128    written by the worker: 0 the coordinator's doorbell, 8 attached int64
         192    slot 0, slot 1, ..., all of one size (`slot.py`)

Each byte has one writer. The Works of a ring are numbered as they are posted, from 1; a slot is in one of
these states:

    free         posted == answered, and the coordinator has read the answer
    posted       posted > answered: the slot is the worker's; `posted` is stored after all else of the Work
    answered     posted == answered: it is the coordinator's; `answered` is stored after the whole answer

Where a GPU reads answers in place (`in_place`), a slot is the coordinator's until that has ended: `release`.

`posted` and `answered` are stored with release and loaded with acquire order (`doorbell.py`), and the other
side's doorbell is rung after each. So a reader that sees a number sees all that it stands for: of a process
that is killed at any instruction there is either a whole Work or answer, or none.

`result` is DONE or SKIPPED. `abandoned` is the number of a Work that is no longer needed: a worker that has
not begun it answers SKIPPED. It does that also where it refuses a Work, with a WorkFailed over ZeroMQ.
`letters` counts the messages that the coordinator has sent over ZeroMQ after the segment's name; a worker
that has not received as many waits for its socket instead of its doorbell.
"""

from __future__ import annotations

import numpy as np

from protocol.messages import Partial, Work
from shm.doorbell import Library
from shm.errors import ShmError
from shm.segment import Segment, unlink
from shm.slot import ABANDONED, LINE, POSTED, RESULT, Slot, SlotShape

MAGIC = int.from_bytes(b"TNDMRING", "little")
VERSION = 2
DONE, SKIPPED = 0, 1
SLOTS = 2  # a layer's Work, and the next layer's where the policy decides it early
NUMBERS = LINE // 8  # of a line
LETTERS, ATTACHED = NUMBERS + 1, 2 * NUMBERS + 1  # of the numbers before the slots


class _Ring:
    """What both ends have in common. The segment stays mapped until the last array of it is garbage."""

    def __init__(self, library: Library, segment: Segment, shape: SlotShape, bell: int, other: int) -> None:
        """`bell`, `other`: lines of the doorbells of this end and of the other one."""
        self.shape = shape
        self._library = library
        memory = segment.array
        first, end = 3 * LINE, segment.size
        self._head = memory[:first].data.cast("q")
        self._slots = [Slot(shape, memory[i : i + shape.bytes]) for i in range(first, end, shape.bytes)]
        start = int(memory.ctypes.data)
        self._bell, self.other_bell = start + bell * LINE, start + other * LINE
        self._seen = 0  # rings of this end's doorbell

    @property
    def incarnation(self) -> int:
        return self._head[2]

    def wait(self, limit: float, spin: float = 0.0) -> bool:
        """Wait until the doorbell rings or has rung since the last wait: `limit` seconds, `spin` awake. False
        where it has not."""
        seen = self._seen
        self._seen = self._library.wait(self._bell, seen, int(spin * 1e9), int(limit * 1e9))
        return self._seen != seen


class CoordinatorRing(_Ring):
    """The coordinator's end. Used by one thread."""

    def __init__(self, library: Library, name: str, shape: SlotShape, incarnation: int) -> None:
        """Make a ring for this incarnation of a worker. Raises NotEnoughMemory, ShmError."""
        segment = Segment.create(name, ring_bytes(shape, SLOTS))
        super().__init__(library, segment, shape, bell=2, other=1)
        self.name = segment.name
        sizes = (SLOTS, shape.hidden, shape.request, shape.answer)
        for i, number in enumerate((MAGIC, VERSION, incarnation, *sizes)):
            self._head[i] = number
        self.memory = segment.array  # uint8, all of it
        self.in_place = False  # answers are read where they are
        self._free = list(self._slots)
        self._busy: dict[int, Slot] = {}  # by the seq of the Work, as they were posted
        self._read: dict[int, Slot] = {}  # by seq: of answers that are read in place
        self._posts = 0

    @property
    def attached(self) -> bool:
        """The worker has mapped the ring."""
        return bool(self._head[ATTACHED])

    @property
    def outstanding(self) -> bool:
        """A posted Work has no answer that was read."""
        return bool(self._busy)

    @property
    def full(self) -> bool:
        """No slot is free."""
        return not self._free

    def post(self, work: Work) -> bool:
        """Post a Work; False where no slot is free, or it does not fit. The worker may notice it only when
        its doorbell, `other_bell`, is rung. A Work that is posted already stays as it is."""
        if work.seq in self._busy:
            return True
        if not self._free or not self.shape.fits(work):
            return False
        slot = self._free.pop()
        slot.write(work)
        self._busy[work.seq] = slot
        self._posts += 1
        self._library.store(slot.address, self._posts)
        return True

    def abandon(self, seq: int) -> bool:
        """Mark a Work as no longer needed; False if it is not in this ring. It keeps its slot until it is
        answered."""
        if (slot := self._busy.get(seq)) is None:
            return False
        slot.head[ABANDONED] = slot.head[POSTED]
        return True

    def count_letter(self) -> None:
        """A message was sent over ZeroMQ: the worker is to receive it, once its doorbell is rung."""
        self._head[LETTERS] += 1

    def answers(self) -> list[Partial]:
        """The answers that were not yet read, in the order of their Works; none for skipped ones. With
        `in_place` each keeps its slot until it is released."""
        found = []
        for seq, slot in list(self._busy.items()):
            if self._library.load(slot.address + LINE) != slot.head[POSTED]:
                continue
            done = slot.head[RESULT] == DONE
            if done:
                found.append(slot.partial(self.incarnation, self.in_place))
            del self._busy[seq]
            if done and self.in_place:
                self._read[seq] = slot
            else:
                self._free.append(slot)
        return found

    def release(self, seq: int) -> None:
        """The answer of this Work is not read any more."""
        if (slot := self._read.pop(seq, None)) is not None:
            self._free.append(slot)


class WorkerRing(_Ring):
    """The worker's end. Used by one thread."""

    def __init__(self, library: Library, name: str, incarnation: int) -> None:
        """Map the ring and remove its name. Raises ShmError where it is not for this incarnation."""
        segment = Segment.attach(name, writable=True)
        head = segment.array[:LINE].view(np.int64).tolist() if segment.size >= LINE else [0] * NUMBERS
        shape = SlotShape(hidden=head[4], request=head[5], answer=head[6])
        if head[:3] != [MAGIC, VERSION, incarnation] or segment.size != ring_bytes(shape, head[3]):
            raise ShmError(f"the shared-memory segment {name} is no ring for this process")
        unlink(name)
        super().__init__(library, segment, shape, bell=1, other=2)
        self._latest = 0  # number of the latest Work that was taken
        self._taken: set[Slot] = set()  # with Works that were not yet answered
        self._head[ATTACHED] = 1

    @property
    def letters(self) -> int:
        """Messages that the coordinator has sent over ZeroMQ after the ring's name."""
        return self._head[LETTERS]

    def take(self) -> Slot | None:
        """The oldest Work that was not taken yet and is still needed. The slot is the worker's until it is
        answered."""
        slots, first = self._slots, self._slots[0].address
        while (found := self._library.next(first, self.shape.bytes, len(slots), self._latest)) >= 0:
            slot: Slot = slots[found]
            self._latest = slot.head[POSTED]
            self._taken.add(slot)
            if not self.abandoned(slot):
                return slot
            self.skip(slot)
        return None

    def abandoned(self, slot: Slot) -> bool:
        """A Work that was taken is no longer needed."""
        return slot.head[ABANDONED] == slot.head[POSTED]

    def holds(self, slot: Slot) -> bool:
        """The slot is this ring's, and its Work was taken and not yet answered."""
        return slot in self._taken

    def answer(self, slot: Slot, busy: float) -> None:
        """Answer a Work that was taken: y and tally are in the slot."""
        slot.busy = busy
        self._finish(slot, DONE)

    def skip(self, slot: Slot) -> None:
        """Answer a Work that was taken without a result."""
        self._finish(slot, SKIPPED)

    def _finish(self, slot: Slot, result: int) -> None:
        self._taken.remove(slot)
        slot.head[RESULT] = result
        self._library.store(slot.address + LINE, slot.head[POSTED])
        self._library.ring((self.other_bell,))


def ring_bytes(shape: SlotShape, slots: int) -> int:
    return 3 * LINE + slots * shape.bytes
