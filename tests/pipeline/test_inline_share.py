"""The pool without processes: the sum of its shards, its seconds, and a slower host."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from clock import Clock
from made_shares import share_of
from mover_parts import SHAPE

from pipeline.coordinator_config import WorkerCores
from pipeline.experts import inline_pool
from pipeline.experts.host_shards import divide_into_shards
from pipeline.experts.inline_pool import InlineExpertPool
from pipeline.experts.shares import Share
from protocol.messages import Partial, Work
from shm.store import Store
from workers.kernels.host import HostKernel

SECONDS = 2.0  # of each shard
X = np.random.default_rng(3).standard_normal((3, SHAPE.hidden)).astype(np.float32)


class SleepingClock(Clock):
    """Records the sleeps."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
def slow_kernel(monkeypatch) -> Iterator[SleepingClock]:
    clock, compute = SleepingClock(), HostKernel.compute_work

    def slow(self: HostKernel, work: Work, store: Store) -> Partial:
        clock.now += SECONDS
        return compute(self, work, store)

    monkeypatch.setattr(HostKernel, "compute_work", slow)
    monkeypatch.setattr(inline_pool, "time", clock)
    return clock


def host_share() -> Share:
    """Two experts: rows 0 and 2, and row 2 alone."""
    return share_of([(0, 1, SHAPE.tiles), (2, 0, 2)], [[0, 2], [2]], [[0.5, 1.0], [2.0]])


@pytest.mark.parametrize(("slowdown", "busy", "slept"), [(1.0, 4.0, []), (0.5, 4.0, []), (3.0, 12.0, [8.0])])
def test_shards_are_added_and_a_slower_host_waits(
    mover_store: Store, slow_kernel: SleepingClock, slowdown: float, busy: float, slept: list[float]
) -> None:
    pool = InlineExpertPool(mover_store, None, slowdown)
    assert (pool.workers, pool.cores, pool.update(1000)) == (0, WorkerCores.equal(1), False)
    shards = divide_into_shards(host_share(), WorkerCores.equal(2), "prefill", len(X))
    assert [shard.kept.tolist() for shard in shards] == [[0, 2], [2]]
    ticket = pool.submit(1, shards, X)
    assert (slow_kernel.now, ticket.busy) == (Clock.now, 0.0)  # `result` computes
    y = ticket.result()
    assert (ticket.busy, slow_kernel.slept) == (busy, slept)

    kernel, expected = HostKernel(mover_store.layout), np.zeros_like(X)
    for shard in shards:
        work = Work(0, 1, shard.items, shard.offsets, shard.rows, shard.weights, X[shard.kept])
        expected[shard.kept] += kernel.compute_work(work, mover_store).y
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert y[[0, 2]].any(axis=1).all()
    assert not y[1].any()


def test_abandoned_share_is_not_computed(mover_store: Store, slow_kernel: SleepingClock) -> None:
    pool = InlineExpertPool(mover_store, None, 1.0)
    shards = divide_into_shards(host_share(), pool.cores, "prefill", len(X))
    pool.submit(0, shards, X).abandon()
    assert slow_kernel.now == Clock.now
    empty = pool.submit(0, [], X)
    assert empty.result().tolist() == np.zeros_like(X).tolist()
    assert empty.busy == 0.0
