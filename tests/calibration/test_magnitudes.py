"""The distribution of |u| that thresholds are quantiles of, against all numbers sorted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.calibration.observers import STEPS, Magnitudes
from pipeline.engine.driver import LayerDecision
from pipeline.policies.calibration import quantiles
from pipeline.policies.view import Gated, ModelShape, Routing, Signals

SHAPE = ModelShape(layers=2, experts=4, tiles=2, top_k=2)
UP = np.random.default_rng(0).normal(size=(2, 4, 24, 8)).astype(np.float32)  # layer, expert, channel, H


def up(layer: int, expert: int, x: Any) -> Any:
    return x @ UP[layer, expert].T


def observe(found: Magnitudes, phase: Any, layer: int, routing: Routing, x: Any) -> None:
    nothing = np.zeros(4, np.int32)
    found.begin(phase, tuple(range(len(x))))
    found.layer(
        LayerDecision(layer, Signals(None, {}), Gated.from_router(routing), nothing, nothing),  # type: ignore
        x,
    )


def test_quantiles_are_those_of_all_numbers() -> None:
    """Of the channels of the experts that each decoded row uses; a weight of 0 uses none."""
    random, found = np.random.default_rng(1), Magnitudes(SHAPE, up)
    every: list[list[Any]] = [[], []]
    for layer in (0, 1):
        for _ in range(20):
            x = random.normal(size=(3, 8)).astype(np.float32) * 10.0 ** random.integers(-3, 3)
            experts = np.argsort(random.random((3, 4)), axis=1)[:, :2].astype(np.int32)
            weights = (random.random((3, 2)) > 0.3).astype(np.float32)
            observe(found, "decode", layer, Routing(experts, weights), x)
            for row, slot in zip(*np.nonzero(weights), strict=True):
                every[layer].append(abs(up(layer, experts[row, slot], x[row])))
    thresholds = found.quantiles()
    assert thresholds is not None
    assert thresholds.shape == (2, STEPS)
    assert (thresholds[:, 0] == 0).all()
    for layer in (0, 1):
        ranked = np.sort(np.concatenate(every[layer]))
        for step in (1, 10, 50, 80, 95, 99):
            share = step / STEPS
            below = ranked < thresholds[layer, step]
            assert below.mean() == pytest.approx(share, abs=0.003)
        assert (ranked >= quantiles(thresholds, 0.805)[layer]).mean() == pytest.approx(0.195, abs=0.003)


def test_prompts_do_not_count() -> None:
    found, routing = Magnitudes(SHAPE, up), Routing(np.array([[0, 1]], np.int32), np.ones((1, 2), np.float32))
    for layer in (0, 1):
        observe(found, "prefill", layer, routing, np.ones((1, 8), np.float32))
    assert found.quantiles() is None


def test_many_channels_of_0_are_below_any_threshold_above_0() -> None:
    """Half of the numbers are 0: a sparsity of up to 0.5 needs no threshold."""
    found = Magnitudes(SHAPE, lambda layer, expert, x: np.tile(np.array([0, 1], np.float32), (len(x), 12)))
    for layer in (0, 1):
        routing = Routing(np.array([[0, 1]], np.int32), np.ones((1, 2), np.float32))
        observe(found, "decode", layer, routing, np.ones((1, 8), np.float32))
    thresholds = found.quantiles()
    assert thresholds is not None
    assert (thresholds[:, STEPS // 2 + 1 :] >= 1).all()
