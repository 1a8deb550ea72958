"""Prefetching is switched off where its tiles are not used, with a message, and tried again."""

from __future__ import annotations

from pipeline.policies.prefetch_meter import LEAST, LONGEST_PAUSE, PAUSE, WINDOW, PrefetchMeter


class Scene:
    """Counts of prefetched tiles that land in each step, and of those that are used."""

    def __init__(self) -> None:
        self.meter = PrefetchMeter()
        self.landed = self.useful = 0

    def run(self, steps: int, landed: int, useful: int) -> None:
        for _ in range(steps):
            if self.meter.on:
                self.landed += landed
                self.useful += useful
            self.meter.step(self.landed, self.useful)


def test_half_useful_predictions_stay_on() -> None:
    scene = Scene()
    scene.run(20 * WINDOW, 4, 2)
    assert scene.meter.on
    assert scene.meter.status == ""


def test_less_useful_predictions_pause_with_a_reason_and_are_tried_again() -> None:
    scene = Scene()
    scene.run(WINDOW - 1, 4, 1)
    assert scene.meter.on
    scene.run(1, 4, 1)
    assert not scene.meter.on
    assert f"{4 * WINDOW} tiles" in scene.meter.status
    assert f"{WINDOW} were used" in scene.meter.status
    scene.run(PAUSE - 1, 4, 1)
    assert not scene.meter.on
    scene.run(1, 4, 1)
    assert scene.meter.on
    assert "again" in scene.meter.status


def test_each_failed_trial_doubles_the_pause_and_a_good_one_resets_it() -> None:
    scene = Scene()
    pauses = []
    for _ in range(8):
        scene.run(WINDOW, 4, 0)
        count = 0
        while not scene.meter.on:
            scene.run(1, 4, 0)
            count += 1
        pauses.append(count)
    assert pauses == [min(PAUSE << i, LONGEST_PAUSE) for i in range(8)]
    scene.run(WINDOW, 4, 4)
    scene.run(WINDOW, 4, 0)
    scene.run(PAUSE - 1, 4, 0)
    assert not scene.meter.on
    scene.run(1, 4, 0)
    assert scene.meter.on


def test_window_continues_until_enough_tiles_landed() -> None:
    """A window is judged once LEAST tiles have landed."""
    scene = Scene()
    scene.run(WINDOW, 0, 0)
    scene.run(LEAST - 1, 1, 0)
    assert scene.meter.on
    scene.run(1, 1, 0)
    assert not scene.meter.on
