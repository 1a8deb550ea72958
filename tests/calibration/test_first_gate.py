"""The trained gate for the first layer."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.calibration.first_gate import FirstGate, train_first_gate
from pipeline.models.routing import Softmax

EXPERTS, HIDDEN, ROWS = 8, 48, 3000
CHANCE = 2 / EXPERTS
ROUTER = Softmax(2, rescaled=True)


def taught(noise: float, size: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, the logits that a linear teacher gives with noise on them, and the teacher [E, H]."""
    random = np.random.default_rng(seed)
    teacher = random.standard_normal((EXPERTS, HIDDEN)) * 2 / np.sqrt(HIDDEN)
    x = random.standard_normal((ROWS, HIDDEN))
    logits = x @ teacher.T + noise * random.standard_normal((ROWS, EXPERTS))
    return (size * x).astype(np.float32), logits.astype(np.float32), teacher


def held_out_accuracy(gate: np.ndarray, x: np.ndarray, logits: np.ndarray) -> float:
    """Share of the two largest logits of the last fifth of the rows that are the gate's two largest too."""
    rows = slice(-ROWS // 5, None)
    best, guess = (np.argsort(-each, axis=1)[:, :2] for each in (logits[rows], x[rows] @ gate.T))
    return float(np.mean([len({*a} & {*b}) / 2 for a, b in zip(best.tolist(), guess.tolist(), strict=True)]))


@pytest.mark.parametrize("size", [1.0, 0.01, 30.0])
def test_linear_teacher_is_recovered(size: float) -> None:
    x, logits, teacher = taught(noise=0.0, size=size)
    found = train_first_gate(x, logits, ROUTER, seed=1)
    assert found.matrix.dtype == np.float32
    assert found.matrix.shape == (EXPERTS, HIDDEN)
    assert found.accuracy > 0.95
    assert found.divergence < 0.01
    # Up to a vector added to every expert's: softmax does not depend on it.
    wanted = (teacher - teacher.mean(axis=0)) / size
    assert np.abs(found.matrix - found.matrix.mean(axis=0) - wanted).max() < 0.1 * np.abs(wanted).max()


def test_noisy_teacher_is_recovered_and_accuracy_is_of_held_out_rows() -> None:
    x, logits, _ = taught(noise=1.0)
    found = train_first_gate(x, logits, ROUTER, seed=1)
    untrained = np.random.default_rng(9).standard_normal((EXPERTS, HIDDEN)).astype(np.float32)
    assert found.accuracy == pytest.approx(held_out_accuracy(found.matrix, x, logits), abs=1e-3)
    assert found.accuracy > held_out_accuracy(untrained, x, logits) + 0.3
    assert CHANCE + 0.3 < found.accuracy < 0.9


def test_training_stops_before_it_overfits_few_rows() -> None:
    random = np.random.default_rng(3)
    x = random.standard_normal((60, HIDDEN)).astype(np.float32)
    logits = 3 * random.standard_normal((60, EXPERTS)).astype(np.float32)  # nothing to learn
    found = train_first_gate(x, logits, ROUTER, seed=1)
    logarithms = logits[-12:] - np.log(np.exp(logits[-12:]).sum(axis=1, keepdims=True))
    all_alike = float((np.exp(logarithms) * (logarithms + np.log(EXPERTS))).sum(axis=1).mean())
    assert found.divergence <= all_alike * (1 + 1e-6)


def test_result_depends_on_seed_and_arrays() -> None:
    x, logits, _ = taught(noise=1.0)

    def matrix(seed: int) -> FirstGate:
        return train_first_gate(x[:600], logits[:600], ROUTER, seed)

    first, again, other = matrix(1), matrix(1), matrix(2)
    np.testing.assert_array_equal(first.matrix, again.matrix)
    assert (first.accuracy, first.divergence) == (again.accuracy, again.divergence)
    assert (first.matrix != other.matrix).any()


@pytest.mark.parametrize("rows", [(1, 1), (5, 4)])
def test_arrays_of_different_lengths_are_refused(rows: tuple[int, int]) -> None:
    x, logits, _ = taught(noise=0.0)
    with pytest.raises(ValueError, match="pairs of tokens"):
        train_first_gate(x[: rows[0]], logits[: rows[1]], ROUTER, seed=1)
