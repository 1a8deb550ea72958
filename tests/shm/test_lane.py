"""The lane between the coordinator and a worker: what is read is whole and of the present worker, wherever
the writer stops, and also where a worker that was declared dead goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
from descriptor_parts import parts_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from small_store import ROOT

from shm.descriptor import GENERATION, HEADER, Descriptor, describe, head_of, numbers
from shm.errors import SegmentMissing, ShmError
from shm.lane import CoordinatorLane, LaneShape, Library, Slot, WorkerLane, library, x_areas
from shm.mask import Mask, Tally
from shm.segment import Segment, is_segment, segment_path, unlink

HIDDEN = 20
ITEMS = 8  # of a descriptor that fits a narrow slot
SHAPE = LaneShape(HIDDEN, (3, numbers(ITEMS, 2 * ITEMS)), (9, numbers(60, 120)))
ROWS = 40  # of the process that is killed: many, so that it is often killed over an answer
WIDE = LaneShape(4096, (ROWS, 64), (ROWS, 64))
WORKER = """
import sys
import numpy as np
from shm.lane import library
from shm.lane import WorkerLane
from shm.mask import NOTHING
hall, lane, generation = sys.argv[1], sys.argv[2], int(sys.argv[3])
lane = WorkerLane(library(), hall, lane, generation)
print("attached", flush=True)
while True:
    while (slot := lane.take()) is None:
        lane.wait(1.0)
    slot.y[:] = lane.x(slot) * np.float32(generation)
    lane.answer(slot, 0.5, NOTHING)
