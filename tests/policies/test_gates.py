"""The gates against the paper's rule in plain words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_calibration import plain_calibration
from policy_machine import Given, make_view

from pipeline.arrays import FloatArray
from pipeline.policies.calibration import Calibration
from pipeline.policies.gates import AdaptiveGate, drop_shares
from pipeline.policies.view import ModelShape, Routing, Signals, View


def calibration(sensitivity: list[float] | None, threshold: float | None) -> Calibration:
    known = None if sensitivity is None else np.array(sensitivity, np.float32)
    layers = 1 if known is None else len(known)
    return plain_calibration(layers, 16, sensitivity=known, threshold=threshold)


def a_view(top_k: int, sensitivity: list[float], threshold: float | None, weights: FloatArray) -> View:
    """The machine's router returns these weights."""
    experts = np.tile(np.arange(16)[:top_k][::-1], (len(weights), 1)).astype(np.int32)
    view = make_view(ModelShape(len(sensitivity), 16, 1, top_k), 8)
    known = calibration(sensitivity, threshold)
    return replace(view, calibration=known, router=Given(routing=Routing(experts, weights)))


UNEVEN = np.array([[0.9, 0.1]], np.float32)
SIGNALS = Signals(np.zeros((1, 16), np.float32), {})


def slowly(weights: list[float], sensitivity: float, limit: float) -> list[float]:
    """One token: drop one more of the smallest as long as the rule allows, by its definition."""
    total = sum(weights)
    ranked = sorted(range(len(weights)), key=lambda slot: (weights[slot], -slot))
    dropped: list[int] = []
    for count in range(1, len(weights)):
        tried = ranked[:count]
        share = sum(weights[slot] for slot in tried) / total
        if share**2 * sensitivity <= limit:
            dropped = tried
    kept = sum(weight for slot, weight in enumerate(weights) if slot not in dropped)
    return [0.0 if slot in dropped else weight / kept * total for slot, weight in enumerate(weights)]


@pytest.mark.parametrize("top_k", [1, 2, 4, 8])
@settings(max_examples=80)
@given(data=st.data())
def test_adaptive_gate_follows_its_rule(top_k: int, data: st.DataObject) -> None:
    rows = data.draw(st.sampled_from([1, 1, 3, 20]))
    rng = np.random.default_rng(data.draw(st.integers(0, 9999)))
    spread = data.draw(st.sampled_from([0.2, 1.0, 3.0]))
    weights = rng.dirichlet(np.full(top_k, spread), rows).astype(np.float32)
    weights *= data.draw(st.sampled_from([1.0, 0.4, 16.0]))  # not every model's weights sum to 1
    if data.draw(st.booleans()):
        weights[rng.random(weights.shape) < 0.2] = 0
        weights[:, 0] = 0.5  # some are left
    sensitivity = [3.0, data.draw(st.sampled_from([0.0, 0.01, 0.3, 4.0]))]
    limit = data.draw(st.sampled_from([0.0, 0.005, 0.02, 0.2]))
    view = a_view(top_k, sensitivity, limit, weights)
    gated = AdaptiveGate(threshold=None)(1, SIGNALS, view)
    assert np.array_equal(gated.router_routing.weights, weights)
    assert np.array_equal(gated.routing.experts, gated.router_routing.experts)
    assert gated.routing.weights.dtype == np.float32
    for row, full in zip(gated.routing.weights, weights, strict=True):
        wanted = slowly(full.tolist(), float(np.float32(sensitivity[1])), limit)
        assert row == pytest.approx(wanted, rel=1e-6, abs=1e-9)
        assert row.sum() == pytest.approx(full.sum(), rel=1e-6)
        if np.count_nonzero(row) == np.count_nonzero(full):
            assert np.array_equal(row, full)


def test_gate_drops_experts_only_in_decode() -> None:
    view = replace(a_view(2, [0.01], 1.0, UNEVEN), phase="prefill")
    gated = AdaptiveGate(threshold=None)(0, SIGNALS, view)
    assert gated.routing is gated.router_routing


def test_new_calibration_is_used() -> None:
    gate = AdaptiveGate(threshold=None)
    assert gate(0, SIGNALS, a_view(2, [0.01], 1.0, UNEVEN)).routing.weights[0, 1] == 0
    assert gate(0, SIGNALS, a_view(2, [500.0], 1.0, UNEVEN)).routing.weights[0, 1] != 0


def test_shares_from_which_experts_are_dropped() -> None:
    found = drop_shares(np.array([[0.5, 0.25, 0.25], [0, 2, 6], [0, 0, 0]], np.float32))
    inf = np.inf
    assert found.tolist() == [[inf, 0.5, 0.25], [0, 0.25, inf], [inf, inf, inf]]
