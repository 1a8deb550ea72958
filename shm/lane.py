"""The arena: how Works and answers lie in memory that the coordinator shares with its expert workers.

The coordinator has one segment with x, its *hall*; and for each generation of each worker a segment of its
own, its *lane*, with descriptors (`descriptor.py`) and answers. x is so written once for all workers, a
descriptor once for the one that computes it, and y once, where the coordinator (or a GPU that has page-locked
it) reads it. Numbers are int64 in the machine's byte order unless they are said to be others; areas begin at
multiples of 64 bytes.

    hall   0     the areas for x, float32 [rows, hidden] each: two narrow ones, one wide one, and a narrow one
                 into which a GPU copies what it computes

    lane   0     written before the worker gets the segment's name: magic "TNDMLANE", version, generation,
                 hidden, rows and numbers (of 4 bytes, of a descriptor) of a narrow slot, those of a wide one
           64    the worker's doorbell (doorbell.c)
           128   the coordinator's doorbell
           192   of each slot, two narrow ones and one wide one, two lines of 64 bytes:
                   written by the coordinator: 0 posted   8 abandoned   16 numbers of the descriptor
                   24 area of x
                   written by the worker: 64 answered   72 result   80 busy float64, seconds   88 mass float64
                   96 left float64   104 kept   112 channels: what the mask left out (mask.py)
           576   of each slot: its descriptor, written by the coordinator; y float32 [rows, hidden], by
                 the worker

The Works of a lane are numbered as they are posted, from 1. Each byte has one writer at a time; a slot is

    free         posted == answered, and the coordinator has read y (or the GPU, whose fence was passed)
    posted       posted > answered: the worker's; `posted` is stored after all else of the Work
    answered     posted == answered: the coordinator's; `answered` is stored after all else of the answer

`posted` and `answered` are stored with release and loaded with acquire order, and the other
side's doorbell is rung after each. So a reader that sees a number sees all that it stands for: of a process
that is killed at any instruction there is a whole Work or answer, or none. `result` is DONE or SKIPPED.
`abandoned` is the number of a Work that is no longer needed: a worker that has not begun it answers SKIPPED.
It does so also where it refuses a Work, with a WorkFailed over ZeroMQ.

Nothing that a worker writes late is ever taken for an answer, however late: also where it was stopped, was
declared dead, has a successor, and goes on. It maps the hall read-only, so its lane is all that it can write.
The lane was made for its generation, it is the only process that ever mapped it (it removes the name as soon
as it has), and the coordinator reads a lane only as long as its generation is the present one, and makes a
new one for the next. What such a worker reads meanwhile may change: an area of x is used again once all Works
for it are answered or abandoned, of which another answer counts or none. It can so compute nonsense, into its
own lane. Descriptors do not change under it: they are in its lane too, and a slot is written again only when
it has answered.

Numbers and doorbells are by the C library `doorbell.c`. A doorbell (8 bytes) wakes the one process that waits
for it; what a process wrote before `store` is there for the process whose `load` returns that number. Waits
release the GIL.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shm.compiled import load
from shm.descriptor import GENERATION, X_ROWS, Descriptor, head_of
from shm.errors import ShmError
from shm.formats import Float32
from shm.mask import Tally
from shm.segment import Segment, unlink

LIBRARY_VERSION = 4  # of the library's functions


class Library:
    """The compiled functions, on addresses in this process: store(number, value), load(number) -> value,
    next(first number, bytes to the next, count, after) -> index, wait(bell, seen, nanoseconds awake, in all)
    -> number of rings."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        number, pointer, count = ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint32
        self.load: Any = functions.tandem_load
        self.load.argtypes, self.load.restype = (pointer,), number
        self.store: Any = functions.tandem_store
        self.store.argtypes, self.store.restype = (pointer, number), None
        self.next: Any = functions.tandem_next
        self.next.argtypes, self.next.restype = (pointer, number, number, number), number
        self._ring: Any = functions.tandem_ring
        self._ring.argtypes, self._ring.restype = (pointer, number), None
        self._rouse: Any = functions.tandem_rouse
        self._rouse.argtypes, self._rouse.restype = (pointer, number), number
        self.wait: Any = functions.tandem_wait
        self.wait.argtypes, self.wait.restype = (pointer, count, number, number), count

    def ring(self, bells: tuple[int, ...]) -> None:
        """Ring all of them. A process that sleeps on this thread's core is woken last."""
        self._ring(_pointers(bells), len(bells))

    def rouse(self, bells: tuple[int, ...]) -> int:
        """Ring those of processes that sleep on other cores than this thread's. The index of the first that
        sleeps on this one; -1 where none does."""
        beside: int = self._rouse(_pointers(bells), len(bells))
        return beside


@lru_cache(64)
def _pointers(bells: tuple[int, ...]) -> Any:
    return (ctypes.c_void_p * len(bells))(*bells)


@cache
def library() -> Library:
    """The library. Raises NotCompiled."""
    return Library(load(__file__, "_doorbell", LIBRARY_VERSION))


