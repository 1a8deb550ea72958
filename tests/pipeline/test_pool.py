"""The worker pool: partial sums are added in shard order, and the bits are the same when workers exit and are
restarted. The workers are driven by the test."""

from __future__ import annotations

import numpy as np
import pytest
from pool_harness import HIDDEN, QUIET, PoolHarness, X

from pipeline.errors import PeerLost, ShardFailed
from pipeline.experts import pool
from protocol.messages import Abandon, Partial, WorkerDied, WorkerUp

CANCELS = [1e8, -1e8, 1.0]  # their float32 sum depends on the order: 1 in this one, 0 in others


# --- results --------------------------------------------------------------------------------------------


def test_partials_are_added_in_shard_order_not_in_arrival_order(harness: PoolHarness) -> None:
    workers, ticket, works = harness.begin(3)
    assert [work.tile for work in works] == [0, 1, 2]
    for i, busy in ((2, 0.1), (0, 0.3), (1, 0.2)):
        workers[i].answer(works[i], CANCELS[i], busy)
        harness.update_for(0.02)
    assert ticket.result().tolist() == [[1.0] * HIDDEN]
    assert ticket.busy == pytest.approx(0.3)  # of the slowest


def test_unexpected_partials_are_dropped(harness: PoolHarness) -> None:
    (worker,), ticket, (work,) = harness.begin(1)
    worker.endpoint.send(Partial(work.seq + 99, 0, 0.0, 5 * X))
    worker.answer(work, 2.0)
    worker.endpoint.send(Partial(work.seq, 0, 0.0, 3 * X))  # a second answer changes nothing
    assert ticket.result().tolist() == [[2.0] * HIDDEN]
    harness.update_for(QUIET)
    assert ticket.result().tolist() == [[2.0] * HIDDEN]


def test_refused_work_fails_its_ticket_and_abandons_the_rest(harness: PoolHarness) -> None:
    first, second = harness.start(2)
    ticket, other = harness.submit(0, 1), harness.submit(2, 3)
    refused, later = first.take(2)
    abandoned, kept = second.take(2)
    first.refuse(refused, "no layer 9")
    with pytest.raises(ShardFailed, match="no layer 9"):
        ticket.result()
    assert second.messages(1) == [Abandon(abandoned.seq)]
    assert first.messages() == []
    first.answer(later, 1.0)
    second.answer(abandoned, 7.0)  # it had begun before the Abandon arrived
    second.answer(kept, 1.0)
    assert other.result().tolist() == [[2.0] * HIDDEN]


def test_answer_of_another_shape_fails_its_ticket(over_zmq: PoolHarness) -> None:
    harness = over_zmq
    (worker,), ticket, (work,) = harness.begin(1)
    worker.answer(work, 1.0, rows=2)
    with pytest.raises(ShardFailed, match=r"a worker answered \(1, 4\) rows with \(2, 4\)"):
        ticket.result()
    later = harness.submit(1)
    worker.answer(worker.take()[0], 2.0)
    assert later.result().tolist() == [[2.0] * HIDDEN]


# --- exits ----------------------------------------------------------------------------------------------


def test_exited_workers_shards_go_to_another_with_the_same_bits(harness: PoolHarness) -> None:
    workers, ticket, works = harness.begin(3)
    workers[0].answer(works[0], CANCELS[0])
    workers[1].exit(over=works[1])
    workers[2].answer(works[2], CANCELS[2])
    (again,) = workers[0].take()  # both are idle: the first of them
    assert (again.seq, again.tile) == (works[1].seq, 1)
    np.testing.assert_array_equal(again.x, works[1].x)
    workers[0].answer(again, CANCELS[1])
    assert ticket.result().tolist() == [[1.0] * HIDDEN]
    assert workers[2].messages() == []


