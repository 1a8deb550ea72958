"""The worker pool's limits: Works that crash their workers, and workers that make no progress."""

from __future__ import annotations

import numpy as np
import pytest
from pool_harness import HIDDEN, QUIET, PoolHarness, Taken, Worker

from pipeline.errors import ShardFailed
from pipeline.experts.peers import STALL_SLICE
from pipeline.experts.pool import STALL_LIMIT, Ticket
from protocol.messages import Abandon, Hung

# --- works that crash their workers ---------------------------------------------------------------------


def test_work_that_crashes_two_workers_fails_only_its_request(harness: PoolHarness) -> None:
    first, second = harness.start(2)
    crashing, unaffected = harness.submit(7), harness.submit(0, 1)
    poison, beside = first.take(2)
    first.exit(over=poison, crashed=True)
    (other, again, moved) = second.take(3)
    assert [work.tile for work in (other, again, moved)] == [1, 7, 0]
    second.answer(other, 1.0)
    harness.update_for(QUIET)
    assert not crashing.failure
    second.exit(over=again, crashed=True)
    harness.update_until(lambda: bool(crashing.failure))
    with pytest.raises(ShardFailed, match="ended 2 workers"):
        crashing.result()
    third = harness.worker(0, 1)
    warm_up, left = third.take(2)
    assert (len(warm_up.work.items), left.tile) == (0, beside.tile)
    third.answer(warm_up)
    third.answer(left, 2.0)
    assert unaffected.result().tolist() == [[3.0] * HIDDEN]
    assert not unaffected.failure


def test_queued_works_are_not_blamed_for_a_crash(harness: PoolHarness) -> None:
    (worker,), ticket, (work,) = harness.begin(1)
    for generation in range(1, 5):
        worker.exit(crashed=True)  # while the worker was idle
        worker = harness.worker(0, generation)
        warm_up, work = worker.take(2)
    worker.answer(warm_up)
    worker.answer(work, 1.0)
    assert ticket.result().tolist() == [[1.0] * HIDDEN]


def exit_repeatedly(harness: PoolHarness, crashed: list[bool]) -> tuple[Ticket, Taken, Worker]:
    """A Work during which its worker exits several times: by a crash, or by a SIGKILL from outside."""
    (worker,), ticket, (work,) = harness.begin(1)
    for generation, by_itself in enumerate(crashed, start=1):
        worker.exit(over=work, crashed=by_itself)
        worker = harness.worker(0, generation)
        _, work = worker.take(2)
    return ticket, work, worker


def test_kills_from_outside_fail_a_work_only_when_they_are_many(harness: PoolHarness) -> None:
    ticket, work, worker = exit_repeatedly(harness, [False] * 7)
    assert not ticket.failure
    worker.exit(over=work)
    with pytest.raises(ShardFailed, match="ended 8 workers"):
        ticket.result()
    restarted = harness.worker(0, 99)
    assert restarted.take(1)[0].work.items.size == 0  # the pool continues, and the Work is dropped
    assert restarted.messages() == []


def test_warm_up_is_not_repeated_by_another_worker(harness: PoolHarness) -> None:
    """The warm-up belongs to no request."""
    first, second = harness.start(2)
    second.exit()
    for generation in range(1, 4):
        second = harness.worker(1, generation)
        (warm_up,) = second.take()
        second.exit(over=warm_up, crashed=True)
        assert first.messages() == []
    harness.submit(0, 1)
    assert [work.tile for work in first.take(2)] == [0, 1]


# --- workers without progress ---------------------------------------------------------------------------


def hung(harness: PoolHarness) -> list[object]:
    return [message for message in harness.reports if isinstance(message, Hung)]


def test_worker_without_progress_is_reported_once(harness: PoolHarness) -> None:
    first, second = harness.start(2)
    harness.let_pass(2 * STALL_LIMIT)
    assert hung(harness) == []  # idle workers
    ticket = harness.submit(0, 1)
    (work,), (other,) = first.take(), second.take()
    line = harness.control.line("worker", 1)
    for _ in range(30):
        line.tick()  # slow, and making progress
        harness.let_pass(0.2)
    assert hung(harness) == [Hung("worker", 0, 0)]
    second.answer(other, 1.0)
    first.exit(over=work, crashed=True)
    (again,) = second.take()
    second.answer(again, 2.0)
    assert ticket.result().tolist() == [[3.0] * HIDDEN]
    second.exit()
    restarted = harness.worker(0, 1)
    restarted.warm_up()
    harness.submit(0)
    restarted.take()
    harness.let_pass(2 * STALL_LIMIT)
    assert hung(harness) == [Hung("worker", 0, 0), Hung("worker", 0, 1)]


def test_worker_whose_work_was_abandoned_owes_no_answer(harness: PoolHarness) -> None:
    """It drops the Work silently, and is not hung afterwards."""
    (first, second), ticket, (_, other) = harness.begin(2)
    second.answer(other)
    harness.update_until(lambda: len(ticket.answers) == 1)
    ticket.abandon()
    assert [type(message) for message in first.messages(1)] == [Abandon]
    harness.let_pass(2 * STALL_LIMIT)
    assert hung(harness) == []
    assert second.messages() == []
    harness.submit(5)
    assert first.take()[0].tile == 5
    first.exit(crashed=True)
    assert second.take()[0].tile == 5  # only the Work that counts


def test_abandoned_work_is_not_sent_to_the_next_worker(harness: PoolHarness) -> None:
    (worker,) = harness.start(1)
    worker.exit()
    harness.update_for(0.02)
    dropped, kept = harness.submit(1), harness.submit(2)  # without a worker
    dropped.abandon()
    restarted = harness.worker(0, 1)
    warm_up, work = restarted.take(2)
    assert (len(warm_up.work.items), work.tile) == (0, 2)
    restarted.answer(warm_up)
    restarted.answer(work, 3.0)
    assert kept.result().tolist() == [[3.0] * HIDDEN]
    assert restarted.messages() == []


@pytest.mark.parametrize(
    ("warm", "rows", "hung_after"),
    [(True, 50, 4.0), (True, 1, 3.02), (False, 1, 60.0)],
    ids=["many rows", "one row", "before its first answer"],
)
def test_default_limits_of_silence(harness: PoolHarness, warm: bool, rows: int, hung_after: float) -> None:
    (first,) = harness.start(1, warm=False)
    if warm:
        first.warm_up()
        harness.submit(2, x=np.ones((rows, HIDDEN), np.float32))
    first.take()
    while harness.pool.update(20):
        pass
    seconds = -STALL_SLICE
    while not hung(harness) and seconds < hung_after + 1:
        harness.pool.update(0)
        seconds += STALL_SLICE
        harness.clock.now += STALL_SLICE
    assert hung(harness) == [Hung("worker", 0, 0)]
    assert seconds == pytest.approx(hung_after, abs=2.1 * STALL_SLICE)
