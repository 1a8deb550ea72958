"""Costs that follow what runs: on steps of a made machine, whose true costs are a multiple of the measured
ones, with noise. No time is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from pipeline.engine.cost_updates import ENOUGH, FORGOTTEN, WINDOW, CostUpdates, Side, Work
from pipeline.policies.costs import Costs

COSTS = Costs(
    rows=(1, 16), host=(2.0, 4.0), device=(1.0, 1.5), link=3.0, round_trip=0.5, launch=0.25, fetch=0.125
)
BOTH = {"host": True, "device": True, "link": True}
ALONE = {"host": False, "device": False, "link": False}


class Machine:
    """Steps in which each side computes or moves 10 tiles, at `speed` times the measured seconds."""

    def __init__(self, noise: float = 0.0, factors: Mapping[Side, Sequence[float]] | None = None) -> None:
        self.updates = CostUpdates(COSTS, factors)
        self.speed: dict[Side, float] = {"host": 1.0, "device": 1.0, "link": 1.0}
        self._rng, self._noise = np.random.default_rng(1), noise

    def steps(
        self,
        count: int,
        sides: tuple[Side, ...] = ("host", "device", "link"),
        rows: int = 1,
        both: bool = True,
    ) -> list[Costs]:
        """The costs after each step in which they changed."""
        found = []
        for _ in range(count):
            work = {side: self._work(side, rows) for side in sides}
            if self.updates.end_step(work, BOTH if both else ALONE):
                found.append(self.updates.costs)
        return found

    def _work(self, side: Side, rows: int) -> Work:
        def seconds(costs: Costs) -> float:
            if side == "link":
                return float(costs.link_seconds(10))
            return float((costs.host_seconds if side == "host" else costs.device_seconds)(rows, 10))

        measured = seconds(COSTS) * self.speed[side] * np.exp(self._rng.normal(scale=self._noise))
        return Work(seconds(self.updates.costs), float(measured), 10, 10 * rows)


def test_costs_that_are_right_stay() -> None:
    machine = Machine(noise=0.1)
    assert machine.steps(2000) == []
    assert machine.updates.costs is COSTS


def test_a_slower_host_is_followed_and_a_recovered_one_too() -> None:
    machine = Machine()
    machine.steps(WINDOW)
    machine.speed["host"] = 3.0
    changed = machine.steps(200)
    assert len(changed) == 1
    assert changed[0].host == pytest.approx((6.0, 12.0))
    assert (changed[0].device, changed[0].link) == (COSTS.device, COSTS.link)
    assert (changed[0].round_trip, changed[0].launch, changed[0].fetch) == (0.5, 0.25, 0.125)
    machine.speed["host"] = 1.0
    assert machine.steps(200)[-1].host == pytest.approx(COSTS.host)


def test_a_noisy_slower_link_is_found_without_swinging() -> None:
    """The change is applied in a few steps of the median; then nothing changes."""
    machine = Machine(noise=0.2)
    machine.steps(100)
    machine.speed["link"] = 2.5
    assert 1 <= len(machine.steps(100)) <= 3
    assert machine.updates.costs.link == pytest.approx(7.5, rel=0.2)
    assert len(machine.steps(1000)) <= 1


def test_one_disturbed_step_changes_nothing() -> None:
    machine = Machine(noise=0.02)
    machine.steps(100)
    for _ in range(20):
        machine.speed["device"] = 40.0
        assert machine.steps(1) == []
        machine.speed["device"] = 1.0
        assert machine.steps(WINDOW) == []


def test_too_few_steps_change_nothing() -> None:
    machine = Machine()
    machine.speed["host"] = 5.0
    assert machine.steps(ENOUGH - 1) == []
    assert len(machine.steps(1)) == 1


def test_row_counts_without_steps_follow_the_nearest() -> None:
    """Both points follow the steps of one row, until there are steps of 16 rows."""
    machine = Machine()
    machine.speed["host"] = 2.0
    machine.steps(WINDOW)
    assert machine.updates.costs.host == pytest.approx((4.0, 8.0))
    machine.speed["host"] = 3.0
    machine.steps(WINDOW, rows=16)
    assert machine.updates.costs.host == pytest.approx((4.0, 12.0))
    assert machine.updates.report()["host"]["factors"] == pytest.approx([2.0, 3.0])


def test_what_is_measured_alone_corrects_upwards_and_only_without_contention() -> None:
    """Costs are those under contention: a side that is faster alone is no news, one that is slower is."""
    machine = Machine()
    machine.speed["host"] = 0.5
    assert machine.steps(50, both=False) == []
    machine.speed["host"] = 2.0
    assert machine.steps(50, both=False)[-1].host == pytest.approx((4.0, 8.0))
    machine.speed["host"] = 3.0
    machine.steps(50)
    assert machine.updates.costs.host == pytest.approx((6.0, 12.0))
    machine.speed["host"] = 0.5
    machine.steps(50, both=False)
    assert machine.updates.costs.host == pytest.approx((6.0, 12.0))
    found = machine.updates.report()["host"]
    assert (found["alone"], found["contended"]) == (pytest.approx(0.5), pytest.approx(3.0))


def test_a_side_that_no_plan_uses_any_more_is_tried_again() -> None:
    machine = Machine()
    machine.speed["host"] = 8.0
    machine.steps(WINDOW)
    assert machine.updates.costs.host == pytest.approx((16.0, 32.0))
    assert machine.steps(FORGOTTEN, sides=("device",)) == []
    assert [costs.host for costs in machine.steps(2, sides=("device",))] == [COSTS.host]
    assert machine.updates.report()["host"] == {"factors": [1.0, 1.0], "alone": None, "contended": None}


@pytest.mark.parametrize("measured", [0.0, float("nan"), float("inf")])
def test_a_step_that_was_not_measured_does_not_count(measured: float) -> None:
    updates = CostUpdates(COSTS)
    for _ in range(50):
        assert not updates.end_step({"host": Work(2.0, measured, 1, 1), "link": Work()}, BOTH)
    assert updates.report()["host"]["contended"] is None


@pytest.fixture(scope="module")
def slowed() -> list[int]:
    """The host's share of the tiles that it shares with the device, as a plan by costs gives it, while the
    host becomes four times slower. A fixed cost is in the measured seconds alone: a small share looks
    slow."""
    machine, shares = Machine(noise=0.1), []
    for step in range(400):
        costs = machine.updates.costs
        tiles = round(64 * costs.device[0] / (costs.device[0] + costs.host[0]))
        slow = 4.0 if step >= 100 else 1.0
        noise = np.exp(np.random.default_rng(step).normal(scale=0.1))
        work = {
            "host": Work(costs.host[0] * tiles, (COSTS.host[0] * tiles * slow + 2.0) * noise, tiles, tiles),
            "device": Work(costs.device[0] * (64 - tiles), 64.0 - tiles, 64 - tiles, 64 - tiles),
        }
        machine.updates.end_step(work, BOTH)  # type: ignore[arg-type]
        shares.append(tiles)
    return shares


def test_plans_that_follow_a_slowed_host_settle(slowed: list[int]) -> None:
    before, after = slowed[50:100], slowed[150:]
    assert max(before) - min(before) <= 2
    assert max(after) - min(after) <= 2
    assert max(after) < min(before) / 2


def test_factors_of_an_earlier_engine_hold_until_steps_show_others() -> None:
    first = Machine()
    first.speed = {"host": 3.0, "device": 1.0, "link": 0.5}
    first.steps(WINDOW)
    machine = Machine(factors=first.updates.factors)
    assert machine.updates.costs == first.updates.costs != COSTS
    machine.speed = first.speed
    assert machine.steps(2 * WINDOW) == []
    machine.speed = {"host": 1.0, "device": 1.0, "link": 0.5}
    machine.steps(WINDOW)
    assert machine.updates.costs.host == pytest.approx((2.0, 12.0)), "of many rows it is not known"
    assert machine.updates.costs.link == pytest.approx(COSTS.link / 2)


def test_factors_of_an_earlier_engine_are_forgotten_without_steps() -> None:
    machine = Machine(factors={"host": (3.0, 3.0), "device": (1.0, 1.0), "link": (1.0,)})
    machine.steps(FORGOTTEN, sides=("device",))
    assert machine.updates.costs.host == pytest.approx((6.0, 12.0))
    machine.steps(1, sides=("device",))
    assert machine.updates.costs.host == COSTS.host
