"""Predictions from hand-made logits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from policy_machine import make_calibration, make_view

from pipeline.arrays import FloatArray
from pipeline.policies.predictions import (
    Lookahead,
    NextChannels,
    NextGate,
    Residual,
    by_probability,
)
from pipeline.policies.view import ModelShape, Routing, Signals, View

SHAPE = ModelShape(layers=4, experts=6, tiles=2, top_k=2)


def view_with(*kept: tuple[int, int]) -> View:
    """A view in which targets keep exactly these experts."""
    target = np.zeros((4, 6), np.int32)
    for layer, expert in kept:
        target[layer, expert] = 2
    calibration = make_calibration(SHAPE, np.random.default_rng(0))
    calibration.residual_logits[:] = 0
    return replace(make_view(SHAPE, 12), target=target, calibration=calibration)


def logits(*rows: list[float]) -> FloatArray:
    return np.array(rows, np.float32)


def as_it_is(layer: int, routing: Routing) -> Routing:
    return routing


FAVOURS_1_4 = logits([0, 5, 0, 0, 4, 1])
FAVOURS_2_3 = logits([0, 0, 5, 6, 0, 0])


def test_next_gate_names_missing_experts_best_first() -> None:
    part = NextGate()
    signals = Signals(None, {2: FAVOURS_2_3})
    assert part.probes(1, view_with()) == (2,)
    assert part.probes(3, view_with()) == ()
    assert part.experts(1, signals, view_with(), as_it_is) == [(2, 3), (2, 2)]
    assert part.experts(1, signals, view_with((2, 3), (1, 2)), as_it_is) == [(2, 2)]
    assert part.experts(1, signals, view_with((2, 3), (2, 2)), as_it_is) == []
    assert part.experts(3, Signals(None, {}), view_with(), as_it_is) == []
    assert part.reserve(view_with()) == 4


def test_an_mlp_corrects_the_next_gate_where_it_is_better() -> None:
    """Of layers 1 and 2 there is one; only for layer 2 it predicts more than the router's 0.5."""
    view = view_with()
    assert view.calibration is not None
    accuracy = view.calibration.accuracy | {"raw": np.full(4, 0.5, np.float32)}
    mlps = np.zeros((2, 3, 4), np.float32), np.zeros((2, 6, 3), np.float32), np.array([0.5, 0.6], np.float32)
    fields = dict(zip(("mlp_inner", "mlp_outer", "mlp_accuracy"), mlps, strict=True))
    trained = replace(view, calibration=replace(view.calibration, accuracy=accuracy, **fields))
    part = NextChannels()
    assert [part.probes(layer, trained) for layer in range(4)] == [(1,), (2, -2), (3,), ()]
    assert [part.probes(layer, view) for layer in range(4)] == [(1,), (2,), (3,), ()]
    both = Signals(None, {2: FAVOURS_2_3, -2: 9 * (FAVOURS_1_4 > 3)})
    for given, experts in ((both, [1, 4]), (Signals(None, {2: FAVOURS_2_3}), [3, 2])):
        named = part.routing(1, given, trained)
        assert named is not None
        assert named.experts.tolist() == [experts]
    assert part.routing(3, Signals(None, {}), trained) is None


def test_predicted_experts_are_ordered_by_rows_then_weights() -> None:
    experts = np.array([[0, 1], [1, 2], [3, 2], [4, 5]], np.int32)
    weights = np.array([[0.9, 0.1], [0.5, 0.2], [0.6, 0.3], [0.8, 0.0]], np.float32)
    assert by_probability(Routing(experts, weights)) == [1, 2, 0, 4, 3]
    assert by_probability(Routing(experts[:1], weights[:1])) == [0, 1]
    assert by_probability(Routing(experts[:1], weights[:1] * 0)) == []


def test_residual_corrects_the_input() -> None:
    """The mean residual's logits tip the choice; only the first `prefetch` are fetched, where missing."""
    view = view_with()
    assert view.calibration is not None
    view.calibration.residual_logits[1] = [0, 0, 0, 0, 0, 9]
    signals = Signals(None, {2: FAVOURS_2_3})
    assert Residual(prefetch=2).experts(1, signals, view, as_it_is) == [(2, 5), (2, 3)]
    assert Residual(prefetch=1).experts(1, signals, view, as_it_is) == [(2, 5)]
    kept = replace(view_with((2, 5)), calibration=view.calibration)
    assert Residual(prefetch=1).experts(1, signals, kept, as_it_is) == []
    assert Residual(prefetch=2).experts(1, signals, kept, as_it_is) == [(2, 3)]
    assert Residual(prefetch=2).probes(3, view) == ()


@pytest.mark.parametrize(("experts", "prefetch"), [(8, 1), (16, 1), (17, 4), (128, 4)])
def test_residual_defaults_follow_the_model(experts: int, prefetch: int) -> None:
    view = make_view(ModelShape(layers=2, experts=experts, tiles=1, top_k=8), 4)
    assert Residual(prefetch=None).reserve(view) == 2 * prefetch


def test_lookahead_continues_where_all_experts_are_kept() -> None:
    part = Lookahead()
    view = view_with((1, 1), (1, 4), (2, 3), (2, 2))
    assert part.probes(0, view) == (1, 2, 3)
    assert part.probes(2, view) == (3,)
    signals = Signals(None, {1: FAVOURS_1_4, 2: FAVOURS_2_3, 3: FAVOURS_1_4})
    assert part.experts(0, signals, view, as_it_is) == [(3, 1), (3, 4)]
    assert part.experts(0, signals, view_with((1, 1), (1, 4), (2, 3)), as_it_is) == [(2, 2)]
    assert part.experts(0, signals, view_with((2, 3)), as_it_is) == [(1, 1), (1, 4)]


def test_lookahead_ends_with_the_next_tokens_first_layer() -> None:
    """By the trained gate, where the calibration has one, while one token at a time is decoded."""
    part = Lookahead()
    view = view_with((0, 4))
    assert part.probes(3, view) == (0,)
    assert part.experts(3, Signals(None, {0: FAVOURS_1_4}), view, as_it_is) == [(0, 1)]
    assert view.calibration is not None
    untrained = replace(view, calibration=replace(view.calibration, first_gate=None))
    assert part.probes(3, untrained) == ()
    assert part.probes(3, replace(view, calibration=None)) == ()
    assert part.probes(3, replace(view, phase="prefill")) == ()
    assert part.experts(3, Signals(None, {}), untrained, as_it_is) == []
