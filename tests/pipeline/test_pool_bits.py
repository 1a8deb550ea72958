"""A layer's sum has the same bits however its Works are carried, and whoever computes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from mover_parts import encoded_store
from thread_engine import pool_in_threads

from pipeline.arrays import sum_on_host
from pipeline.config import WorkerCores
from pipeline.experts.division import Divider, Split
from pipeline.experts.pool import HostPool, computing
from pipeline.policies.view import Routing
from shm.layout import ExpertShape
from shm.mask import DENSE, Mask
from workers.kernels.native import store_kernel

SHAPE = ExpertShape(layers=2, experts=6, hidden=64, intermediate=320, tile=64)
ROWS, TOP_K = 40, 3


def plans(mask: Mask) -> Iterator[tuple[Split, np.ndarray]]:
    """Of one row, of a few and of many; of some experts the host has some tiles alone."""
    random = np.random.default_rng(7)
    for rows in (1, 4, 3, ROWS, 1):
        experts = np.array([random.permutation(SHAPE.experts)[:TOP_K] for _ in range(rows)], np.int32)
        weights = random.random((rows, TOP_K), np.float32)
        lo = random.integers(0, SHAPE.tiles, SHAPE.experts).astype(np.int32)
        hi = np.full(SHAPE.experts, SHAPE.tiles, np.int32)
        x = random.standard_normal((rows, SHAPE.hidden)).astype(np.float32)
        yield Split(1, Routing(experts, weights), lo, hi, mask), x


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", ["int4", "floe-int4"])
def test_bits_do_not_depend_on_the_exchange(tmp_path: Path, name: str, workers: int) -> None:
    """Sockets, the arena, and this process; with several workers, this process adds what each would
    answer."""
    tmp_path.chmod(0o700)
    mask = Mask(share=0.5) if name.startswith("floe") else DENSE
    with encoded_store(SHAPE, "pool_bits", name) as store:
        compute = computing(store_kernel(store))
        every = Divider(WorkerCores.equal(workers), SHAPE.experts, SHAPE.tiles)
        expected = []
        for plan, x in plans(mask):
            answers = [compute(part, x) for _, part in every.divide(plan, 1).parts]
            expected.append((sum_on_host([answer.y for answer in answers], x.shape), answers))
        inline = nullcontext(HostPool(every, WorkerCores.equal(1), compute))
        ways = [pool_in_threads(tmp_path, store, workers, exchange, TOP_K) for exchange in ("zmq", "shm")]
        for way in [*ways, inline] if workers == 1 else ways:
            with way as pool:
                tickets = [(pool.submit(plan, x), x) for plan, x in plans(mask)]
                for (ticket, _), (y, answers) in zip(tickets, expected, strict=True):
                    np.testing.assert_array_equal(ticket.result().view(np.uint32), y.view(np.uint32))
                    assert ticket.tally.channels == sum(answer.tally.channels for answer in answers)
                    assert ticket.tally.mass == pytest.approx(sum(answer.tally.mass for answer in answers))