"""


def compiled() -> Library:
    functions = library()
    if functions is None:
        pytest.skip("shm/doorbell.c was not compiled")
    return functions


@contextmanager
def hall(shape: LaneShape) -> Iterator[Segment]:
    segment = Segment.create(f"/tandem-test-{uuid.uuid4().hex[:12]}-hall", shape.hall_bytes)
    yield segment
    unlink(segment.name)


def work_of(seq: int, rows: int = 1, items: int = 2) -> Descriptor:
    """Of numbers that depend on these alone."""
    draw = np.random.default_rng([seq, rows, items])
    return describe(
        seq % 5,
        draw.integers(0, 99, (items, 3), np.int32),
        np.linspace(0, 2 * items, items + 1).astype(np.int32),
        draw.integers(0, 9, 2 * items, np.int32),
        draw.standard_normal(2 * items).astype(np.float32),
        rows,
        Mask(float(draw.random(dtype=np.float32)), float(draw.random(dtype=np.float32))),
        seq,
    )


def tally_of(seq: int, factor: float) -> Tally:
    return Tally(seq * factor, 0.5, seq % 7, factor + 9)


def answer(lane: WorkerLane, slot: Slot, busy: float, factor: float) -> None:
    """x times the factor."""
    parts = parts_of(slot.descriptor)
    slot.y[: parts.x_rows] = lane.x(slot)[: parts.x_rows] * np.float32(factor)
    lane.answer(slot, busy, tally_of(parts.seq, factor))


class Killed(Exception):
    """The process was killed before this store."""


class Fragile:
    """The library, whose `store` is the last thing that its process does once it is `killed`."""

    def __init__(self) -> None:
        self._library = compiled()
        self.load, self.next = self._library.load, self._library.next
        self.ring, self.wait = self._library.ring, self._library.wait
        self.killed = False

    def store(self, number: int, value: int) -> None:
        if self.killed:
            raise Killed
        self._library.store(number, value)


class LaneMachine(RuleBasedStateMachine):
    """A coordinator, its worker, and that worker's earlier generations, which go on with what they do."""

    @initialize()
    def start(self) -> None:
        self.generation = 0
        self.prefix = f"/tandem-test-{uuid.uuid4().hex[:12]}"
        self.hall = Segment.create(f"{self.prefix}-hall", SHAPE.hall_bytes)
        self.areas = x_areas(self.hall.array, SHAPE)
        self.late: list[tuple[WorkerLane, list[Slot]]] = []
        self.restart()

    def teardown(self) -> None:
        unlink(self.hall.name)

    @rule()
    def restart(self) -> None:
        if self.generation:
            self.late.append((self.worker, list(self.taken.values())))
        self.generation += 1
        name = f"{self.prefix}-{self.generation}"
        self.coordinator = CoordinatorLane(compiled(), name, SHAPE, self.generation)
        self.fragile = Fragile()
        self.worker = WorkerLane(self.fragile, self.hall.name, name, self.generation)  # type: ignore[arg-type]
        assert not is_segment(segment_path(name))
        self.posted: dict[int, tuple[Descriptor, int]] = {}  # without an answer that was read; area of x
        self.abandoned: set[int] = set()
        self.taken: dict[int, Slot] = {}
        self.answered: dict[int, bool] = {}  # by number: with a result
        self.held: list[Slot] = []  # answers that were read, and are not freed

    @rule(
        seq=st.integers(1, 1 << 40), rows=st.integers(0, 10), items=st.integers(0, 61), area=st.integers(0, 2)
    )
    def post(self, seq: int, rows: int, items: int, area: int) -> None:
        if seq in self.posted:
            return
        work = work_of(seq, rows, items)
        slot = self.coordinator.room(rows, len(work))
        fits = rows <= SHAPE.wide[0] and len(work) <= SHAPE.wide[1]
        used = len(self.posted) + len(self.held)
        if not fits or used == len(SHAPE.slots):
            assert slot is None
        elif used == 0:
            assert slot is not None
            narrow = rows <= SHAPE.narrow[0] and len(work) <= SHAPE.narrow[1]
            assert slot.fits == (SHAPE.narrow if narrow else SHAPE.wide)
        if slot is not None and rows <= len(self.areas[area]):
            self._post(slot, seq, work, area)

    def _post(self, slot: Slot, seq: int, work: Descriptor, area: int) -> None:
        rows = parts_of(work).x_rows
        if not any(used == area for _, used in self.posted.values()):
            self.areas[area][:] = np.random.default_rng(seq).standard_normal(self.areas[area].shape)
        self.coordinator.post(slot, seq, work, area)
        assert slot.rows == rows
        self.posted[seq] = work, area
        self.answered.pop(seq, None)
        self.abandoned.discard(seq)

    @precondition(lambda self: self.posted)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.posted)))
        self.coordinator.abandon(seq)
        self.coordinator.abandon(max(self.posted) + 1)  # which it does not have
        self.abandoned.add(seq)

    @rule()
    def take(self) -> None:
        left = [seq for seq in self.posted if seq not in self.taken and seq not in self.answered]
        slot = self.worker.take()
        for seq in left:
            if seq not in self.abandoned:
                assert slot is not None
                work, area = self.posted[seq]
                expected = work.copy()
                head_of(expected)[GENERATION] = self.generation
                np.testing.assert_array_equal(slot.descriptor, expected)
                np.testing.assert_array_equal(self.worker.x(slot), self.areas[area])
                assert not self.worker.x(slot).flags.writeable
                self.taken[seq] = slot
                return
            self.answered[seq] = False
        assert slot is None

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), skip=st.booleans())
    def finish(self, data: st.DataObject, skip: bool) -> None:
        seq = data.draw(st.sampled_from(sorted(self.taken)))
        slot = self.taken.pop(seq)
        if skip:
            self.worker.skip(slot)
        else:
            answer(self.worker, slot, 0.25, self.generation)
        self.answered[seq] = not skip

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def is_killed_over_an_answer(self, data: st.DataObject) -> None:
        """All of it is written but the number that says so."""
        seq = data.draw(st.sampled_from(sorted(self.taken)))
        self.fragile.killed = True
        with pytest.raises(Killed):
            answer(self.worker, self.taken[seq], 9.0, -1)
        self.fragile.killed = False
        self.read()
        self.taken.pop(seq)
        self.restart()

    @precondition(lambda self: any(slots for _, slots in self.late))
    @rule(data=st.data())
    def late_write(self, data: st.DataObject) -> None:
        """An earlier generation answers: its Works have the numbers of those that were sent again."""
        lane, slots = data.draw(st.sampled_from([pair for pair in self.late if pair[1]]))
        answer(lane, slots.pop(), 9.0, -1)

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def post_again(self, data: st.DataObject) -> None:
        """What an earlier generation had, with the same number, as the pool does."""
        works = [parts_of(slot.descriptor) for _, slots in self.late for slot in slots]
        works = [work for work in works if work.seq not in self.posted]
        if works:
            work = data.draw(st.sampled_from(works))
            again = work_of(work.seq, work.x_rows, len(work.items))
            if (slot := self.coordinator.room(work.x_rows, len(again))) is not None:
                self._post(slot, work.seq, again, 2)

    @rule()
    def read(self) -> None:
        expected = [seq for seq in self.posted if self.answered.get(seq)]
        found = self.coordinator.answers()
        assert [seq for seq, _ in found] == expected
        for seq, slot in found:
            work, area = self.posted[seq]
            rows = parts_of(work).x_rows
            assert (slot.rows, slot.busy, slot.tally) == (rows, 0.25, tally_of(seq, self.generation))
            x = self.areas[area][:rows] * np.float32(self.generation)
            np.testing.assert_array_equal(slot.y[:rows], x)
            self.held.append(slot)
        for seq in [seq for seq in self.posted if seq in self.answered]:
            del self.posted[seq], self.answered[seq]

    @precondition(lambda self: self.held)
    @rule()
    def free(self) -> None:
        self.coordinator.free(self.held.pop())

    @invariant()
    def outstanding(self) -> None:
        assert self.coordinator.outstanding == bool(self.posted)


LaneMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestLane = LaneMachine.TestCase


