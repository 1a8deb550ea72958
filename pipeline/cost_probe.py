"""Measures what a tile costs on the host, on the device and on the link, in about two seconds.

Host and link read the same memory, so each is measured while the other runs: the pool computes with
fetches streaming, and fetches are timed with the pool computing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from pipeline.engine import Engine
from pipeline.errors import PolicyError
from pipeline.host_pool import Ticket
from pipeline.policies.costs import Costs
from pipeline.runs import empty_run
from pipeline.split import HostShare, Missing

ROWS = (1, 4, 16, 64)
BUDGET = 2.0  # seconds in all
ROUND_TRIPS = 50


def measure_costs(engine: Engine) -> Costs:
    """Medians per tile. Raises PolicyError where the engine has no slab to measure with."""
    if engine.memory is None:
        raise PolicyError("costs are measured with room for experts on the device: give --expert-cache")
    share = BUDGET / (2 * len(ROWS) + 1)
    probe = _Probe(engine)
    probe.warm_up()
    host = tuple(probe.host(rows, share) for rows in ROWS)
    device = tuple(probe.device(rows, share) for rows in ROWS)
    return Costs(ROWS, host, device, probe.link(share), probe.round_trip())


class _Probe:
    """Uses random activations and the model's real experts, a different one each time, as a step does."""

    def __init__(self, engine: Engine) -> None:
        assert engine.memory is not None
        self._engine = engine
        self._memory = engine.memory
        self._experts: Iterator[tuple[int, int]] = self._round_robin()

    def _round_robin(self) -> Iterator[tuple[int, int]]:
        shape = self._engine.shape
        while True:
            for expert in range(shape.experts):
                for layer in range(shape.layers):
                    yield layer, expert

    def warm_up(self) -> None:
        """Every side's first calls cost more."""
        self._compute(1)
        self._fetch()
        self.device(1, 0.0)

    def host(self, rows: int, seconds: float) -> float:
        """One tile at `rows` rows, all workers together, while tiles stream over the link."""
        tiles = self._engine.shape.tiles

        def once() -> float:
            ticket = self._submit(rows)
            self._fetch()
            self._engine.pool.result(ticket)
            return float(ticket.busy) / tiles  # the slowest worker's; the wall time may be the fetch's

        return _median(once, seconds)

    def device(self, rows: int, seconds: float) -> float:
        """One tile at `rows` rows from the slab."""
        engine = self._engine
        where = engine.device.torch_device
        x = engine.kernel.activations(self._activations(rows).to(where))
        every = torch.arange(rows, device=where)

        def once() -> float:
            started = time.perf_counter()
            for slot in range(min(8, self._memory.slab.slots)):
                engine.kernel.run(self._memory.slab.slot(slot), x, every)
            engine.device.wait(engine.device.fence())
            return (time.perf_counter() - started) / min(8, self._memory.slab.slots)

        return _median(once, seconds)

    def link(self, seconds: float) -> float:
        """Moving one tile while the pool computes."""

        def once() -> float:
            ticket = self._submit(1)
            elapsed = self._fetch()
            self._engine.pool.result(ticket)
            return elapsed / self._engine.shape.tiles

        return _median(once, seconds)

    def round_trip(self) -> float:
        """An empty Work to every worker and back."""
        x = np.zeros((1, self._engine.layout.shape.hidden), np.float32)
        runs = [empty_run()] * self._engine.pool.workers

        def once() -> float:
            started = time.perf_counter()
            self._engine.pool.result(self._engine.pool.submit_runs(0, runs, x))
            return time.perf_counter() - started

        return float(np.median([once() for _ in range(ROUND_TRIPS)]))

    def _compute(self, rows: int) -> None:
        self._engine.pool.result(self._submit(rows))

    def _submit(self, rows: int) -> Ticket:
        layer, expert = next(self._experts)
        chosen = np.array([expert], np.int32)
        every, weights = np.arange(rows, dtype=np.int32), np.ones(rows, np.float32)
        share = HostShare(chosen, 0 * chosen, 0 * chosen + self._engine.shape.tiles, [every], [weights])
        return self._engine.pool.submit(layer, share, self._activations(rows).numpy(), "decode")

    def _fetch(self) -> float:
        """Stream one expert to the device; seconds."""
        layer, expert = next(self._experts)
        started = time.perf_counter()
        for _ in self._memory.mover.stream(layer, [Missing(expert, 0, self._engine.shape.tiles)], []):
            pass
        return time.perf_counter() - started

    def _activations(self, rows: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rows)
        return torch.randn(rows, self._engine.layout.shape.hidden, generator=generator)


def _median(once: Callable[[], float], seconds: float) -> float:
    """The median of repeated calls, for `seconds` and at least three."""
    until = time.perf_counter() + seconds
    values = [once()]
    while len(values) < 3 or time.perf_counter() < until:
        values.append(once())
    return float(np.median(values))
