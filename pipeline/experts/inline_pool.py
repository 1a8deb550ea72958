"""The host's share computed in the coordinator itself, by the threads of its device: `--workers 0`.

Nothing is sent and nobody is woken, which on a machine without a GPU is what a small layer costs most. The
price: a crash of what computes experts is the coordinator's own, and the whole engine begins anew after it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.arrays import FloatArray, Phase
from pipeline.coordinator_config import WorkerCores
from pipeline.experts.host_shards import HostShard, cut_into_shards
from pipeline.experts.shares import HostShare
from protocol.messages import Work
from shm.store import Store
from workers.host_experts import HostExperts
from workers.kernels.native import Team

ALONE = WorkerCores.alike(1)


@dataclass
class OwnTicket:
    """A layer's host share that will be computed when its result is asked for."""

    layer: int
    runs: Sequence[HostShard]
    x: FloatArray
    busy: float = 0.0


class InlineExpertPool:
    """Used by the engine's thread alone, like a `WorkerPool`."""

    workers = 0

    def __init__(self, store: Store, team: Team | None, slowdown: float) -> None:
        """`slowdown` > 1 waits after each share, to stand in for a slower host."""
        self._experts = HostExperts(store, team, None)
        self._slowdown = slowdown

    def wait_ready(self, limit: float) -> None:
        """Have what computing takes."""
        self._experts.prepare()

    def submit(self, layer: int, share: HostShare, x: FloatArray, phase: Phase) -> OwnTicket:
        """x: float32 [R, H], unchanged until `result`."""
        return self.submit_shards(layer, cut_into_shards(share, ALONE, phase, len(x)), x)

    def submit_shards(self, layer: int, runs: Sequence[HostShard], x: FloatArray) -> OwnTicket:
        return OwnTicket(layer, runs, x)

    def result(self, ticket: OwnTicket) -> FloatArray:
        """The sum of the runs: float32 [R, H]."""
        started = time.perf_counter()
        y = np.zeros(ticket.x.shape, np.float32)
        for run in ticket.runs:
            work = Work(0, ticket.layer, run.items, run.offsets, run.rows, run.weights, ticket.x[run.kept])
            y[run.kept] += self._experts.run(work)
        ticket.busy = time.perf_counter() - started
        if self._slowdown > 1:
            time.sleep(ticket.busy * (self._slowdown - 1))
            ticket.busy *= self._slowdown
        return y

    def abandon(self, ticket: OwnTicket) -> None:
        """Nothing of it has begun."""

    def update(self, wait_ms: int) -> bool:
        """Nobody comes and nobody dies."""
        return False