@pytest.mark.parametrize("exit_first", [True, False], ids=["exit event first", "Ready first"])
def test_late_partials_of_an_earlier_generation_are_dropped(harness: PoolHarness, exit_first: bool) -> None:
    (worker,), ticket, (work,) = harness.begin(1)
    if exit_first:
        harness.exits.put(WorkerDied("worker", 0, 0, False, work.seq))
    restarted = harness.worker(0, 1)
    warm_up, again = restarted.take(2)
    assert (len(warm_up.work.items), again.seq) == (0, work.seq)
    worker.answer(work, 13.0)
    harness.update_for(QUIET)
    assert not ticket.complete
    if not exit_first:
        harness.exits.put(WorkerDied("worker", 0, 0, False, work.seq))
        harness.update_for(QUIET)
    restarted.answer(again, 2.0)
    assert ticket.result().tolist() == [[2.0] * HIDDEN]
    assert restarted.messages() == []  # it was not sent twice


def test_first_answer_received_together_with_the_exit(harness: PoolHarness) -> None:
    """While a send or a start waits, a worker's first answer and its exit are both received and then
    delivered one after the other: the answer must not mark the restarted worker as up, nor fail."""
    (worker,) = harness.start(1, warm=False)
    (warm_up,) = worker.take()
    worker.answer(warm_up)
    with pytest.raises(PeerLost, match="1 of 2"):
        harness.socket.wait_ready(2, 0.2)  # receives the answer
    worker.exit()
    restarted = harness.worker(0, 1)
    with pytest.raises(PeerLost, match="of 2"):
        harness.socket.wait_ready(2, 0.2)  # receives the exit and the restarted worker's Ready
    restarted.take()
    harness.update_for(QUIET)
    assert not harness.socket.is_up(0)
    assert harness.reports == []


def test_unassigned_work_waits_for_the_only_workers_restart(harness: PoolHarness) -> None:
    (worker,), before, (work,) = harness.begin(1)
    worker.exit(over=work)
    harness.update_for(QUIET)
    meanwhile = harness.submit(1)
    harness.update_for(QUIET)
    restarted = harness.worker(0, 1)
    warm_up, first, second = restarted.take(3)
    assert (len(warm_up.work.items), first.tile, second.tile) == (0, 0, 1)
    restarted.answer(warm_up)
    restarted.answer(first, 1.0)
    restarted.answer(second, 2.0)
    assert before.result().tolist() == [[1.0] * HIDDEN]
    assert meanwhile.result().tolist() == [[2.0] * HIDDEN]
    assert harness.reports == [WorkerUp("worker", 0, 0), WorkerUp("worker", 0, 1)]


def test_wait_without_any_worker_ends_after_the_pools_limit(harness: PoolHarness, monkeypatch) -> None:
    monkeypatch.setattr(pool, "POOL_LIMIT", 0.3)
    (worker,), ticket, _ = harness.begin(1)
    worker.exit()
    harness.update_for(0.05)
    with pytest.raises(PeerLost, match="no worker has started"):
        ticket.result()


def test_worker_that_is_not_up_gets_no_work_while_another_is(harness: PoolHarness) -> None:
    first, second = harness.start(2)
    second.exit()
    restarted = harness.worker(1, 1)
    (warm_up,) = restarted.take()
    ticket = harness.submit(0, 1)
    works = first.take(2)
    assert [work.tile for work in works] == [0, 1]
    assert restarted.messages() == []
    restarted.answer(warm_up)
    harness.update_for(QUIET)
    for work in works:
        first.answer(work, 1.0)
    assert ticket.result().tolist() == [[2.0] * HIDDEN]
    harness.submit(2, 3)
    assert (first.take()[0].tile, restarted.take()[0].tile) == (2, 3)


def test_orders_of_an_exited_worker_go_to_the_least_busy(harness: PoolHarness) -> None:
    workers = harness.start(3)
    for tile in range(3):
        harness.submit(9, tile)  # two Works: worker 1 gets three of them
    assert len(workers[0].take(3)) == 3
    workers[1].take(3)
    workers[1].exit()
    assert sorted(work.tile for work in workers[2].take(3)) == [0, 1, 2]
    assert workers[0].messages() == []
