"""The worker pool: sums in run order, and the same bits when workers die and come back. Each worker is the
test's, and does as it says."""

from __future__ import annotations

import numpy as np
import pytest
from pool_scene import HIDDEN, QUIET, X, tile_of

from pipeline.errors import PeerLost, ShardFailed
from protocol.messages import Abandon, Partial, WorkerDied, WorkerUp, WorkFailed

CANCELS = [1e8, -1e8, 1.0]  # in float32 their sum depends on the order: 1 in this one, 0 in others


# --- results --------------------------------------------------------------------------------------------


def test_partials_are_added_in_run_order_whoever_answers_first(pool_scene) -> None:
    workers = pool_scene.begin(3)
    ticket = pool_scene.submit(0, 1, 2)
    works = [worker.got()[0] for worker in workers]
    assert [tile_of(work) for work in works] == [0, 1, 2]
    for i in (2, 0, 1):
        workers[i].answer(works[i], CANCELS[i])
        pool_scene.go_on(0.02)
    assert pool_scene.pool.result(ticket).tolist() == [[1.0] * HIDDEN]
    assert ticket.busy == pytest.approx(0.1)


def test_a_partial_that_nobody_waits_for_is_dropped(pool_scene) -> None:
    (worker,) = pool_scene.begin(1)
    ticket = pool_scene.submit(0)
    (work,) = worker.got()
    worker.peer.send(Partial(work.seq + 99, 0, 0.0, 5 * X))
    worker.answer(work, 2.0)
    worker.answer(work, 3.0)  # a second answer changes nothing
    assert pool_scene.pool.result(ticket).tolist() == [[2.0] * HIDDEN]
    pool_scene.go_on(QUIET)
    assert pool_scene.pool.result(ticket).tolist() == [[2.0] * HIDDEN]


def test_a_refused_work_fails_its_ticket_and_what_is_left_of_it_is_abandoned(pool_scene) -> None:
    first, second = pool_scene.begin(2)
    ticket, other = pool_scene.submit(0, 1), pool_scene.submit(2, 3)
    refused, later = first.got(2)
    abandoned, kept = second.got(2)
    first.peer.send(WorkFailed(refused.seq, 0, "no layer 9"))
    with pytest.raises(ShardFailed, match="no layer 9"):
        pool_scene.pool.result(ticket)
    assert list(second.peer.receive(wait=True)) == [Abandon(abandoned.seq)]
    assert first.quiet()
    first.answer(later, 1.0)
    second.answer(abandoned, 7.0)  # it was too late to skip it
    second.answer(kept, 1.0)
    assert pool_scene.pool.result(other).tolist() == [[2.0] * HIDDEN]


# --- deaths ---------------------------------------------------------------------------------------------


def test_a_dead_workers_runs_go_to_another_and_the_bits_are_the_same(pool_scene) -> None:
    workers = pool_scene.begin(3)
    ticket = pool_scene.submit(0, 1, 2)
    works = [worker.got()[0] for worker in workers]
    workers[0].answer(works[0], CANCELS[0])
    workers[1].die(over=works[1])
    workers[2].answer(works[2], CANCELS[2])
    (again,) = workers[0].got()  # both are idle: the first of them
    assert (again.seq, tile_of(again)) == (works[1].seq, 1)
    np.testing.assert_array_equal(again.x, works[1].x)
    workers[0].answer(again, CANCELS[1])
    assert pool_scene.pool.result(ticket).tolist() == [[1.0] * HIDDEN]
    assert workers[2].quiet()


def test_what_was_answered_before_a_death_is_not_done_again(pool_scene) -> None:
    first, second = pool_scene.begin(2)
    ticket = pool_scene.submit(0, 1)
    (work,), (other,) = first.got(), second.got()
    first.answer(work, 1.0)
    pool_scene.go_on(QUIET)
    first.die()
    assert second.quiet()
    second.answer(other, 2.0)
    assert pool_scene.pool.result(ticket).tolist() == [[3.0] * HIDDEN]


