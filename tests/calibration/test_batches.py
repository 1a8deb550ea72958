"""Predictions over batches, and the cosines of their inputs, against plain loops over the same rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_collector import HIDDEN, World, worlds

from pipeline.calibration.batches import BATCHES, BatchedPredictions, draw
from pipeline.policies.predictions import by_probability
from pipeline.policies.view import Routing

SEED = 4


def heaviest_named(used: list[Routing], named: list[Routing], batch: list[int], top: int) -> list[bool]:
    """For each of the `top` experts that most rows of the batch use, whether it is among as many that most
    rows are predicted to use. The order is the one that a policy prefetches in."""

    def heaviest(routings: list[Routing]) -> list[int]:
        # A row without weights: `by_probability` takes a single row's experts as its router names them.
        parts = [*(routings[row] for row in batch), Routing(routings[0].experts, 0 * routings[0].weights)]
        whole = Routing(*(np.concatenate([getattr(p, n) for p in parts]) for n in ("experts", "weights")))
        return by_probability(whole)[:top]

    guessed = heaviest(named)
    return [expert in guessed for expert in heaviest(used)]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@given(world=worlds, sequences=st.integers(1, 3), every=st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_batches_and_cosines_equal_plain_loops(world: World, sequences: int, every: int) -> None:
    steps, shape = world.steps(sequences), world.shape
    residuals = world.random.standard_normal((shape.layers - 1, HIDDEN)).astype(np.float32)
    pairs = zip(residuals, world.gates[1:], strict=True)
    corrections = np.array([gate @ x for x, gate in pairs], np.float32).reshape(-1, shape.experts)
    observer = BatchedPredictions(shape, world.route, residuals, corrections, every)
    for step in steps:
        world.show(step, observer)
    found = observer.measured(SEED)
    if shape.layers == 1:
        assert found == {}
        return
    rows = np.concatenate([step.x for step in steps], axis=1)[:, ::every]  # [L, N, H]
    count = rows.shape[1]
    assert found["rows"] == [size for size in (1, 4, 16, 64) if size <= count]
    assert found["top"] == [1, 2, 4][: 3 if shape.experts >= 8 else 2]
    inputs = {"raw": rows[:-1], "residual": rows[:-1] + residuals[:, None]}
    for name, before in inputs.items():
        layers = range(1, shape.layers)
        expected = [
            np.mean([cosine(a, b) for a, b in zip(before[layer - 1], rows[layer], strict=True)])
            for layer in layers
        ]
        np.testing.assert_allclose(found["cosines"][name], expected, atol=1e-5)
        used, named = (
            [[world.route((x @ world.gates[layer].T)[None]) for x in of[layer - shift]] for layer in layers]
            for of, shift in ((rows, 0), (before, 1))
        )
        for size, by_top in zip(found["rows"], found["accuracy"][name], strict=True):
            batches = draw(count, size, SEED).tolist()
            for top, accuracy in zip(found["top"], by_top, strict=True):
                shares = [
                    np.mean([hit for b in batches for hit in heaviest_named(u, n, b, top)])
                    for u, n in zip(used, named, strict=True)
                ]
                assert accuracy == pytest.approx(np.mean(shares), abs=1e-9)


def test_a_batch_has_different_rows_and_batches_differ() -> None:
    batches = draw(70, 64, SEED)
    assert batches.shape == (BATCHES, 64)
    assert all(len(set(batch)) == 64 for batch in batches.tolist())
    assert set(batches.ravel().tolist()) == set(range(70))
    assert len({tuple(batch) for batch in batches.tolist()}) == BATCHES
