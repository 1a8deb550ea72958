"""Corrections of what a layer takes beside its tiles, on made layers. No time is measured."""

from __future__ import annotations

import pytest

from pipeline.engine.cost_updates import FORGOTTEN
from pipeline.engine.layer_times import ENOUGH, LONG, LONG_ENOUGH, Kind, LayerTimes
from pipeline.policies.costs import Costs

COSTS = Costs((1,), (1.0,), (1.0,), 3.0, round_trip=0.5, launch=0.25, fetch=0.125)


def steps(times: LayerTimes, kind: Kind, count: int, planned: float, measured: float, parts: int = 1) -> int:
    """The number of steps that changed a correction."""
    changed = 0
    for _ in range(count):
        times.begin_step()
        times.note(kind, planned, measured, parts)
        changed += times.end_step()
    return changed


def test_layers_as_planned_correct_nothing() -> None:
    times = LayerTimes()
    for kind in ("host", "device", "both", "link"):
        assert steps(times, kind, 100, 2.0, 2.01) == 0
    assert times.corrected(COSTS) == COSTS


def test_each_kind_corrects_what_belongs_to_it() -> None:
    times = LayerTimes()
    for kind in ("host", "device", "wake", "both"):
        assert steps(times, kind, ENOUGH, 2.0, 3.0) == 1
    assert steps(times, "link", ENOUGH, 2.0, 3.0, parts=2) == 1
    found = times.corrected(COSTS)
    assert (found.round_trip, found.launch, found.both, found.fetch) == pytest.approx((1.5, 1.25, 1.0, 0.625))
    assert found.wake == pytest.approx(1.0)
    assert (found.host, found.device, found.link) == (COSTS.host, COSTS.device, COSTS.link)


def test_sides_that_overlap_better_than_planned_leave_no_negative_cost() -> None:
    times = LayerTimes()
    steps(times, "both", 100, 2.0, 1.0)
    steps(times, "host", ENOUGH, 2.0, 0.5)
    assert times.corrected(COSTS).both == 0
    assert times.corrected(COSTS).round_trip == 0


def test_a_kind_that_no_plan_chooses_is_tried_again() -> None:
    times = LayerTimes()
    steps(times, "both", ENOUGH, 2.0, 3.0)
    assert steps(times, "host", FORGOTTEN + 1, 2.0, 2.0) == 1
    assert times.corrected(COSTS).both == 0


def test_a_trial_that_finds_the_same_again_makes_the_next_one_rarer() -> None:
    times = LayerTimes()
    steps(times, "both", ENOUGH, 2.0, 3.0)
    steps(times, "host", FORGOTTEN + 1, 2.0, 2.0)
    steps(times, "both", ENOUGH, 2.0, 3.0)
    assert steps(times, "host", FORGOTTEN + 1, 2.0, 2.0) == 0
    assert steps(times, "host", FORGOTTEN + 1, 2.0, 2.0) == 1


def test_long_steps_count_after_fewer() -> None:
    assert steps(LayerTimes(LONG), "both", LONG_ENOUGH, 2.0, 3.0) == 1
    assert steps(LayerTimes(LONG - 1), "both", LONG_ENOUGH, 2.0, 3.0) == 0


def test_corrections_of_an_earlier_engine_go_on() -> None:
    first = LayerTimes()
    steps(first, "both", ENOUGH, 2.0, 3.0)
    times = LayerTimes(1, first.corrections)
    assert times.corrected(COSTS) == first.corrected(COSTS) != COSTS
    steps(times, "both", ENOUGH, 3.0, 2.5)
    assert times.corrected(COSTS).both == pytest.approx(0.5)
    assert steps(times, "host", FORGOTTEN + 1, 2.0, 2.0) == 1, "a kind that no plan chooses is tried again"
