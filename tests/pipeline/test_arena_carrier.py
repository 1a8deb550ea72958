"""The carrier through shared memory: Works that wait for room, and the segments' names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pool_harness import HIDDEN, SHAPE, PoolHarness

from pipeline.errors import ShardFailed
from pipeline.experts import carriers
from protocol.messages import Hung
from shm.errors import NotEnoughMemory
from shm.segment import SHM_FOLDER

WIDE = np.ones((9, HIDDEN), np.float32)


def names(harness: PoolHarness) -> list[str]:
    """Of segments, beside the hall."""
    return [path.name for path in Path(SHM_FOLDER).glob(f"{harness.prefix[1:]}lane-*")]


def test_works_beyond_the_slots_wait_and_all_are_answered(arena: PoolHarness) -> None:
    """Also where the slot that a Work needs has an answer that is read after that of the Work."""
    (worker,) = arena.start(1)
    tickets = [
        arena.submit(7, x=WIDE),
        arena.submit(8, x=2 * WIDE),
        *(arena.submit(tile) for tile in range(3)),
    ]
    answered = []
    while len(answered) < len(tickets):
        for work in worker.take(1, at_least=True):
            np.testing.assert_array_equal(work.x, WIDE * 2 if work.tile == 8 else WIDE[: len(work.x)])
            worker.answer(work, float(work.tile))
            answered.append(work.tile)
    assert sorted(answered) == [0, 1, 2, 7, 8]
    for ticket, value in zip(reversed(tickets), (2, 1, 0, 8, 7), strict=True):
        assert ticket.result().tolist() == [[value] * HIDDEN] * len(ticket.x)


def test_x_is_written_once_and_kept_until_all_works_for_it_are_answered(arena: PoolHarness) -> None:
    first, second = arena.start(2)
    tickets = [arena.submit(0, 1, x=np.full((1, HIDDEN), value, np.float32)) for value in (5, 6, 7, 8)]
    works = [first.take(3), second.take(3)]  # the fourth waits for an area
    for work in works[0]:
        first.answer(work, 1.0)
    assert second.messages() == []
    for values in ((5, 6, 7), (5, 6, 7)):
        for works_of, worker in zip(works, (first, second), strict=True):
            assert [work.x[0, 0] for work in works_of] == list(values), worker.index
    assert works[0][0].x.ctypes.data % 64 == works[1][0].x.ctypes.data % 64 == 0
    for work in works[1]:
        second.answer(work, 2.0)
    for worker in (first, second):
        (work,) = worker.take()
        assert work.x[0, 0] == 8
        worker.answer(work, 0.5)
    assert [ticket.result()[0, 0] for ticket in tickets] == [3.0, 3.0, 3.0, 1.0]


def test_abandoned_works_give_their_slots_and_areas_back(arena: PoolHarness) -> None:
    (worker,) = arena.start(1)
    for tile in range(8):
        arena.submit(tile).abandon()
        assert worker.messages() == []  # skipped
    ticket = arena.submit(9)
    worker.answer(*worker.take(), 4.0)
    assert ticket.result()[0, 0] == 4.0


def test_a_share_that_never_fits_fails_alone(arena: PoolHarness) -> None:
    (worker,) = arena.start(1)
    with pytest.raises(ShardFailed, match="501 rows are more than the 500"):
        arena.submit(1, x=np.ones((SHAPE.wide[0] + 1, HIDDEN), np.float32)).result()
    ticket = arena.submit(2)
    worker.answer(*worker.take(), 4.0)
    assert ticket.result()[0, 0] == 4.0


def test_names_are_removed_when_a_worker_has_mapped_its_lane_or_exits_before(arena: PoolHarness) -> None:
    first, second = arena.start(2, warm=False)
    assert len(names(arena)) == 2
    first.take()
    assert len(names(arena)) == 1
    second.exit()
    arena.update_until(lambda: names(arena) == [])
    arena.worker(1, 1)
    arena.update_until(lambda: len(names(arena)) == 1)
    arena.carrier.close()
    assert names(arena) == []
    assert not Path(f"{SHM_FOLDER}{arena.prefix}hall-0").exists()


def test_a_worker_without_memory_for_its_lane_is_started_again(
    arena: PoolHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = arena.start(2)

    def full(*arguments: object) -> None:
        raise NotEnoughMemory("/dev/shm is full")

    with monkeypatch.context() as patch:
        patch.setattr(carriers, "CoordinatorLane", full)
        second.exit()
        arena.worker(1, 1)
        arena.update_until(lambda: Hung("worker", 1, 1) in arena.reports)
    assert "worker 1 gets no work: /dev/shm is full" in caplog.text
    ticket = arena.submit(3, 4)
    for work in first.take(2):
        first.answer(work, 1.0)
    assert ticket.result()[0, 0] == 2.0
    arena.running[-1].exit()
    arena.worker(1, 2).warm_up()


def test_a_worker_that_came_before_its_predecessor_s_messages_were_read_computes(arena: PoolHarness) -> None:
    """As when it is restarted while the engine still waits for others."""
    (first,) = arena.start(1)
    first.exit()
    second = arena.worker(0, 1)
    while arena.socket.generation(0) != 1:
        arena.socket._early += arena.socket._take(100)
    second.exit()
    third = arena.worker(0, 2)
    while arena.socket.generation(0) != 2:
        arena.socket._early += arena.socket._take(100)
    for work in third.take(2):  # to warm up: one was meant for the second, and its answer is dropped
        third.answer(work)
    arena.update_until(lambda: arena.socket.is_up(0))
    ticket = arena.submit(2)
    third.answer(*third.take(), 4.0)
    assert ticket.result()[0, 0] == 4.0
