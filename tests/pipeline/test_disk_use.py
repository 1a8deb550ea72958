"""What a routing has to read where only some experts are in memory."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.experts.disk_use import ExpertUse, misses

EVEN = np.full((2, 4), 0.25)


def step(*layers: int) -> list[np.ndarray]:
    """A step whose layers use one expert each."""
    return [np.array([expert], np.int32) for expert in layers]


def test_the_expert_used_least_is_needed_last_and_a_layer_just_computed_after_the_next() -> None:
    use = ExpertUse(EVEN.copy())
    for _ in range(8):
        use.book(0, np.array([1], np.int32))
    expected = use.until_needed(0)
    assert expected[0].argmin() == 1
    assert (expected[0, [0, 2, 3]] > expected[1, 0]).all()  # the same share, of the layer that comes next


@pytest.mark.parametrize(("capacity", "read"), [(8, 0), (4, 0), (2, 2)])
def test_a_token_reads_what_memory_does_not_hold(capacity: int, read: int) -> None:
    """The same four experts are used in turns; where only two fit, the two of the other step are missing."""
    steps = [step(number % 2, number % 2) for number in range(20)]
    assert misses(steps, [0] * 18 + [1] * 2, EVEN, capacity) == read


def test_only_the_steps_that_count_are_counted_and_popular_experts_are_there_at_first() -> None:
    popular = np.array([[0.4, 0.3, 0.2, 0.1]] * 2)
    steps = [step(0, 1), step(3, 3)]
    assert misses(steps, [1, 1], popular, 4) == 1
    assert misses(steps, [0, 1], popular, 4) == 2
