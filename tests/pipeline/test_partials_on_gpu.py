"""Partial sums that a GPU reads in the workers' lanes, on the stand-in for one, whose kernels run late: no
slot is written before it was read, whoever exits, and page-locked memory is given back."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from emulated_cuda import EmulatedLauncher, library
from fake_gpu import FakeCudaDevice, fake_device
from fake_runtime import FakeRuntime
from numpy.typing import NDArray
from pool_harness import HIDDEN, SHAPE, PoolHarness, Worker
from torch import Tensor

from pipeline.experts.carriers import ArenaCarrier
from pipeline.experts.pool import Ticket
from shm import lane
from workers.kernels.cuda.compiler import Program
from workers.kernels.cuda.launcher import Tables

ROWS = 3


class LateLauncher(EmulatedLauncher):
    """Launches run on the stand-in's stream, and read the host's memory only where it is registered."""

    def __init__(self, program: Program, runtime: FakeRuntime) -> None:
        super().__init__(library(program))
        self._runtime = runtime

    def launch(
        self, kernel: str, blocks: int, threads: int, *arguments: int, tables: Tables | None = None
    ) -> None:
        assert tables is not None
        told = tables.values.view(np.int64)  # rows and sources, of which the only one is the parts
        _, _, first, number = told[2:6].tolist()
        parts = told[first // 8 :][:number].tolist()

        def late() -> None:
            for address in parts:
                assert self._runtime.page_locked(address, 4 * HIDDEN)
            super(LateLauncher, self).launch(kernel, blocks, threads, *arguments, tables=tables)

        self._runtime.launch(late)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeCudaDevice, FakeRuntime]]:
    with fake_device() as (device, runtime):
        monkeypatch.setattr(device, "launcher", lambda program: LateLauncher(program, runtime))
        yield device, runtime


@pytest.fixture
def pool(arena: PoolHarness, gpu: tuple[FakeCudaDevice, FakeRuntime]) -> Iterator[PoolHarness]:
    arena.carrier.close()
    arena.carrier = ArenaCarrier(arena.socket, lane.library(), arena.prefix, SHAPE, gpu[0])
    yield arena
    arena.carrier.close()


def submit(pool: PoolHarness, *tiles: int, rows: int = ROWS) -> Ticket:
    """A Work of each of these tiles."""
    return pool.submit(*tiles, x=np.ones((rows, HIDDEN), np.float32))


def result_on(device: FakeCudaDevice, ticket: Ticket) -> Tensor:
    """As the engine does it for a step without graphs."""
    y = device.total([], ticket.parts(), ticket.x.shape)
    ticket.release()
    return y


def expected(*tiles: int) -> NDArray[np.float32]:
    return np.full((ROWS, HIDDEN), sum(tiles), np.float32)


def answered(workers: list[Worker], number: int = 1) -> None:
    for worker in workers:
        for work in worker.take(number):
            worker.answer(work, float(work.tile))


def test_no_slot_is_written_again_before_the_gpu_has_read_it(pool, gpu) -> None:
    device, runtime = gpu
    workers = pool.start(3)
    assert pool.carrier.stats()["read_by_gpu"] == 3
    found: list[tuple[Tensor, Any]] = []
    for turn in range(40):
        tiles = [turn, 100 * turn, 10000 * turn]
        ticket = submit(pool, *tiles)
        early = submit(pool, *reversed(tiles)) if turn % 3 == 0 else None
        answered(workers, 1 + (early is not None))
        found += [(result_on(device, t), e) for t, e in ((ticket, tiles), (early, tiles[::-1])) if t]
    device.wait(device.fence())
    for y, tiles in found:
        np.testing.assert_array_equal(y.numpy(), expected(*tiles))
    assert runtime.calls["cudaHostRegister"] == 4  # and the hall


def test_slots_are_free_again_with_the_next_read(pool, gpu) -> None:
    """As in a step, where each layer's read waits for the sum of the layer before: without a call."""
    device, runtime = gpu
    workers = pool.start(2)
    for turn in range(10):
        ticket = submit(pool, turn, 100 * turn)
        answered(workers)
        y = result_on(device, ticket)
        device.wait_for_stream()
        np.testing.assert_array_equal(y.numpy(), expected(turn, 100 * turn))
    assert runtime.calls["cudaEventRecord"] == runtime.calls["cudaEventSynchronize"] == 0


def test_a_worker_exits_over_a_part_and_another_computes_it(pool, gpu) -> None:
    """Before its answer, behind it, and with it read but not added: the sum is right, no lane is unmapped
    while it is read, and all are given back."""
    device, runtime = gpu
    workers = pool.start(3)
    found: list[tuple[Tensor, Any]] = []
    generations = itertools.count(1)
    for turn in range(9):
        tiles = [turn, 100 + turn, 10000 + turn]
        ticket = submit(pool, *tiles)
        works = [worker.take()[0] for worker in workers]
        if turn % 3:
            workers[1].answer(works[1], tiles[1])
        if turn % 3 == 2:
            pool.update_until(lambda ticket=ticket: len(ticket.answers) == 1)
        workers[1].exit(works[1] if turn % 3 == 0 else None)
        workers[0].answer(works[0], tiles[0])
        workers[2].answer(works[2], tiles[2])
        pool.update_until(lambda: 1 not in pool.pool._running)
        pool.update_until(lambda ticket=ticket: len(ticket.answers) >= 2)
        answered([worker for worker in workers[::2] if pool.pool._running[worker.index].tasks])
        runtime.launch(lambda: time.sleep(0.05))  # the GPU is busy while the next worker starts
        found.append((result_on(device, ticket), tiles))
        workers[1] = pool.worker(1, next(generations))
        workers[1].warm_up()
        assert pool.carrier.stats()["read_by_gpu"] == 3
        assert len(runtime.registered) <= 5
    device.wait(device.fence())
    for y, tiles in found:
        np.testing.assert_array_equal(y.numpy(), expected(*tiles))
    pool.carrier.close()
    assert not runtime.registered


def test_shares_that_are_dropped_give_their_slots_back(pool, gpu) -> None:
    device, _ = gpu
    workers = pool.start(2)
    for turn in range(6):
        ticket = submit(pool, 1, 2)
        (work, _), _ = [worker.take()[0] for worker in workers], None
        workers[0].answer(work, 1.0)
        pool.update_until(lambda ticket=ticket: len(ticket.answers) == 1)
        ticket.abandon()
        if turn % 2:
            ticket.abandon()  # twice is as good as once
        assert workers[1].lane is not None
        workers[1].lane.skip(workers[1]._slots.popitem()[1])
        pool.update_for(0.01)
    ticket = submit(pool, 3, 4)
    answered(workers)
    y = result_on(device, ticket)
    device.wait(device.fence())
    np.testing.assert_array_equal(y.numpy(), expected(3, 4))


@pytest.mark.parametrize("call", ["cudaHostRegister", "cudaHostGetDevicePointer"])
def test_where_memory_cannot_be_shared_the_host_adds(pool, gpu, call, caplog) -> None:
    device, runtime = gpu
    runtime.failures[call] = 0
    workers = pool.start(2)
    ticket = submit(pool, 3, 4)
    answered(workers)
    y = result_on(device, ticket)
    device.wait(device.fence())
    np.testing.assert_array_equal(y.numpy(), expected(3, 4))
    assert pool.carrier.stats()["read_by_gpu"] == 0
    assert caplog.text.count(f"answers are added on the host: the GPU cannot read them: {call}") == 1
    assert len(runtime.registered) == 1  # the hall, which was shared before
