"""PolicyDriver: what it counts, and when it judges predictions."""

from __future__ import annotations

import numpy as np
import pytest
from policy_machine import Machine, make_routing, make_view, policy

from pipeline.counters import LEAST, WINDOW
from pipeline.engine.driver import PolicyDriver
from pipeline.policies.view import ModelShape

SHAPE = ModelShape(layers=3, experts=6, tiles=2, top_k=2)


def test_popularity_counts_the_rows_of_each_expert() -> None:
    machine = Machine(policy("all-host"), make_view(SHAPE, 0), np.random.default_rng(0))
    machine.start()
    counted = np.zeros((3, 6), np.int64)
    for rows in (1, 3, 20):
        for layer in range(3):
            routing = make_routing(SHAPE, machine.rng, rows)
            counted[layer] += routing.workload(6)
            machine.layer(layer, routing)
    assert machine.view.popularity.tolist() == counted.tolist()
    machine.driver.forget_counts()
    assert not machine.view.popularity.any()


@pytest.mark.parametrize(("useful", "on"), [(LEAST // 2, True), (LEAST // 2 - 1, False)])
def test_predictions_are_judged_by_decode_steps_under_this_policy(useful: int, on: bool) -> None:
    """Prefetched tiles of earlier policies do not count."""
    landed, used = 1000, 900
    driver = PolicyDriver[str](policy("mixtral-offloading"), make_view(SHAPE, 12), landed, used)
    for _ in range(2 * WINDOW):
        driver.begin_step("prefill", (0,))
        assert not driver.end_step(landed + LEAST, used)
    for step in range(WINDOW):
        driver.begin_step("decode", (0,))
        switched = driver.end_step(landed + LEAST, used + useful)
        assert switched == (not on and step == WINDOW - 1)
    assert driver.prefetch.on == on
    driver.begin_step("decode", (0,))
    assert driver.view.prefetching == on
    driver.forget_counts()
    assert driver.prefetch.on
    assert driver.prefetch.status == ""