MAGIC = int.from_bytes(b"TNDMLANE", "little")
VERSION = 2
DONE, SKIPPED = 0, 1
LINE = 64  # bytes: no two writers share a cache line
POSTED, ABANDONED, NUMBERS, AREA, _, _, _, _, ANSWERED, RESULT, BUSY, MASS, LEFT, KEPT, CHANNELS = range(15)
LINES = 3 * LINE  # where the slots' lines begin


@dataclass(frozen=True)
class LaneShape:
    """Rows of `hidden` numbers; rows of x and numbers of the descriptor that fit a narrow slot, and a wide
    one."""

    hidden: int
    narrow: tuple[int, int]
    wide: tuple[int, int]

    @property
    def slots(self) -> tuple[tuple[int, int], ...]:
        return self.narrow, self.narrow, self.wide

    @property
    def hall_bytes(self) -> int:
        return sum(_lines(rows * self.hidden) for rows, _ in (*self.slots, self.narrow))

    @property
    def lane_bytes(self) -> int:
        areas = sum(_lines(numbers) + _lines(rows * self.hidden) for rows, numbers in self.slots)
        return LINES + 2 * LINE * len(self.slots) + areas


def _lines(numbers: int) -> int:
    """Bytes of so many numbers of 4 bytes, in whole lines."""
    return -(-4 * numbers // LINE) * LINE


def x_areas(hall: NDArray[np.uint8], shape: LaneShape) -> list[Float32]:
    """The hall's areas, float32 [rows, hidden] each; the last one is the GPU's."""
    areas, at = [], 0
    for rows, _ in (*shape.slots, shape.narrow):
        areas.append(hall[at : at + 4 * rows * shape.hidden].view(np.float32).reshape(rows, shape.hidden))
        at += _lines(rows * shape.hidden)
    return areas


class Slot:
    """A slot of a lane: one Work's descriptor, and the answer to it."""

    def __init__(
        self, memory: NDArray[np.uint8], lines: int, at: int, fits: tuple[int, int], hidden: int
    ) -> None:
        """`lines`, `at`: bytes of the lane before the slot's lines, and before its descriptor."""
        rows, numbers = self.fits = fits
        self.address = int(memory.ctypes.data) + lines
        self.head = memory[lines : lines + 2 * LINE].data.cast("q")
        self._doubles = memory[lines : lines + 2 * LINE].data.cast("d")
        self._descriptor: Descriptor = memory[at : at + 4 * numbers].view(np.int32)
        at += _lines(numbers)
        self.y: Float32 = memory[at : at + 4 * rows * hidden].view(np.float32).reshape(rows, hidden)
        self.rows = 0  # of x, of the Work that the coordinator has posted

    @property
    def descriptor(self) -> Descriptor:
        """The descriptor of the posted Work; at most all of its room, whatever the lane says."""
        return self._descriptor[: max(0, self.head[NUMBERS])]

    def write(self, descriptor: Descriptor, generation: int, area: int) -> None:
        """Write a Work into this slot, all but the number `posted`, which makes it count."""
        self._descriptor[: len(descriptor)] = descriptor
        head_of(self._descriptor)[GENERATION] = generation
        self.rows = head_of(descriptor)[X_ROWS]
        self.head[NUMBERS], self.head[AREA] = len(descriptor), area

    @property
    def busy(self) -> float:
        """Seconds that the Work was computed."""
        return self._doubles[BUSY]

    @property
    def tally(self) -> Tally:
        return Tally(self._doubles[MASS], self._doubles[LEFT], self.head[KEPT], self.head[CHANNELS])

    def finish(self, busy: float, tally: Tally) -> None:
        """All of an answer but y and `answered`."""
        self._doubles[BUSY], self._doubles[MASS], self._doubles[LEFT] = busy, tally.mass, tally.left
        self.head[KEPT], self.head[CHANNELS] = tally.kept, tally.channels


class _Lane:
    """The parts that both ends have in common. The segment stays mapped until the last array of it is
    garbage."""

    def __init__(self, library: Library, segment: Segment, shape: LaneShape, bell: int, other: int) -> None:
        """`bell`, `other`: lines of the doorbells of this end and of the other one."""
        self._library = library
        self.memory = segment.array  # uint8, all of it
        self.slots, at = list[Slot](), LINES + 2 * LINE * len(shape.slots)
        for number, (rows, numbers) in enumerate(shape.slots):
            self.slots.append(Slot(self.memory, LINES + 2 * LINE * number, at, (rows, numbers), shape.hidden))
            at += _lines(numbers) + _lines(rows * shape.hidden)
        start = int(self.memory.ctypes.data)
        self._bell, self.other_bell = start + bell * LINE, start + other * LINE
        self._seen = 0  # rings of this end's doorbell

    def wait(self, limit: float, spin: float = 0.0) -> bool:
        """Wait until the doorbell rings or has rung since the last wait: `limit` seconds, `spin` awake. False
        where it has not."""
        seen = self._seen
        self._seen = self._library.wait(self._bell, seen, int(spin * 1e9), int(limit * 1e9))
        return self._seen != seen


class CoordinatorLane(_Lane):
    """The coordinator's end of a lane: posts Works and reads answers. Used by one thread."""

    def __init__(self, library: Library, name: str, shape: LaneShape, generation: int) -> None:
        """Make a lane for this generation of a worker. Raises NotEnoughMemory, ShmError."""
        segment = Segment.create(name, shape.lane_bytes)
        super().__init__(library, segment, shape, bell=2, other=1)
        self.name, self.generation = segment.name, generation
        head = MAGIC, VERSION, generation, shape.hidden, *shape.narrow, *shape.wide
        segment.array[:LINE].view(np.int64)[:] = head
        self._free = list(self.slots)
        self._busy: dict[int, Slot] = {}  # by the seq of the Work, as they were posted
        self._posts = 0

    @property
    def outstanding(self) -> bool:
        """Returns whether a Work was posted whose answer has not been read."""
        return bool(self._busy)

    def room(self, rows: int, numbers: int) -> Slot | None:
        """The first free slot that a Work of so many rows and numbers fits."""
        for slot in self._free:
            if rows <= slot.fits[0] and numbers <= slot.fits[1]:
                return slot
        return None

    def post(self, slot: Slot, seq: int, descriptor: Descriptor, area: int) -> None:
        """Post a Work in a free slot. The worker may notice it only when its doorbell, `other_bell`, is
        rung."""
        slot.write(descriptor, self.generation, area)
        self._free.remove(slot)
        self._busy[seq] = slot
        self._posts += 1
        self._library.store(slot.address, self._posts)

    def abandon(self, seq: int) -> None:
        """Mark a posted Work as no longer needed. It keeps its slot until it is answered."""
        if (slot := self._busy.get(seq)) is not None:
            slot.head[ABANDONED] = slot.head[POSTED]

    def answers(self) -> list[tuple[int, Slot]]:
        """The answers that were not yet read, in the order of their Works, by seq; each keeps its slot until
        it is freed. Skipped ones are left out."""
        answered = []
        for seq, slot in list(self._busy.items()):
            if self._library.load(slot.address + LINE) != slot.head[POSTED]:
                continue
            del self._busy[seq]
            if slot.head[RESULT] == DONE:
                answered.append((seq, slot))
            else:
                self.free(slot)
        return answered

    def free(self, slot: Slot) -> None:
        """Make a slot free for the next Work: its answer is not read any more."""
        self._free.append(slot)
        self._free.sort(key=self.slots.index)  # the narrow ones first


class WorkerLane(_Lane):
    """The worker's end of a lane: takes Works and answers them. Used by one thread."""

    def __init__(self, library: Library, hall: str, name: str, generation: int) -> None:
        """Map hall and lane, and remove the lane's name. Raises ShmError where it is not for this
        generation."""
        segment = Segment.attach(name, writable=True)
        head = segment.array[:LINE].view(np.int64).tolist() if segment.size >= LINE else [0] * 8
        shape = LaneShape(head[3], (head[4], head[5]), (head[6], head[7]))
        if head[:3] != [MAGIC, VERSION, generation] or segment.size != shape.lane_bytes:
            raise ShmError(f"the shared-memory segment {name} is no lane for this process")
        unlink(name)
        areas = Segment.attach(hall)
        if areas.size != shape.hall_bytes:
            raise ShmError(f"the shared-memory segment {hall} is no hall of this lane")
        super().__init__(library, segment, shape, bell=1, other=2)
        self._areas = x_areas(areas.array, shape)
        self._latest = 0  # number of the latest Work that was taken

    def take(self) -> Slot | None:
        """The oldest Work that was not taken yet and is still needed. The slot is the worker's until it is
        answered."""
        first, count = self.slots[0].address, len(self.slots)
        while (number := self._library.next(first, 2 * LINE, count, self._latest)) >= 0:
            slot: Slot = self.slots[number]
            self._latest = slot.head[POSTED]
            if not self.abandoned(slot):
                return slot
            self.skip(slot)
        return None

    def x(self, slot: Slot) -> Float32:
        """The area with the x of a Work that was taken; its rows are the first ones."""
        return self._areas[slot.head[AREA] % len(self._areas)]

    def abandoned(self, slot: Slot) -> bool:
        """Returns whether the Work that was taken from this slot is no longer needed."""
        return slot.head[ABANDONED] == slot.head[POSTED]

    def answer(self, slot: Slot, busy: float, tally: Tally) -> None:
        """Answer a Work that was taken: y is in the slot."""
        slot.finish(busy, tally)
        self._finish(slot, DONE)

    def skip(self, slot: Slot) -> None:
        """Answer a Work that was taken without a result."""
        self._finish(slot, SKIPPED)

    def _finish(self, slot: Slot, result: int) -> None:
        slot.head[RESULT] = result
        self._library.store(slot.address + LINE, slot.head[POSTED])
        self._library.ring((self.other_bell,))