@pytest.mark.parametrize("news", [True, False], ids=["the news first", "the successor first"])
def test_late_partials_of_a_dead_life_are_dropped(pool_scene, news) -> None:
    (worker,) = pool_scene.begin(1)
    ticket = pool_scene.submit(0)
    (work,) = worker.got()
    if news:
        pool_scene.deaths.put(WorkerDied("worker", 0, 0, False, work.seq))
    successor = pool_scene.worker(0, 1)
    wake, again = successor.got(2)
    assert (len(wake.items), again.seq) == (0, work.seq)
    worker.answer(work, 13.0)
    pool_scene.go_on(QUIET)
    assert not ticket.complete
    if not news:
        pool_scene.deaths.put(WorkerDied("worker", 0, 0, False, work.seq))
        pool_scene.go_on(QUIET)
    successor.answer(again, 2.0)
    assert pool_scene.pool.result(ticket).tolist() == [[2.0] * HIDDEN]
    assert successor.quiet()  # it was not sent twice


def test_the_last_worker_dies_and_work_waits_for_its_successor(pool_scene) -> None:
    (worker,) = pool_scene.begin(1)
    before = pool_scene.submit(0)
    (work,) = worker.got()
    worker.die(over=work)
    pool_scene.go_on(QUIET)
    meanwhile = pool_scene.submit(1)
    pool_scene.go_on(QUIET)
    successor = pool_scene.worker(0, 1)
    wake, first, second = successor.got(3)
    assert (len(wake.items), tile_of(first), tile_of(second)) == (0, 0, 1)
    successor.answer(wake)
    successor.answer(first, 1.0)
    successor.answer(second, 2.0)
    assert pool_scene.pool.result(before).tolist() == [[1.0] * HIDDEN]
    assert pool_scene.pool.result(meanwhile).tolist() == [[2.0] * HIDDEN]
    assert pool_scene.said == [WorkerUp("worker", 0, 0), WorkerUp("worker", 0, 1)]


def test_without_any_worker_a_wait_ends_at_last(pool_scene, monkeypatch) -> None:
    monkeypatch.setattr("pipeline.experts.worker_pool.ANSWER_LIMIT", 0.3)
    (worker,) = pool_scene.begin(1)
    ticket = pool_scene.submit(0)
    worker.got()
    worker.die()
    pool_scene.go_on(0.05)
    with pytest.raises(PeerLost, match="no worker has come"):
        pool_scene.pool.result(ticket)


def test_a_worker_that_is_not_up_gets_nothing_while_another_is(pool_scene) -> None:
    first, second = pool_scene.begin(2)
    second.die()
    successor = pool_scene.worker(1, 1)
    (wake,) = successor.got()
    ticket = pool_scene.submit(0, 1)
    works = first.got(2)
    assert [tile_of(work) for work in works] == [0, 1]
    assert successor.quiet()
    successor.answer(wake)
    pool_scene.go_on(QUIET)
    for work in works:
        first.answer(work, 1.0)
    assert pool_scene.pool.result(ticket).tolist() == [[2.0] * HIDDEN]
    pool_scene.submit(2, 3)
    assert (tile_of(first.got()[0]), tile_of(successor.got()[0])) == (2, 3)


def test_nobody_is_up_yet_at_the_start_and_all_are_given_work(pool_scene) -> None:
    workers = pool_scene.begin(2, awake=False)
    pool_scene.submit(0, 1)
    for index, worker in enumerate(workers):
        wake, work = worker.got(2)
        assert (len(wake.items), tile_of(work)) == (0, index)


def test_the_works_of_a_dead_one_are_shared_by_the_others(pool_scene) -> None:
    workers = pool_scene.begin(3)
    for tile in range(4):
        pool_scene.submit(9, tile)  # two runs: worker 1 gets four of them
    busy, idle = workers[0].got(4), workers[2]
    assert len(busy) == 4
    workers[1].got(4)
    workers[1].die()
    assert sorted(tile_of(work) for work in idle.got(4)) == [0, 1, 2, 3]
    assert workers[0].quiet()
