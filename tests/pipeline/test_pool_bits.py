"""A layer's sum has the same bits however its Works are carried, and whoever computes them."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from child_messages import LIMIT, child_endpoint, child_socket, control_segment
from mover_parts import encoded_store

from pipeline.config import WorkerCores
from pipeline.device.base import sum_on_host
from pipeline.experts.carriers import ArenaCarrier, SocketCarrier
from pipeline.experts.division import Divider, Split, largest
from pipeline.experts.pool import HostPool, computing
from pipeline.policies.view import Routing
from protocol.messages import Shutdown
from shm.lane import LaneShape, library
from shm.layout import ExpertShape
from shm.mask import DENSE, Mask
from shm.store import Store
from workers.expert_worker import serve
from workers.kernels.native import store_kernel

SHAPE = ExpertShape(layers=2, experts=6, hidden=64, intermediate=320, tile=64)
NUMBER = itertools.count()
ROWS, TOP_K = 40, 3


@contextmanager
def pool_of(folder: Path, store: Store, workers: int, exchange: str) -> Iterator[HostPool]:
    """Its workers are threads of this process."""
    cores, shape = WorkerCores.equal(max(1, workers)), store.layout.shape
    division = Divider(cores, shape.experts, shape.tiles)
    if not workers:
        yield HostPool(division, cores, computing(store_kernel(store)))
        return
    with ExitStack() as stack:
        socket = stack.enter_context(child_socket(folder, "work.sock", "worker", store.fingerprint))
        control = stack.enter_context(control_segment(workers))

        def work(index: int) -> None:
            peer = child_endpoint(folder, "worker", "work.sock", store.fingerprint, index, index + 5)
            peer.announce()
            line = control.line("worker", index)
            kernel = store_kernel(store, None, line, generation=peer.generation)
            serve(peer, line, kernel, 1.0)
            peer.close()

        threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(workers)]
        for thread in threads:
            thread.start()
        carrier: ArenaCarrier | SocketCarrier = SocketCarrier(socket, shape.hidden)
        if exchange == "shm":
            sizes = [(rows, largest(cores, shape.experts, shape.tiles, rows, TOP_K)) for rows in (4, ROWS)]
            prefix = f"/tandem-tests{os.getpid()}-bits-{next(NUMBER)}-"
            carrier = ArenaCarrier(socket, library(), prefix, LaneShape(shape.hidden, *sizes))
            stack.callback(carrier.close)
        pool = HostPool(division, cores, None, socket, carrier, control)
        pool.wait_ready(LIMIT)
        yield pool
        for index, thread in enumerate(threads):
            socket.send(index, Shutdown())
            thread.join(LIMIT)


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
        ways = [(workers, "zmq"), (workers, "shm")] + ([(0, "")] if workers == 1 else [])
        for number, exchange in ways:
            with pool_of(tmp_path, store, number, exchange) as pool:
                tickets = [(pool.submit(plan, x), x) for plan, x in plans(mask)]
                for (ticket, _), (y, answers) in zip(tickets, expected, strict=True):
                    np.testing.assert_array_equal(ticket.result().view(np.uint32), y.view(np.uint32))
                    assert ticket.tally.channels == sum(answer.tally.channels for answer in answers)
                    assert ticket.tally.mass == pytest.approx(sum(answer.tally.mass for answer in answers))