def test_a_lane_is_private_and_for_one_generation(name: str) -> None:
    lane = CoordinatorLane(compiled(), name, SHAPE, 3)
    assert segment_path(lane.name).stat().st_mode & 0o7777 == 0o600
    with hall(SHAPE) as areas, hall(WIDE) as other:
        with pytest.raises(ShmError, match="no lane for this process"):
            WorkerLane(compiled(), areas.name, lane.name, 4)
        WorkerLane(compiled(), areas.name, lane.name, 3)
        with pytest.raises(SegmentMissing):
            WorkerLane(compiled(), areas.name, lane.name, 3)
        CoordinatorLane(compiled(), name, SHAPE, 3)
        with pytest.raises(ShmError, match="no hall of this lane"):
            WorkerLane(compiled(), other.name, name, 3)


@pytest.mark.parametrize("size", [1, 64, 4096])
def test_other_segments_are_no_lanes(name: str, size: int) -> None:
    Segment.create(name, size)
    with pytest.raises(ShmError, match="no lane for this process"):
        WorkerLane(compiled(), name, name, 0)
    assert is_segment(segment_path(name))


@given(
    hidden=st.integers(1, 70), narrow=st.tuples(st.integers(1, 9), st.integers(1, 99)), more=st.integers(0, 9)
)
def test_areas_begin_at_lines_and_do_not_overlap(hidden: int, narrow: tuple[int, int], more: int) -> None:
    shape = LaneShape(hidden, narrow, (narrow[0] + more, narrow[1] + more))
    memory = np.zeros(shape.lane_bytes, np.uint8)
    spans, at = [], 192 + 3 * 128
    for number, fits in enumerate(shape.slots):
        slot = Slot(memory, 192 + 128 * number, at, fits, hidden)
        for array, size in ((slot._descriptor, fits[1]), (slot.y, fits[0] * hidden)):
            assert array.size == size
            start = array.ctypes.data - memory.ctypes.data
            assert start % 64 == 0
            spans.append((start, start + 4 * size))
            at = -(-(start + 4 * size) // 64) * 64
    assert spans == sorted(spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert at == len(memory)
    assert (
        sum(area.nbytes for area in x_areas(np.zeros(shape.hall_bytes, np.uint8), shape)) <= shape.hall_bytes
    )


def test_a_lane_that_lies_about_a_descriptor_shows_its_own_memory_at_most(name: str) -> None:
    lane = CoordinatorLane(compiled(), name, SHAPE, 3)
    with hall(SHAPE) as areas:
        worker = WorkerLane(compiled(), areas.name, lane.name, 3)
    slot = lane.room(1, HEADER)
    assert slot is not None
    lane.post(slot, 1, work_of(1), 0)
    for size, area in ((1 << 40, -1), (-5, 1 << 50)):
        slot.head[2], slot.head[3] = size, area
        taken = worker.slots[0]
        assert len(taken.descriptor) in (0, SHAPE.narrow[1])
        assert worker.x(taken).shape[1] == HIDDEN


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "fate", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped, and goes on later"]
)
def test_process_that_ends_at_random_instants_leaves_whole_answers_or_none(
    name: str, processes: list[subprocess.Popen[str]], fate: signal.Signals
) -> None:
    """Under load: the lane never runs empty. Each Work without an answer is posted to the next process; one
    that was only stopped goes on while that computes, and answers into a lane that nobody reads."""
    draw, number, answered = random.Random(5), 0, 0
    unanswered: list[int] = []
    with hall(WIDE) as areas:
        x = x_areas(areas.array, WIDE)
        for area in x:
            area[:] = np.random.default_rng(area.ctypes.data % 97).standard_normal(area.shape)
        for generation in range(1, 5):
            lane = CoordinatorLane(compiled(), f"{name}-{generation}", WIDE, generation)
            command = [sys.executable, "-c", WORKER, areas.name, lane.name, str(generation)]
            process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE)
            processes.append(process)
            assert process.stdout is not None
            assert process.stdout.readline() == "attached\n"
            works: set[int] = set()
            wanted = answered + draw.randint(1, 9)
            limit = time.monotonic() + 30
            for earlier in processes[:-1] if fate == signal.SIGSTOP else ():
                os.kill(earlier.pid, signal.SIGCONT)
            while answered < wanted:  # and then it ends, in the middle of what it does
                assert time.monotonic() < limit
                while (slot := lane.room(ROWS, numbers(1, 2))) is not None:
                    number += not unanswered
                    seq = unanswered.pop() if unanswered else number
                    lane.post(slot, seq, work_of(seq, ROWS, 1), seq % 3)
                    works.add(seq)
                compiled().ring((lane.other_bell,))
                answered += take_answers(lane, works, x)
            time.sleep(draw.uniform(0, 0.002))
            os.kill(process.pid, fate)
            answered += take_answers(lane, works, x)
            unanswered = sorted(works)
            unlink(lane.name)
    assert answered > 4


def take_answers(lane: CoordinatorLane, works: set[int], x: list[np.ndarray]) -> int:
    answers = lane.answers()
    for seq, slot in answers:
        works.remove(seq)
        np.testing.assert_array_equal(slot.y, x[seq % 3] * np.float32(lane.generation))
        lane.free(slot)
    return len(answers)
