"""The shard that the coordinator computes itself, of a share that was announced."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from child_messages import LIMIT
from descriptor_parts import parts_of
from pool_harness import HIDDEN, PoolHarness, Worker, X

from pipeline.arrays import FloatArray
from pipeline.config import WorkerCores
from pipeline.experts.pool import Answer
from shm.descriptor import Descriptor
from shm.lane import library
from shm.mask import NOTHING, Tally


@pytest.fixture
def core() -> Iterator[int]:
    """Of this thread, which stays there."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield min(before)
    os.sched_setaffinity(0, before)


@contextmanager
def asleep(worker: Worker, core: int, value: float = 0.0) -> Iterator[None]:
    """The worker sleeps on this core until its doorbell rings, and answers its Work with `value`."""
    lane = worker.lane
    assert lane is not None
    lane.wait(0.0)  # for what has rung before

    def answer() -> None:
        os.sched_setaffinity(0, {core})
        lane.wait(LIMIT)
        if (slot := lane.take()) is not None:
            slot.y[:1] = value
            lane.answer(slot, 0.1, NOTHING)

    thread = threading.Thread(target=answer)
    thread.start()
    bell = (lane._bell,)
    until = time.monotonic() + LIMIT
    while library().rouse(bell) < 0:
        assert time.monotonic() < until
        time.sleep(0.001)
    try:
        yield
    finally:
        library().ring(bell)
        thread.join()


class Kernel:
    """Computes Works as the coordinator: each number is 10."""

    def __init__(self) -> None:
        self.tiles: list[int] = []
        self.fault: Exception | None = None

    def __call__(self, descriptor: Descriptor, x: FloatArray) -> Answer:
        self.tiles.append(int(parts_of(descriptor).items[0, 1]))
        if self.fault is not None:
            raise self.fault
        return Answer(0, 0, 0.0, np.full(x.shape, 10, np.float32), Tally(6.0, 1.0, 2, 16))


def started(arena: PoolHarness, kernel: Kernel, cores: tuple[int, ...] = (1, 1)) -> list[Worker]:
    workers = arena.start(len(cores), compute=kernel, cores=WorkerCores(cores))
    for worker in workers:
        worker.messages()
        assert worker.lane is not None
    return workers


def test_the_shard_of_the_worker_on_this_core_is_computed_here(arena: PoolHarness, core: int) -> None:
    first, second = started(arena, kernel := Kernel())
    with asleep(second, core):
        arena.pool.announce()
        ticket = arena.submit(0, 1)
        (work,) = first.take()
        first.answer(work, 1.0, tally=Tally(0.5, 0.25, 3, 8))
        assert ticket.result().tolist() == [[11.0] * HIDDEN]
        assert ticket.tally == Tally(6.5, 1.25, 5, 24)
    assert (work.tile, kernel.tiles) == (0, [1])
    assert second.messages() == []


def test_a_share_that_was_not_announced_is_the_workers(arena: PoolHarness, core: int) -> None:
    first, second = started(arena, kernel := Kernel())
    with asleep(second, core, 2.0):
        arena.pool.announce()
        arena.submit(0).abandon()
        ticket = arena.submit(5, 1)
        (work,) = first.take()  # the other one is abandoned
        first.answer(work, 1.0)
        assert ticket.result()[0, 0] == 3.0
    assert kernel.tiles == []


@pytest.mark.parametrize("fault", [IndexError("a crash"), MemoryError()])
def test_a_shard_that_fails_here_is_given_to_its_worker(
    arena: PoolHarness, core: int, fault: Exception
) -> None:
    first, second = started(arena, kernel := Kernel())
    kernel.fault = fault
    with asleep(second, core, 2.0):
        arena.pool.announce()
        ticket = arena.submit(0, 1)
        first.answer(first.take()[0], 1.0)
        assert ticket.result()[0, 0] == 3.0
    assert kernel.tiles == [1]


def test_a_shard_for_several_cores_is_not_computed_on_one(arena: PoolHarness, core: int) -> None:
    (worker,) = started(arena, kernel := Kernel(), (2,))
    with asleep(worker, core, 2.0):
        arena.pool.announce()
        assert arena.submit(0).result().tolist() == (2 * X).tolist()
    assert kernel.tiles == []
