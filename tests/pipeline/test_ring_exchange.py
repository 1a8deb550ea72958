"""The exchange through shared memory: what goes through rings and what over ZeroMQ, and the rings' names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pool_harness import HIDDEN, QUIET, PoolHarness, shard_of, tile_of

from pipeline.experts import ring_exchange
from pipeline.experts.ring_exchange import RingExchange
from shm.errors import NotEnoughMemory
from shm.segment import SHM_FOLDER


def exchange_of(harness: PoolHarness) -> RingExchange:
    assert isinstance(harness.exchange, RingExchange)
    return harness.exchange


def carried(harness: PoolHarness) -> tuple[int, int]:
    """Works through rings, and over ZeroMQ, after the warm-ups."""
    stats = exchange_of(harness).stats()
    return stats["through_rings"], stats["over_zmq"] - harness.pool.workers


def names(harness: PoolHarness) -> list[str]:
    return [path.name for path in Path(SHM_FOLDER).glob(f"{harness.prefix[1:]}*")]


def test_works_beyond_the_slots_and_wide_ones_go_over_zmq_and_all_are_answered(rings: PoolHarness) -> None:
    (worker,) = rings.start(1)
    x = np.ones((9, HIDDEN), np.float32)
    wide = rings.pool.submit(0, [shard_of(7)._replace(kept=np.arange(9))], x)
    narrow = [rings.submit(tile) for tile in range(3)]
    assert carried(rings) == (2, 2)
    works = worker.take(4)
    assert sorted(tile_of(work) for work in works) == [0, 1, 2, 7]
    for work in works:
        worker.answer(work, float(tile_of(work)))
    assert wide.result().tolist() == [[7.0] * HIDDEN] * 9
    assert [ticket.result()[0, 0] for ticket in narrow] == [0.0, 1.0, 2.0]
    again = rings.submit(5)
    assert carried(rings) == (3, 2)  # the slots are free again
    worker.answer(*worker.take(), 5.0)
    assert again.result()[0, 0] == 5.0


def test_abandoned_works_give_their_slots_back(rings: PoolHarness) -> None:
    (worker,) = rings.start(1)
    for tile in range(4):
        rings.submit(tile).abandon()
        assert worker.ring is not None
        assert worker.ring.take() is None  # skipped
        rings.update_for(0.02)
    assert carried(rings) == (4, 0)
    assert worker.messages() == []


def test_names_are_removed_when_a_worker_has_mapped_its_ring_or_exits_before(rings: PoolHarness) -> None:
    first, second = rings.start(2, warm=False)
    assert len(names(rings)) == 2
    first.take()
    assert len(names(rings)) == 1
    second.exit()
    rings.update_for(0.05)
    assert names(rings) == []
    rings.worker(1, 1)
    rings.update_for(QUIET)
    assert len(names(rings)) == 1
    exchange_of(rings).close()
    assert names(rings) == []


def test_without_memory_for_a_ring_its_worker_gets_work_over_zmq(
    rings: PoolHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: object) -> None:
        raise NotEnoughMemory("/dev/shm is full")

    monkeypatch.setattr(ring_exchange, "CoordinatorRing", full)
    (worker,) = rings.start(1)
    ticket = rings.submit(3)
    worker.answer(*worker.take(), 4.0)
    assert ticket.result()[0, 0] == 4.0
    assert carried(rings) == (0, 1)
    assert "worker 0 gets its work over ZeroMQ: /dev/shm is full" in caplog.text
