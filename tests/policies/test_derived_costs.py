"""Costs derived from a machine's rates."""

from __future__ import annotations

import pytest

from pipeline.errors import PolicyError
from pipeline.policies.derived_costs import MACHINES, Rates, derived

RATES = Rates(100.0, 25.0, 1000.0, 1.0, 100.0, round_trip=5e-5, layer=2e-4, launch=3e-5)
WEIGHTS = 8 * 10**6  # an expert's, 4 bits each


def test_one_row_takes_as_long_as_reading_the_expert() -> None:
    costs = derived(RATES, WEIGHTS / 2, WEIGHTS)
    assert costs.per == "expert"
    assert costs.host[0] == pytest.approx(4e6 / 75e9)  # the link takes its 25 GB/s from the same memory
    assert costs.device[0] == pytest.approx(4e6 / 1000e9)
    assert costs.link == pytest.approx(4e6 / 25e9)
    assert (costs.round_trip, costs.launch, costs.fetch) == (5e-5, 3e-5, 1e-5)
    assert costs.other[0] == pytest.approx(2e-4)


def test_many_rows_take_as_long_as_their_arithmetic() -> None:
    costs = derived(RATES, WEIGHTS / 2, WEIGHTS, other_bytes=1e6, other_weights=5e5)
    rows = costs.rows[-1]
    assert costs.host[-1] == pytest.approx(2 * WEIGHTS * rows / 1e12)
    assert costs.device[-1] == pytest.approx(2 * WEIGHTS * rows / 100e12)
    assert costs.other[-1] == pytest.approx(2e-4 + 2 * 5e5 * rows / 100e12)


def test_the_workers_keep_half_of_the_memory() -> None:
    assert Rates(40.0, 50.0, 1000.0, 1.0, 1.0).workers_gbps == 20


@pytest.mark.parametrize("name", MACHINES)
def test_named_machines_give_costs(name: str) -> None:
    costs = derived(MACHINES[name], WEIGHTS / 2, WEIGHTS)
    assert costs.device[0] < costs.host[0] < costs.link


@pytest.mark.parametrize(
    "wrong", [{"link_gbps": 0.0}, {"host_gbps": float("nan")}, {"round_trip": -1e-6}, {"device_tflops": -1.0}]
)
def test_a_rate_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    given = {
        "host_gbps": 1.0,
        "link_gbps": 1.0,
        "device_gbps": 1.0,
        "host_tflops": 1.0,
        "device_tflops": 1.0,
    }
    with pytest.raises(PolicyError, match=next(iter(wrong))):
        Rates(**given | wrong)
