"""The expert worker as a real process: its results, what it refuses, its start and its exit."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
from child_harness import ROOT, SHAPE, Child, Surroundings, surroundings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from work_cases import GOOD, Case, Item, expected, make_work

from protocol.codec import encode
from protocol.messages import VERSION, Abandon, CancelFetch, Partial, Work, WorkFailed
from shm.control import IDLE
from shm.descriptor import GENERATION, ITEMS, head_of

pytestmark = pytest.mark.timeout(300)  # importing torch takes long where many others compute
SLOWDOWN = 30.0


@dataclasses.dataclass(frozen=True)
class Pool:
    """Three workers on one store: two alike, but that the second has two threads, and one slowed."""

    place: Surroundings
    workers: list[Child]
    slowed: Child

    def do(self, child: Child, work: Case) -> Partial:
        send(self.place, child, work)
        answer = self.place.expect(Partial)
        assert (answer.seq, answer.generation) == (work.seq, child.generation)
        return answer


def send(place: Surroundings, child: Child, work: Case) -> None:
    place.send(child, work.message(child.generation))


@pytest.fixture(scope="module")
def pool(fingerprint: str) -> Iterator[Pool]:
    with surroundings("worker", fingerprint) as place:
        core = min(os.sched_getaffinity(0))
        workers = [place.start(), place.start(index=1, cores=[core, core])]
        slowed = place.start(index=2, host_slowdown=SLOWDOWN)
        place.ready()
        yield Pool(place, workers, slowed)


@pytest.fixture
def place(fingerprint: str) -> Iterator[Surroundings]:
    with surroundings("worker", fingerprint) as place:
        yield place


@st.composite
def works(draw: st.DrawFn) -> Case:
    rows = draw(st.integers(1, 12))
    items: list[Item] = []
    for _ in range(draw(st.integers(0, 5))):
        lo = draw(st.integers(0, SHAPE.tiles - 1))
        hi = draw(st.integers(lo + 1, SHAPE.tiles))
        some = draw(st.sets(st.integers(0, rows - 1)))
        items.append((draw(st.integers(0, SHAPE.experts - 1)), lo, hi, sorted(some)))
    layer = draw(st.integers(0, SHAPE.layers - 1))
    return make_work(draw(st.integers(0, 2**40)), layer, items, rows, draw(st.integers(0, 1000)))


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(work=works())
def test_a_partial_equals_the_brute_force_and_any_workers_bits(pool: Pool, work: Case) -> None:
    first, other, again = (pool.do(child, work).y for child in (*pool.workers, pool.workers[0]))
    assert first.shape == work.x.shape
    assert expected(work).agrees(first)
    np.testing.assert_array_equal(first.view(np.uint32), other.view(np.uint32))
    np.testing.assert_array_equal(first.view(np.uint32), again.view(np.uint32))


def with_item(*item: int) -> np.ndarray:
    return np.array([np.asarray(GOOD.items)[0], item], np.int32)


FAULTS = {  # one of each place that refuses; `test_work_kernel.py` has the descriptors' other numbers
    "width of x": {"x": np.zeros((3, SHAPE.hidden + 1), np.float32)},
    "rows of nothing": {"x": np.zeros((0, SHAPE.hidden), np.float32)},
    "expert above": {"items": with_item(SHAPE.experts, 0, 1)},
    "number of items": {ITEMS: 1 << 40},
    "another generation": {GENERATION: 77},
}


@pytest.mark.parametrize("change", FAULTS.values(), ids=FAULTS)
def test_faulty_work_fails_and_the_worker_continues(pool: Pool, change: dict) -> None:
    child = pool.workers[0]
    parts = {name: value for name, value in change.items() if isinstance(name, str)}
    message = dataclasses.replace(GOOD, seq=99, **parts).message(child.generation)
    for number in change.keys() - parts.keys():
        head_of(message.descriptor)[number] = change[number]
    pool.place.send(child, message)
    answer = pool.place.expect(WorkFailed)
    assert (answer.seq, answer.generation) == (99, child.generation)
    assert answer.text
    assert pool.place.progress.line("worker", 0).seq == IDLE  # or its exit would be put down to this Work
    assert expected(GOOD).agrees(pool.do(child, GOOD).y)


def test_other_messages_are_dropped_and_the_worker_continues(pool: Pool) -> None:
    child = pool.workers[0]
    tag, header, *arrays = encode(GOOD.message(child.generation))
    hostile: list[list[bytes]] = [
        [b""],
        [bytes([tag[0], VERSION + 1]), header, *arrays],
        [tag, header, *arrays[:-1]],
        list(encode(Work(GOOD.descriptor[:8], GOOD.x))),  # no number to answer to
        list(encode(CancelFetch(1))),  # well formed, but nothing for a worker
    ]
    for frames in hostile:
        pool.place.work.send_multipart([child.name, *frames])
    assert expected(GOOD).agrees(pool.do(child, GOOD).y)  # the next answer is this one
    assert pool.place.quiet()
    assert "dropped a malformed message" in child.errors.read_text()
    assert "Traceback" not in child.errors.read_text()


def test_an_abandoned_work_is_skipped(pool: Pool) -> None:
    whole: list[Item] = [(expert, 0, SHAPE.tiles, list(range(64))) for expert in range(SHAPE.experts)]
    for message in (
        make_work(1, 0, whole, rows=64),  # busy for a while: the others wait in the queue
        dataclasses.replace(GOOD, seq=2),
        dataclasses.replace(GOOD, seq=3),
        Abandon(2),
        Abandon(77),
        dataclasses.replace(GOOD, seq=4),
    ):
        slowed = pool.slowed
        pool.place.send(slowed, message.message(slowed.generation) if isinstance(message, Case) else message)
    assert [pool.place.expect(Partial).seq for _ in range(3)] == [1, 3, 4]
    assert pool.place.quiet()


def test_control_segment_counts_works_and_tiles_and_is_idle_after_the_answer(pool: Pool) -> None:
    """Or the exit of an idle worker would be put down to the Work before."""
    for index, child in enumerate((*pool.workers, pool.slowed)):
        line = pool.place.progress.line("worker", index)
        before = line.ticks
        pool.do(child, make_work(50 + index, 0, [(1, 0, SHAPE.tiles, [0]), (2, 3, 5, [0])], rows=1))
        assert line.seq == IDLE
        waits = line.ticks - before - (1 + SHAPE.tiles + 2)
        assert waits > 0 if child is pool.slowed else waits == 0


def test_host_slowdown_lengthens_busy_and_the_answer(pool: Pool) -> None:
    work = make_work(5, 0, [(0, 0, SHAPE.tiles, list(range(16)))], rows=16)
    plain = min(pool.do(pool.workers[1], work).busy for _ in range(5))
    began = time.perf_counter()
    slowed = pool.do(pool.slowed, work)
    assert slowed.busy > SLOWDOWN / 5 * plain > 0
    assert time.perf_counter() - began >= slowed.busy
    assert expected(work).agrees(slowed.y)


@pytest.mark.parametrize(
    ("change", "text"),
    [({"store": "/tandem-store-none"}, "/tandem-store-none"), ({"fingerprint": "f" * 64}, "another model")],
    ids=["missing", "another model's"],
)
def test_unusable_store_is_reported_as_failed(place: Surroundings, change: dict, text: str) -> None:
    assert text in place.failure(place.start(**change))
    assert place.quiet()  # it never sent Ready


@pytest.mark.parametrize("module", [[], ["workers.expert_worker"], ["workers.prefetcher"]])
def test_child_started_by_hand_exits_with_one_line(module: list[str]) -> None:
    command = [sys.executable, "-m", "workers.child", *module]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "launch.py" in done.stderr
