"""Costs that follow made steps: factors of host, device and link, and a running engine while the host becomes
slower. No time is asserted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from thread_engine import decode, engine_in_threads, prefilled

from pipeline.arrays import Phase
from pipeline.backbone.kv_cache import KVCache
from pipeline.engine.engine import Engine
from pipeline.engine.timing import FORGOTTEN, Corrections, Spent
from pipeline.policies.costs import Costs
from pipeline.policies.presets import make_policy
from pipeline.policies.view import Gated, Plan, Policy, PolicyRequest, Routing, Signals, Target, View

SLOW = Costs((1,), (1.0,), (1.0,), 10.0, 0.5, launch=0.25, fetch=2.0)  # nothing here takes so long

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
    parts, copied = type(engine.pool).parts, engine.first.memory.copied

    def of_workers(pool, ticket) -> list[np.ndarray]:
        found = parts(pool, ticket)
        ticket.busy = seconds[0] * len(ticket.tasks)  # as the slowest worker reports it
        return found

    monkeypatch.setattr(type(engine.pool), "parts", of_workers)
    monkeypatch.setattr(engine.first.memory, "copied", lambda: (copied()[0], copied()[0] * 1e-6))
    monkeypatch.setattr(type(engine.device), "seconds_between", lambda *marks: 1e-6)
    return seconds


def test_costs_of_a_file_stay_and_measured_ones_follow_a_slowed_host(running, timed) -> None:
    """Also under another policy, as long as they are the same."""
    engine, kv = running
    sequence = prefilled(engine, kv, 256)
    measured = replace(SLOW, host=(1e-3 / 4,))  # of four tiles a layer
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
        assert engine.first.driver.view.costs is engine.first.timing.costs
        assert engine.first.timing.corrections.report()["host"]["decode"] == pytest.approx(factor, rel=0.11)
    assert engine.first.timing.corrections.report()["device"]["decode"] < 0.1
    costs = engine.first.timing.costs
    engine.set_policy(make_policy(PolicyRequest("all-host"), 0), None)
    engine.set_policy(Halves(), measured, follow=True)
    decode(engine, sequence)
    assert engine.first.driver.view.costs == costs != measured
    engine.set_policy(Halves(), replace(measured, link=11.0), follow=True)  # measured anew
    assert engine.first.driver.view.costs == replace(measured, link=11.0)


# --- factors -------------------------------------------------------------------------------------------

COSTS = Costs((1, 4), (1.0, 2.0), (0.5, 0.5), 4.0, 0.25, (1.0, 1.0), launch=0.125, fetch=0.5)


class Machine:
    """Takes `host`, `device` and `link` times as long as COSTS say."""

    def __init__(self) -> None:
        self.corrections = Corrections(COSTS)
        self.host = self.device = self.link = 1.0
        self.elsewhere: dict[str, tuple[Spent, list[float]]] = {}

    def steps(self, count: int, phase: Phase = "decode", device: bool = True) -> list[Costs]:
        """Each different costs in force, in order."""
        seen: list[Costs] = []
        for _ in range(count):
            costs = self.corrections.priced(phase)
            if not seen or seen[-1] is not costs:
                seen.append(costs)
            host = Spent(costs.host[0], COSTS.host[0] * self.host)
            work = {"host": host, "device": Spent(), "link": Spent()}
            if device:
                work["device"] = Spent(costs.device[0], COSTS.device[0] * self.device)
                work["link"] = Spent(costs.link, COSTS.link * self.link)
            self.corrections.note(phase, work, self.elsewhere)
        return seen

    def factors(self, phase: Phase = "decode") -> list[float]:
        return [factors[phase] for factors in self.corrections.report().values()]


def test_all_costs_of_a_side_follow_its_factor() -> None:
    machine = Machine()
    machine.host, machine.device, machine.link = 2.0, 0.5, 3.0
    costs = machine.steps(40)[-1]
    assert costs.host == pytest.approx((2.0, 4.0))
    assert (costs.round_trip, costs.link, costs.launch, costs.fetch) == pytest.approx(
        (0.5, 12.0, 0.0625, 1.5)
    )
    assert costs.device == pytest.approx((0.25, 0.25))
    assert (costs.rows, costs.other) == (COSTS.rows, COSTS.other)
    assert machine.corrections.priced("decode").host_at[4] == pytest.approx(4.0)
    machine.host = 1.0
    assert machine.steps(200)[-1].host == pytest.approx((1.0, 2.0), rel=0.11)


def test_prompts_and_decoding_are_corrected_apart() -> None:
    machine = Machine()
    machine.host = 3.0
    machine.steps(40, "prefill")
    assert machine.factors("prefill")[0] == pytest.approx(3.0, rel=0.11)
    assert machine.factors("decode") == [1.0, 1.0, 1.0]
    assert machine.corrections.priced("decode") is COSTS


def test_small_and_short_changes_are_no_reason_to_plan_anew() -> None:
    machine = Machine()
    machine.host = 1.08
    assert machine.steps(100) == [COSTS]
    machine = Machine()
    machine.steps(20)
    machine.host = 2.0  # one stalled step
    machine.steps(1)
    machine.host = 1.0
    assert machine.steps(100) == [COSTS]


def test_a_side_without_work_falls_back_to_what_was_measured_first() -> None:
    machine = Machine()
    machine.link = 4.0
    machine.steps(40)
    machine.steps(FORGOTTEN // 8, device=False)
    assert machine.factors()[2] > 3
    assert machine.steps(8 * FORGOTTEN, device=False)[-1].link == pytest.approx(COSTS.link, rel=0.11)


@pytest.mark.parametrize("measured", [0.0, -1.0, float("nan"), float("inf")])
def test_what_cannot_have_been_measured_changes_nothing(measured: float) -> None:
    corrections = Corrections(COSTS)
    for _ in range(40):
        corrections.note(
            "decode", {"host": Spent(1.0, measured), "device": Spent(0.0, 1.0), "link": Spent()}, {}
        )
    assert corrections.priced("decode") is COSTS


def test_a_stalled_step_counts_as_a_long_one() -> None:
    corrections = Corrections(COSTS)
    for measured in [*[1.0] * 40, 1e9]:
        corrections.note("decode", {"host": Spent(1.0, measured), "device": Spent(), "link": Spent()}, {})
    assert corrections.report()["host"]["decode"] < 1.5


def test_costs_of_other_machines_are_for_the_host_s_seconds_at_first() -> None:
    machine = Machine()
    machine.elsewhere = {"b": (Spent(10.0, 15.0), []), "c": (Spent(10.0, 5.0), [0.25, 0.75])}
    costs = machine.steps(40)[-1]
    assert costs.machines == ((0.0, 1.5), (0.5, 0.5)), "what is not waited for has no way"
    assert [costs.floor(seconds) for seconds in (0.25, 10.0)] == [0.625, 15.0]
    machine.host = 2.0
    for _ in range(40):  # a forecast is by the costs in force
        seconds = 10.0 * machine.factors()[0]
        machine.elsewhere = {"c": (Spent(seconds, 5.0), [0.5])}
        machine.steps(1)
    ((way, each),) = machine.steps(1)[-1].machines
    assert (way, each) == pytest.approx((0.5, 0.25), rel=0.2)
    machine.elsewhere = {}
    assert machine.steps(1)
    assert machine.corrections.priced("decode").machines == ()
