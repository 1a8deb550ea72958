"""A running engine's costs while the host becomes slower: workers and prefetcher are
threads of this process. No time is asserted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from thread_engine import decode, engine_in_threads, prefilled

from pipeline.backbone.kv_cache import KVCache
from pipeline.engine.engine import Engine
from pipeline.policies.costs import Costs
from pipeline.policies.presets import make_policy
from pipeline.policies.view import Gated, Plan, Policy, PolicyRequest, Routing, Signals, Target, View

COSTS = Costs((1,), (1.0,), (1.0,), 10.0, 0.5, launch=0.25, fetch=2.0)  # nothing here takes so long

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


class Halves(Policy):
    """The device computes the first tile of each expert, the host the others; one expert is predicted."""

    name = "halves"
    needs_costs = True

    def __init__(self) -> None:
        self.costs: list[Costs | None] = []

    def placement(self, view: View) -> np.ndarray:
        return np.zeros((view.shape.layers, view.shape.experts), np.int32)

    def plan(self, layer: int, routing: Routing, view: View) -> Plan:
        self.costs.append(view.costs)
        return Plan(np.ones(view.shape.experts, np.int32))

    def predict(self, layer: int, signals: Signals, gated: Gated, view: View) -> Sequence[Target]:
        return (Target(1, 3, 3),) if layer == 0 else ()


@pytest.fixture
def running(tiny_model, tmp_path) -> Iterator[tuple[Engine, KVCache]]:
    with engine_in_threads(tiny_model, tmp_path) as (engine, _):
        yield engine, KVCache(engine.backbone.spec, torch.float32, torch.device("cpu"), 1024)


@pytest.fixture
def timed(running, monkeypatch) -> list[float]:
    """Seconds of a host share, which a test may change; a tile on the link or the device takes no time beside
    them. What really ran would count as contended or not by what else this machine does."""
    engine, _ = running
    seconds = [1e-3]
    parts, copied = type(engine.pool).parts, engine.memory.copied

    def of_workers(pool, ticket) -> list[np.ndarray]:
        found = parts(pool, ticket)
        ticket.busy = seconds[0] * len(ticket.tasks)  # as the slowest worker reports it
        return found

    monkeypatch.setattr(type(engine.pool), "parts", of_workers)
    monkeypatch.setattr(engine.memory, "copied", lambda: (copied()[0], copied()[0] * 1e-6))
    monkeypatch.setattr(type(engine.device), "seconds_between", lambda *marks: 1e-6)
    return seconds


def test_costs_of_a_file_stay_and_measured_ones_follow_a_slowed_host(running, timed) -> None:
    """Also under another policy, as long as they are the same."""
    engine, kv = running
    sequence = prefilled(engine, kv, 256)
    measured = replace(COSTS, host=(1e-3 / 4,))  # of four tiles a layer
    policy = Halves()
    engine.set_policy(policy, measured, follow=False)
    timed[0] = 6e-3
    for _ in range(20):
        decode(engine, sequence)
    assert set(policy.costs) == {measured}
    engine.set_policy(Halves(), measured, follow=True)
    for factor in (1.0, 6.0):
        timed[0] = 1e-3 * factor
        for _ in range(100):
            decode(engine, sequence)
        assert engine.driver.view.costs is engine.timing.costs
        assert engine.timing.corrections.report()["host"]["decode"] == pytest.approx(factor, rel=0.11)
    assert engine.timing.corrections.report()["device"]["decode"] < 0.1
    costs = engine.timing.costs
    engine.set_policy(make_policy(PolicyRequest("all-host"), 0), None)
    engine.set_policy(Halves(), measured, follow=True)
    decode(engine, sequence)
    assert engine.driver.view.costs == costs != measured
    engine.set_policy(Halves(), replace(measured, link=11.0), follow=True)  # measured anew
    assert engine.driver.view.costs == replace(measured, link=11.0)
