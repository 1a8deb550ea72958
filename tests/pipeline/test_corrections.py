"""Costs that follow made steps: factors of host, device and link. No time is measured."""

from __future__ import annotations

import pytest

from pipeline.arrays import Phase
from pipeline.engine.timing import FORGOTTEN, Corrections, Spent
from pipeline.policies.costs import Costs

COSTS = Costs((1, 4), (1.0, 2.0), (0.5, 0.5), 4.0, 0.25, (1.0, 1.0), launch=0.125, fetch=0.5)


class Machine:
    """Takes `host`, `device` and `link` times as long as COSTS say."""

    def __init__(self) -> None:
        self.corrections = Corrections(COSTS)
        self.host = self.device = self.link = 1.0

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
            self.corrections.note(phase, work)
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
        corrections.note("decode", {"host": Spent(1.0, measured), "device": Spent(0.0, 1.0), "link": Spent()})
    assert corrections.priced("decode") is COSTS


def test_a_stalled_step_counts_as_a_long_one() -> None:
    corrections = Corrections(COSTS)
    for measured in [*[1.0] * 40, 1e9]:
        corrections.note("decode", {"host": Spent(1.0, measured), "device": Spent(), "link": Spent()})
    assert corrections.report()["host"]["decode"] < 1.5
