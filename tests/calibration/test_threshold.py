"""The search for AdapMoE's threshold, on losses that are known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.calibration.measure import largest_threshold, perturbations

RANKED = np.arange(1, 65, dtype=np.float32) / 64  # 64 different ones


def bound(exact: float) -> float:
    return 0.005 * exact


def steps(edges: dict[float, float]) -> Callable[[float], float]:
    """A loss of 2.0 that changes at each of these T's."""
    return lambda t: [2.0, *(loss for edge, loss in sorted(edges.items()) if t >= edge)][-1]


def test_last_threshold_within_the_bound_is_found() -> None:
    found = largest_threshold(RANKED, steps({0.1: 2.009, 37.5 / 64: 2.011}), bound, 8)
    assert (found.value, found.loss, found.exact) == (37 / 64, 2.009, 2.0)
    assert found.tried[:3] == ((0.0, 2.0), (1.0, 2.011), (0.5, 2.009))
    assert len(found.tried) <= 8


def test_nan_loss_breaks_the_bound() -> None:
    assert largest_threshold(RANKED, steps({20.5 / 64: float("nan")}), bound, 8).value == 20 / 64


@given(
    st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=40),
    st.lists(st.floats(1.9, 2.1), min_size=41, max_size=41),
    st.integers(2, 12),
)
def test_threshold_keeps_the_bound_for_any_loss(candidates, losses, evaluations) -> None:
    ranks = sorted({0.0, *candidates})
    calls: list[float] = []

    def loss(t: float) -> float:
        calls.append(t)
        return losses[ranks.index(t)]

    found = largest_threshold(np.array(candidates, np.float32), loss, bound, evaluations)
    assert found.tried == tuple((t, losses[ranks.index(t)]) for t in calls)
    assert len(set(calls)) == len(calls) <= evaluations
    assert (found.value, found.loss) in found.tried
    keeps = {t: value <= losses[0] * 1.005 for t, value in found.tried}
    assert keeps[found.value]
    assert all(t > found.value for t in keeps if not keeps[t])
    assert not any(keeps[t] and t > found.value for t in keeps)
    if evaluations > 9:  # enough to decide all candidates
        above = [t for t in ranks if t > found.value]
        assert not above or not keeps[above[0]]


@pytest.mark.parametrize("wrong", [[], [float("nan")], [float("inf"), 1.0], [-1.0, 1.0]])
def test_invalid_candidates_are_refused(wrong: list[float]) -> None:
    with pytest.raises(ValueError, match="finite numbers from 0 on"):
        largest_threshold(np.array(wrong, np.float32), steps({}), bound, 8)


def test_loss_without_a_gate_must_be_finite() -> None:
    with pytest.raises(ValueError, match="the loss without a gate is nan"):
        largest_threshold(RANKED, steps({0.0: float("nan")}), bound, 8)


def test_perturbation_of_two_experts_is_equation_8() -> None:
    weights = np.array([[0.75, 0.25], [0.3, 0.1], [1.0, 0.0]], np.float32)
    np.testing.assert_allclose(perturbations(weights, 2.0), [[0.125], [0.125], [0.0]], rtol=1e-6)


def test_perturbations_drop_the_smallest_weights_first() -> None:
    weights = np.array([[0.5, 0.1, 0.2, 0.2], [0.0, 0.0, 0.0, 0.0]], np.float32)
    expected = [[0.01, 0.09, 0.25], [0.0, 0.0, 0.0]]
    found = perturbations(weights, 1.0)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5)
