"""The pool without processes: its sum and its seconds, a slower host, and a Work that cannot be computed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from clock import Clock
from mover_parts import SHAPE

from pipeline.config import WorkerCores
from pipeline.errors import ShardFailed
from pipeline.experts import pool as pools
from pipeline.experts.division import Divider, Split
from pipeline.experts.pool import HostPool, computing
from pipeline.policies.view import Routing
from shm.mask import DENSE
from shm.store import Store
from workers.kernels.c_types import Geometry
from workers.kernels.native import WorkKernel, best, store_kernel

SECONDS = 2.0  # of each Work
X = np.random.default_rng(3).standard_normal((3, SHAPE.hidden)).astype(np.float32)


class SleepingClock(Clock):
    """Records the sleeps."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
def slow_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[SleepingClock]:
    clock, compute = SleepingClock(), WorkKernel.compute

    def slow(self: WorkKernel, *work: object) -> object:
        clock.now += SECONDS
        return compute(self, *work)  # type: ignore[arg-type]

    monkeypatch.setattr(WorkKernel, "compute", slow)
    monkeypatch.setattr(pools, "time", clock)
    return clock


def pool_of(store: Store, slowdown: float = 1.0) -> HostPool:
    cores, shape = WorkerCores.equal(1), store.layout.shape
    compute = computing(store_kernel(store), slowdown)
    return HostPool(Divider(cores, shape.experts, shape.tiles), cores, compute)


def plan(layer: int = 1) -> Split:
    """Two experts: rows 0 and 2, and row 2 alone."""
    weights = np.array([[0.5, 0], [0, 0], [1.0, 2.0]], np.float32)
    lo, hi = np.zeros((2, SHAPE.experts), np.int32)
    lo[0], hi[0], hi[2] = 1, SHAPE.tiles, 2
    return Split(layer, Routing(np.array([[0, 2]] * 3, np.int32), weights), lo, hi, DENSE)


@pytest.mark.parametrize(("slowdown", "busy", "slept"), [(1.0, 2.0, []), (3.0, 6.0, [4.0])])
def test_the_result_is_computed_when_it_is_asked_for(
    mover_store: Store, slow_kernel: SleepingClock, slowdown: float, busy: float, slept: list[float]
) -> None:
    pool = pool_of(mover_store, slowdown)
    assert (pool.workers, pool.update(1000)) == (0, False)
    ticket = pool.submit(plan(), X)
    assert (slow_kernel.now, ticket.busy) == (Clock.now, 0.0)
    y = ticket.result()
    assert (ticket.busy, slow_kernel.slept) == (busy, slept)
    kernel, every, expected = (
        best().kernel(Geometry.of_tiles(mover_store.layout)),
        np.arange(3, dtype=np.int32),
        np.zeros_like(X),
    )
    for expert, lo, hi, weights in ((0, 1, SHAPE.tiles, [0.5, 0, 1]), (2, 0, 2, [0, 0, 2])):
        tiles = mover_store.tiles(1, expert, lo, hi)
        expected += kernel.tiles(tiles, kernel.quantize(X), every) * np.array(weights, np.float32)[:, None]
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert y[[0, 2]].any(axis=1).all()
    assert not y[1].any()


def test_a_work_that_cannot_be_computed_fails_alone(mover_store: Store) -> None:
    pool = pool_of(mover_store)
    with pytest.raises(ShardFailed, match=r"no (such )?layer"):
        pool.submit(plan(SHAPE.layers), X).result()
    assert pool.submit(plan(), X).result().any()
