"""The ring between the coordinator and a worker: what is read is whole and of the present worker, wherever
the writer stops."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from small_store import ROOT

from protocol.messages import Partial, Work
from shm.doorbell import Library, library
from shm.errors import SegmentMissing, ShmError
from shm.mask import Tally
from shm.ring import SLOTS, CoordinatorRing, WorkerRing
from shm.segment import Segment, is_segment, segment_path, unlink
from shm.slot import Slot, SlotShape

HIDDEN = 20
SHAPE = SlotShape.for_rows(3, HIDDEN)
ROWS = 40  # of the process that is killed: many, so that it is often killed over an answer
WORKER = """
import sys
import numpy as np
from shm.doorbell import library
from shm.ring import WorkerRing
ring = WorkerRing(library(), sys.argv[1], int(sys.argv[2]))
print("attached", flush=True)
while True:
    while (slot := ring.take()) is None:
        ring.wait(1.0)
    slot.y()[:] = slot.read().x * np.float32(ring.incarnation)
    ring.answer(slot, 0.5)
"""


def compiled() -> Library:
    functions = library()
    if functions is None:
        pytest.skip("shm/doorbell.c was not compiled")
    return functions


def work_of(seq: int, rows: int = 1, items: int = 2, hidden: int = HIDDEN) -> Work:
    """Of numbers that depend on `seq` alone."""
    draw = np.random.default_rng([seq, rows, items])
    offsets = np.linspace(0, 2 * items, items + 1).astype(np.int32)
    return Work(
        seq,
        seq % 5,
        draw.integers(0, 99, (items, 3), np.int32),
        offsets,
        draw.integers(0, rows, 2 * items, np.int32),
        draw.standard_normal(2 * items).astype(np.float32),
        draw.standard_normal((rows, hidden)).astype(np.float32),
        float(draw.random(dtype=np.float32)),
        float(draw.random(dtype=np.float32)),
    )


def assert_same(work: Work, other: Work) -> None:
    assert (work.seq, work.layer) == (other.seq, other.layer)
    assert (work.threshold, work.share) == (other.threshold, other.share)
    for field in ("items", "offsets", "rows", "weights", "x"):
        left, right = getattr(work, field), getattr(other, field)
        assert (left.shape, left.dtype) == (right.shape, right.dtype)
        np.testing.assert_array_equal(left, right)


def answer(ring: WorkerRing, slot: Slot, busy: float, factor: float) -> None:
    """x times the factor."""
    work = slot.read()
    slot.y()[:] = work.x * np.float32(factor)
    slot.tally = tally_of(work, factor)
    ring.answer(slot, busy)


def tally_of(work: Work, factor: float) -> Tally:
    return Tally(work.threshold * factor, work.share, work.seq % 7, len(work.x))


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


class RingMachine(RuleBasedStateMachine):
    """A coordinator, its worker, and that worker's earlier incarnations, which go on with what they do."""

    @initialize()
    def start(self) -> None:
        self.incarnation = 0
        self.prefix = f"/tandem-test-{uuid.uuid4().hex[:12]}"
        self.late: list[tuple[WorkerRing, list[Slot]]] = []
        self.restart()

    @rule()
    def restart(self) -> None:
        if self.incarnation:
            self.late.append((self.worker, list(self.taken.values())))
        self.incarnation += 1
        name = f"{self.prefix}-{self.incarnation}"
        self.coordinator = CoordinatorRing(compiled(), name, SHAPE, self.incarnation)
        assert not self.coordinator.attached
        self.fragile = Fragile()
        self.worker = WorkerRing(self.fragile, name, self.incarnation)  # type: ignore[arg-type]
        assert self.coordinator.attached
        assert not is_segment(segment_path(name))
        self.posted: dict[int, Work] = {}  # without an answer that was read
        self.abandoned: set[int] = set()
        self.taken: dict[int, Slot] = {}
        self.answered: dict[int, bool] = {}  # by number: with a result

    @rule(seq=st.integers(1, 1 << 40), rows=st.integers(1, 4), items=st.integers(0, 60))
    def post(self, seq: int, rows: int, items: int) -> None:
        if seq in self.posted:
            return
        work = work_of(seq, rows, items)
        fits = rows <= 3 and (6 * items + items * 2) <= 6 * 3 * 16
        done = self.coordinator.post(work)
        if len(self.posted) == SLOTS or rows > 3:
            assert not done
        elif fits:
            assert done
        if done:
            self.posted[work.seq] = work
            self.abandoned.discard(seq)

    @precondition(lambda self: self.posted)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.posted)))
        assert self.coordinator.abandon(seq)
        assert not self.coordinator.abandon(max(self.posted) + 1)
        self.abandoned.add(seq)

    @rule()
    def take(self) -> None:
        left = [seq for seq in self.posted if seq not in self.taken and seq not in self.answered]
        slot = self.worker.take()
        for seq in left:
            if seq not in self.abandoned:
                assert slot is not None
                assert_same(slot.read(), self.posted[seq])
                assert self.worker.holds(slot)
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
            answer(self.worker, slot, 0.25, self.incarnation)
        assert not self.worker.holds(slot)
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
        """An earlier incarnation answers: its Works have the numbers of those that were sent again."""
        ring, slots = data.draw(st.sampled_from([pair for pair in self.late if pair[1]]))
        answer(ring, slots.pop(), 9.0, -1)

    @precondition(lambda self: self.late and len(self.posted) < SLOTS)
    @rule(data=st.data())
    def post_again(self, data: st.DataObject) -> None:
        """What an earlier incarnation had, with the same number, as the pool does."""
        works = [slot.read() for _, slots in self.late for slot in slots if slot.seq not in self.posted]
        if works:
            work = data.draw(st.sampled_from(works))
            assert self.coordinator.post(work)
            self.posted[work.seq] = work_of(work.seq, len(work.x), len(work.items))
            self.answered.pop(work.seq, None)
            self.abandoned.discard(work.seq)

    @rule()
    def read(self) -> None:
        expected = [seq for seq in self.posted if self.answered.get(seq)]
        found = self.coordinator.answers()
        assert [each.seq for each in found] == expected
        for each in found:
            self.check(each)
        for seq in [seq for seq in self.posted if seq in self.answered]:
            del self.posted[seq], self.answered[seq]

    def check(self, partial: Partial) -> None:
        assert (partial.incarnation, partial.busy) == (self.incarnation, 0.25)
        work = self.posted[partial.seq]
        np.testing.assert_array_equal(partial.y, work.x * np.float32(self.incarnation))
        assert Tally.of([partial]) == tally_of(work, self.incarnation)

    @invariant()
    def outstanding(self) -> None:
        assert self.coordinator.outstanding == bool(self.posted)


RingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRing = RingMachine.TestCase


@pytest.fixture
def ring(name: str) -> CoordinatorRing:
    return CoordinatorRing(compiled(), name, SHAPE, 3)


def test_ring_is_private_and_for_one_incarnation(ring: CoordinatorRing) -> None:
    assert segment_path(ring.name).stat().st_mode & 0o7777 == 0o600
    with pytest.raises(ShmError, match="no ring for this process"):
        WorkerRing(compiled(), ring.name, 4)
    WorkerRing(compiled(), ring.name, 3)
    with pytest.raises(SegmentMissing):
        WorkerRing(compiled(), ring.name, 3)


@pytest.mark.parametrize("size", [1, 64, 4096])
def test_other_segments_are_no_rings(name: str, size: int) -> None:
    Segment.create(name, size)
    with pytest.raises(ShmError, match="no ring for this process"):
        WorkerRing(compiled(), name, 0)
    assert is_segment(segment_path(name))


def test_work_that_is_posted_again_keeps_its_one_slot(ring: CoordinatorRing) -> None:
    worker = WorkerRing(compiled(), ring.name, 3)
    assert [ring.post(work_of(seq)) for seq in (7, 7, 8, 9)] == [True, True, True, False]
    for seq in (7, 8):
        slot = worker.take()
        assert slot is not None
        assert slot.seq == seq
        answer(worker, slot, 0.0, 1)
    assert worker.take() is None
    assert [each.seq for each in ring.answers()] == [7, 8]
    assert [ring.post(work_of(seq)) for seq in (10, 11, 12)] == [True, True, False]


@pytest.mark.parametrize("rows", [4, 5])
def test_slot_has_room_for_all_the_rows_that_it_is_made_for(name: str, rows: int) -> None:
    """Rows of whole cache lines, so that no number is left over."""
    ring = CoordinatorRing(compiled(), name, SlotShape.for_rows(4, 16), 3)
    worker = WorkerRing(compiled(), name, 3)
    work = work_of(7, rows, hidden=16)
    assert ring.post(work) == (rows == 4)
    taken = worker.take()
    assert (taken is None) == (rows == 5)
    if taken is not None:
        assert_same(taken.read(), work)
        answer(worker, taken, 0.0, 2)
        (answered,) = ring.answers()
        np.testing.assert_array_equal(answered.y, 2 * work.x)


def test_letters_end_a_wait_and_are_counted(ring: CoordinatorRing) -> None:
    worker = WorkerRing(compiled(), ring.name, 3)
    ring.count_letter()
    compiled().ring((ring.other_bell,))
    began = time.monotonic()
    worker.wait(10.0)  # for what has happened already
    assert time.monotonic() - began < 5
    assert (worker.letters, worker.take()) == (1, None)
    worker.wait(0.01)  # for nothing


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def test_process_killed_at_random_instants_leaves_whole_answers_or_none(
    name: str, processes: list[subprocess.Popen[str]]
) -> None:
    """Under load: the ring never runs empty. Each Work without an answer is posted to the next process."""
    draw, number, unanswered, answered = random.Random(5), 0, [], 0
    for incarnation in range(1, 7):
        ring = CoordinatorRing(
            compiled(), f"{name}-{incarnation}", SlotShape.for_rows(ROWS, 4096), incarnation
        )
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, ring.name, str(incarnation)],
            cwd=ROOT, text=True, stdout=subprocess.PIPE,
        )  # fmt: skip
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "attached\n"
        works = {work.seq: work for work in unanswered if ring.post(work)}
        compiled().ring((ring.other_bell,))
        kill_at = time.monotonic() + draw.uniform(0.0, 0.15)
        while time.monotonic() < kill_at:
            number += 1
            work = work_of(number, ROWS, 1, 4096)
            if ring.post(work):
                works[number] = work
                compiled().ring((ring.other_bell,))
            answered += take_answers(ring, works, incarnation)
        os.kill(process.pid, signal.SIGKILL)
        answered += take_answers(ring, works, incarnation)
        process.wait()
        answered += take_answers(ring, works, incarnation)
        unanswered = list(works.values())
        unlink(ring.name)
    assert answered > 6


def take_answers(ring: CoordinatorRing, works: dict[int, Work], incarnation: int) -> int:
    found = ring.answers()
    for each in found:
        np.testing.assert_array_equal(each.y, works.pop(each.seq).x * np.float32(incarnation))
    return len(found)
