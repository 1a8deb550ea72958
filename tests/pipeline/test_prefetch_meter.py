"""Prefetching is switched off where its tiles are not used, with a message, and tried again."""

from __future__ import annotations

from pipeline.counters import LEAST, LONGEST_PAUSE, PAUSE, WINDOW, PrefetchMeter


class MeteredSteps:
    """Counts of prefetched tiles that land in each step, and of those that are used."""

    def __init__(self) -> None:
        self.meter = PrefetchMeter()
        self.landed = self.useful = 0

    def take(self, steps: int, landed: int, useful: int) -> None:
        for _ in range(steps):
            if self.meter.on:
                self.landed += landed
                self.useful += useful
            self.meter.step(self.landed, self.useful)


def test_half_useful_predictions_stay_on() -> None:
    metered = MeteredSteps()
    metered.take(20 * WINDOW, 4, 2)
    assert metered.meter.on
    assert metered.meter.status == ""


def test_less_useful_predictions_pause_with_a_reason_and_are_tried_again() -> None:
    metered = MeteredSteps()
    metered.take(WINDOW - 1, 4, 1)
    assert metered.meter.on
    metered.take(1, 4, 1)
    assert not metered.meter.on
    assert f"{4 * WINDOW} tiles" in metered.meter.status
    assert f"{WINDOW} were used" in metered.meter.status
    metered.take(PAUSE - 1, 4, 1)
    assert not metered.meter.on
    metered.take(1, 4, 1)
    assert metered.meter.on
    assert "again" in metered.meter.status


def test_each_failed_trial_doubles_the_pause_and_a_good_one_resets_it() -> None:
    metered = MeteredSteps()
    pauses = []
    for _ in range(8):
        metered.take(WINDOW, 4, 0)
        count = 0
        while not metered.meter.on:
            metered.take(1, 4, 0)
            count += 1
        pauses.append(count)
    assert pauses == [min(PAUSE << i, LONGEST_PAUSE) for i in range(8)]
    metered.take(WINDOW, 4, 4)
    metered.take(WINDOW, 4, 0)
    metered.take(PAUSE - 1, 4, 0)
    assert not metered.meter.on
    metered.take(1, 4, 0)
    assert metered.meter.on


def test_window_continues_until_enough_tiles_landed() -> None:
    """A window is judged once LEAST tiles have landed."""
    metered = MeteredSteps()
    metered.take(WINDOW, 0, 0)
    metered.take(LEAST - 1, 1, 0)
    assert metered.meter.on
    metered.take(1, 1, 0)
    assert not metered.meter.on


def test_tiles_before_the_policy_and_of_a_pause_are_not_judged() -> None:
    """They land unused, and the next window begins behind them."""
    meter = PrefetchMeter(1000, 0)
    assert not any(meter.step(1000 + LEAST - 1, 0) for _ in range(3 * WINDOW))
    meter = PrefetchMeter()
    assert any(meter.step(LEAST, 0) for _ in range(WINDOW))
    for _ in range(PAUSE):
        meter.step(10 * LEAST, 0)
    assert meter.on
    for _ in range(WINDOW):
        meter.step(11 * LEAST, LEAST // 2)
    assert meter.on
