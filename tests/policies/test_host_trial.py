"""Steps with everything on the host beside divided ones, on made seconds. No time is measured."""

from __future__ import annotations

from pipeline.policies.tandem import FIRST, HostTrial


def steps(trial: HostTrial, count: int, divided: float, host: float, hopeless: bool = False) -> int:
    """The number of steps that the host computed alone."""
    alone = 0
    for _ in range(count):
        alone += trial.host
        trial.note(host if trial.host else divided, hopeless)
    return alone


def test_the_faster_kind_is_kept_and_the_other_tried_ever_less() -> None:
    trial = HostTrial()
    steps(trial, 64, 2.0, 1.0)
    assert steps(trial, 1000, 2.0, 1.0) > 900
    trial = HostTrial()
    first, later = steps(trial, 1000, 1.0, 2.0), steps(trial, 1000, 1.0, 2.0)
    assert 0 < later < first < 100


def test_a_change_is_noticed() -> None:
    trial = HostTrial()
    steps(trial, 2 * FIRST, 2.0, 1.0)
    assert trial.host
    steps(trial, 4 * FIRST, 1.0, 2.0)
    assert steps(trial, 1000, 1.0, 2.0) < 100


def test_what_is_hopeless_by_the_costs_is_not_tried() -> None:
    assert steps(HostTrial(), 1000, 1.0, 0.5, hopeless=True) == 0
