"""A pool that computes the host's share in the coordinator, with the device's threads: `--workers 0`.

It sends no message and wakes no process, which on a machine without a GPU is most of the cost of a small
layer. In exchange, a crash of a host kernel ends the coordinator, and the whole engine is restarted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from pipeline.arrays import FloatArray
from pipeline.coordinator_config import WorkerCores
from pipeline.device import Device
from pipeline.experts.host_shards import HostShard
from protocol.messages import Partial
from shm.mask import DENSE, NOTHING, Mask, Tally
from shm.store import Store
from workers.kernels.choice import DEFAULT, Choice
from workers.kernels.host import HostKernel
from workers.kernels.native import Team

# Nanoseconds for which the team spins for its next computation: longer than what lies between two of a step.
# No worker needs the cores, and waking a thread takes as long as the products of a small layer.
LINGER_NS = 300_000


@dataclass
class InlineTicket:
    """A layer's host share that is computed by the call of `result`: a `host_pool.Ticket`."""

    pool: InlineExpertPool
    layer: int
    shards: Sequence[HostShard]
    x: FloatArray
    mask: Mask
    busy: float = 0.0
    tally: Tally = NOTHING

    def result(self) -> FloatArray:
        return self.pool.result(self)

    def result_on(self, device: Device) -> Tensor:
        return device.from_host(self.result())

    def abandon(self) -> None:
        """Does nothing: the computation has not begun."""


class InlineExpertPool:
    """Used by the engine's thread alone, like a `WorkerPool`."""

    workers = 0
    cores = WorkerCores.equal(1)

    def __init__(self, store: Store, team: Team | None, slowdown: float, kernels: Choice = DEFAULT) -> None:
        """`slowdown` > 1 waits after each share, to emulate a slower host."""
        self._store = store
        self._kernel = HostKernel(store.layout, team, kernels=kernels)
        self._slowdown = slowdown
        if team is not None:
            team.linger(LINGER_NS)

    def wait_ready(self, limit: float) -> None:
        """Load the kernels."""
        self._kernel.prepare()

    def announce(self) -> None:
        """Does nothing: no process has to be woken."""

    def submit(
        self,
        layer: int,
        shards: Sequence[HostShard],
        x: FloatArray,
        waits: bool = True,
        mask: Mask = DENSE,
    ) -> InlineTicket:
        """As HostPool.submit."""
        return InlineTicket(self, layer, shards, x, mask)

    def result(self, ticket: InlineTicket) -> FloatArray:
        """The sum of the shards: float32 [R, H]."""
        started = time.perf_counter()
        partials = []
        if len(ticket.shards) == 1 and len(ticket.shards[0].kept) == len(ticket.x):  # as in decode
            partials.append(self._compute(ticket, ticket.shards[0], ticket.x))
            y = partials[0].y
        else:
            y = np.zeros(ticket.x.shape, np.float32)
            for shard in ticket.shards:
                partials.append(self._compute(ticket, shard, ticket.x[shard.kept]))
                y[shard.kept] += partials[-1].y
        ticket.tally = Tally.of(partials)
        ticket.busy = time.perf_counter() - started
        if self._slowdown > 1:
            time.sleep(ticket.busy * (self._slowdown - 1))
            ticket.busy *= self._slowdown
        return y

    def _compute(self, ticket: InlineTicket, shard: HostShard, x: FloatArray) -> Partial:
        return self._kernel.compute_work(shard.work(0, ticket.layer, x, ticket.mask), self._store)

    def update(self, wait_ms: int) -> bool:
        """False: a pool without processes receives no messages."""
        return False
