"""The worker pool's ends of patience: Works that kill their workers, and workers that make no progress."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from peer_words import LIMIT
from pool_scene import HIDDEN, QUIET, Scene, Worker, X, run_of, tile_of

from pipeline.coordinator_config import WorkerCores
from pipeline.errors import PeerLost, ShardFailed
from pipeline.experts.worker_pool import Ticket, WorkerPool
from protocol.messages import Hung, Work

pytestmark = pytest.mark.alone  # the pool doubts who has done nothing for half a second

# --- works that kill ------------------------------------------------------------------------------------


def test_a_work_that_crashes_two_workers_fails_and_only_that(pool_scene) -> None:
    first, second = pool_scene.begin(2)
    poisoned, innocent = pool_scene.submit(7), pool_scene.submit(0, 1)
    poison, beside = first.got(2)
    first.die(over=poison, crashed=True)
    (other, again, moved) = second.got(3)
    assert [tile_of(work) for work in (other, again, moved)] == [1, 7, 0]
    second.answer(other, 1.0)
    pool_scene.go_on(QUIET)
    assert not poisoned.failure
    second.die(over=again, crashed=True)
    pool_scene.until(lambda: bool(poisoned.failure))
    with pytest.raises(ShardFailed, match="ended 2 workers"):
        pool_scene.pool.result(poisoned)
    third = pool_scene.worker(0, 1)
    wake, left = third.got(2)
    assert (len(wake.items), tile_of(left)) == (0, tile_of(beside))
    third.answer(wake)
    third.answer(left, 2.0)
    assert pool_scene.pool.result(innocent).tolist() == [[3.0] * HIDDEN]
    assert not innocent.failure


def test_works_that_were_only_waiting_in_a_crashed_worker_are_not_blamed(pool_scene) -> None:
    (worker,) = pool_scene.begin(1)
    ticket = pool_scene.submit(0)
    (work,) = worker.got()
    for life in range(1, 5):
        worker.die(crashed=True)  # over nothing that was begun
        worker = pool_scene.worker(0, life)
        wake, work = worker.got(2)
    worker.answer(wake)
    worker.answer(work, 1.0)
    assert pool_scene.pool.result(ticket).tolist() == [[1.0] * HIDDEN]


def kill_repeatedly(pool_scene: Scene, crashed: list[bool]) -> tuple[Ticket, Work, Worker]:
    """A Work whose worker dies over it so many times: by itself, or by somebody's SIGKILL."""
    (worker,) = pool_scene.begin(1)
    ticket = pool_scene.submit(0)
    (work,) = worker.got()
    for life, by_itself in enumerate(crashed, start=1):
        worker.die(over=work, crashed=by_itself)
        worker = pool_scene.worker(0, life)
        _, work = worker.got(2)
    return ticket, work, worker


def test_kills_by_others_are_not_held_against_a_work_until_they_are_many(pool_scene) -> None:
    ticket, work, worker = kill_repeatedly(pool_scene, [False] * 7)
    assert not ticket.failure
    worker.die(over=work)
    with pytest.raises(ShardFailed, match="ended 8 workers"):
        pool_scene.pool.result(ticket)
    assert pool_scene.worker(0, 99).got(1)[0].items.size == 0  # the pool goes on, and the Work is gone
    assert pool_scene.alive[-1].quiet()


def test_one_crash_among_kills_is_not_two(pool_scene) -> None:
    ticket, work, worker = kill_repeatedly(pool_scene, [False, True, False, False])
    worker.answer(work, 1.0)
    assert pool_scene.pool.result(ticket).tolist() == [[1.0] * HIDDEN]


def test_what_only_wakes_a_worker_is_tried_by_no_other(pool_scene) -> None:
    """It is nobody's request: a worker that dies over it has its own trouble."""
    first, second = pool_scene.begin(2)
    second.die()
    for life in range(1, 4):
        second = pool_scene.worker(1, life)
        (wake,) = second.got()
        second.die(over=wake, crashed=True)
        assert first.quiet()
    pool_scene.submit(0, 1)
    assert [tile_of(work) for work in first.got(2)] == [0, 1]


# --- hung ones ------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch) -> None:
    monkeypatch.setattr("pipeline.experts.worker_pool.STALL_LIMIT", 0.3)
    monkeypatch.setattr("pipeline.experts.worker_pool.STALL_LIMIT_ROW", 0.001)
    monkeypatch.setattr("pipeline.experts.worker_pool.WAKE_LIMIT", 1.2)


