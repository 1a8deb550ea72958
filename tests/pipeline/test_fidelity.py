"""The fidelity counters of a layer's decision, against weights added up by hand."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.counters import Counters, Fidelity, difference, fidelity
from pipeline.policies.view import Gated, Routing

SAID = Routing(np.array([[0, 1], [2, 3]], np.int32), np.array([[0.75, 0.25], [0.5, 0.25]], np.float32))
ON_HOST = np.zeros(4, np.int32)


def booked(gated: Gated, cut: np.ndarray = ON_HOST, stale: bool = False) -> Fidelity:
    meter = Fidelity()
    meter.book(gated, cut, 4, stale)
    return meter


KEPT = Routing(SAID.experts, np.array([[1.0, 0.0], [0.5, 0.25]], np.float32))
REPLACED = Routing(np.array([[0, 1], [1, 3]], np.int32), np.array([[0.75, 0.25], [0.4, 0.35]], np.float32))


@pytest.mark.parametrize(
    ("gated", "changed"),
    [
        (Gated.from_router(SAID), {}),
        (Gated(KEPT, SAID), {"skipped": 0.25}),
        (Gated(REPLACED, SAID), {"substituted": 0.5}),
    ],
)
def test_changed_experts_count_with_the_weight_that_the_router_gave(gated, changed) -> None:
    assert booked(gated) == Fidelity(weight=1.75, **changed)


def test_stale_weight_is_the_hosts_share() -> None:
    """Of expert 0 all four tiles, of 1 none, of 2 one, of 3 two."""
    cut = np.array([0, 4, 3, 2], np.int32)
    meter = booked(Gated(SAID, SAID, predicted=True), cut, stale=True)
    assert meter.stale == pytest.approx(0.75 + 0 + 0.5 / 4 + 0.25 / 2)
    assert meter.predicted == meter.weight == 1.75


def test_fidelity_shares_cover_both_phases() -> None:
    counters = Counters(10, 2)
    before = counters.snapshot()
    counters.phases["prefill"].fidelity.book(Gated.from_router(SAID), ON_HOST, 4, False)
    counters.phases["decode"].fidelity.book(Gated(KEPT, SAID), ON_HOST, 4, False)
    counted = difference(counters.snapshot(), before)
    shares = fidelity(False, counted)
    assert shares["skipped"] == pytest.approx(0.25 / 3.5)
    assert {shares[kind] for kind in ("substituted", "stale", "predicted")} == {0.0}
    assert fidelity(True, counted) == {"exact": True}
    assert fidelity(False, before)["skipped"] == 0.0
