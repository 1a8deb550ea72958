"""Drawn routing has the properties that it is drawn from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.models.routing import Softmax
from pipeline.policies.view import ModelShape
from pipeline.traces.synthetic import EMBEDDED, Skew, SyntheticText
from pipeline.traces.trace import Header

HEADER = Header("a", "0" * 16, "0" * 16, ModelShape(16, 8, 4, 2), 100, Softmax(2, True), 3)


def properties(skew: Skew) -> tuple[float, float, float]:
    """Of 300 tokens: the share of uses of the most used quarter, the share of experts that the token before
    used too, and of the next layer's experts that are predicted."""
    steps = SyntheticText(HEADER, skew, seed=3).steps(prompt=0, chunk=1, tokens=300)
    used = np.zeros((300, 16, 8), bool)
    predicted = np.zeros_like(used)
    for token, step in enumerate(steps):
        for layer, traced in enumerate(step.layers):
            used[token, layer, traced.router_routing.experts[0]] = True
            if traced.predictions:
                best = np.argsort(-traced.predictions[0][0].astype(np.float32))[:2]
                predicted[token, layer + 1, best] = True
    quarter = np.sort(used.sum(0), axis=1)[:, -2:].sum() / used.sum()
    repeated = (used[1:] & used[:-1]).sum() / used[1:].sum()
    return float(quarter), float(repeated), float((used & predicted)[:, 1:].sum() / used[:, 1:].sum())


def test_the_embedded_models_properties_are_drawn() -> None:
    assert properties(EMBEDDED) == pytest.approx((0.40, 0.45, 0.79), abs=0.03)


def test_each_property_follows_its_number() -> None:
    plain = Skew(spread=0.0, persistence=0.0, accuracy=0.6)
    assert properties(plain) == pytest.approx((0.27, 0.25, 0.6), abs=0.03)  # a quarter by chance
    assert properties(replace(plain, spread=1.0))[0] > 0.5
    assert properties(replace(plain, persistence=0.9))[1] > 0.5
    assert properties(replace(plain, accuracy=0.9))[2] == pytest.approx(0.9, abs=0.03)


def test_a_seed_gives_the_same_steps_with_prompts_in_chunks_and_a_row_for_each_sequence() -> None:
    first, second = (SyntheticText(HEADER, EMBEDDED, seed=1).steps(10, 4, 3, batch=2) for _ in range(2))
    assert [(step.phase, step.sequences) for step in first] == [
        *(("prefill", (sequence,) * rows) for sequence in (0, 1) for rows in (4, 4, 2)),
        *(("decode", (0, 1)),) * 3,
    ]
    assert [step.number for step in first] == list(range(9))
    for a, b in zip(first, second, strict=True):
        for mine, its in zip(a.layers, b.layers, strict=True):
            assert np.array_equal(mine.router_routing.experts, its.router_routing.experts)