def hung(pool_scene: Scene) -> list[object]:
    return [message for message in pool_scene.said if isinstance(message, Hung)]


@pytest.mark.usefixtures("impatient")
def test_a_worker_that_makes_no_progress_is_reported_once(pool_scene) -> None:
    first, second = pool_scene.begin(2)
    pool_scene.go_on(0.8)
    assert hung(pool_scene) == []  # they have nothing to do
    ticket = pool_scene.submit(0, 1)
    (work,), (other,) = first.got(), second.got()
    line, end = pool_scene.control.line("worker", 1), time.monotonic() + LIMIT
    while not hung(pool_scene) and time.monotonic() < end:
        line.tick()  # slow, and at work
        pool_scene.go_on(0.04)
    for _ in range(15):
        line.tick()
        pool_scene.go_on(0.04)
    assert hung(pool_scene) == [Hung("worker", 0, 0)]
    second.answer(other, 1.0)
    first.die(over=work, crashed=True)
    (again,) = second.got()
    second.answer(again, 2.0)
    assert pool_scene.pool.result(ticket).tolist() == [[3.0] * HIDDEN]
    second.die()
    successor = pool_scene.worker(0, 1)
    successor.wake()
    pool_scene.submit(0)
    successor.got()
    pool_scene.until(lambda: len(hung(pool_scene)) == 2)
    pool_scene.go_on(0.5)
    assert hung(pool_scene) == [Hung("worker", 0, 0), Hung("worker", 0, 1)]


def test_what_a_doubted_worker_has_an_idle_one_does_too(pool_scene) -> None:
    """Before it is given up; whose answer comes first counts, and nothing is done a third time."""
    first, second, third = pool_scene.begin(3)
    ticket = pool_scene.submit(0, 1, 2)
    (work,), (other,), (last,) = first.got(), second.got(), third.got()
    second.answer(other, 1.0)
    third.answer(last, 1.0)
    (again,) = second.got()  # it has nothing else to do
    second.answer(again, 2.0)
    assert again.seq == work.seq
    np.testing.assert_array_equal(again.x, work.x)
    assert pool_scene.pool.result(ticket).tolist() == [[4.0] * HIDDEN]
    first.answer(work, 9.0)  # it has come to itself
    pool_scene.go_on(QUIET)
    assert pool_scene.pool.result(ticket).tolist() == [[4.0] * HIDDEN]
    assert third.hears() == []
    pool_scene.submit(5)
    assert tile_of(first.got()[0]) == 5  # and is doubted no more
    first.die(crashed=True)
    assert tile_of(second.got()[0]) == 5


def test_a_doubted_worker_that_dies_takes_nothing_with_it_that_was_done(pool_scene) -> None:
    first, second = pool_scene.begin(2)
    ticket = pool_scene.submit(0)
    (work,) = first.got()
    (again,) = second.got()
    second.answer(again, 2.0)
    assert pool_scene.pool.result(ticket).tolist() == [[2.0] * HIDDEN]
    first.die(over=work, crashed=True)
    assert second.quiet()
    assert not ticket.failure


@pytest.mark.usefixtures("impatient")
def test_time_that_the_engine_itself_stood_still_is_not_held_against_a_worker(pool_scene) -> None:
    (worker,) = pool_scene.begin(1)
    pool_scene.submit(0)
    worker.got()
    time.sleep(0.6)  # a long step elsewhere
    pool_scene.go_on(0.05)
    assert hung(pool_scene) == []


@pytest.mark.usefixtures("impatient")
def test_many_rows_and_the_first_work_may_take_longer(pool_scene) -> None:
    _, second = pool_scene.begin(2, awake=False)
    second.wake()
    pool_scene.pool.submit_shards(0, [run_of(0), run_of(1)], X)
    wide = replace(run_of(2), kept=np.arange(500))
    pool_scene.pool.submit_shards(0, [wide], np.ones((500, HIDDEN), np.float32))
    pool_scene.go_on(0.6)
    assert hung(pool_scene) == []  # one imports what it computes with, the other computes many rows
    pool_scene.until(lambda: len(hung(pool_scene)) == 2)
    assert sorted(message.index for message in hung(pool_scene)) == [0, 1]


def test_workers_that_do_not_all_come_are_lost(pool_scene) -> None:
    pool_scene.pool = WorkerPool(pool_scene._socket, pool_scene.control, WorkerCores.alike(2), HIDDEN)
    pool_scene.worker(1)
    with pytest.raises(PeerLost, match="1 of 2 workers were ready"):
        pool_scene.pool.wait_ready(0.3)
