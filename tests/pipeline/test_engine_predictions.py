"""What the engine orders for predictions: when, in which order, and how it is counted."""

from __future__ import annotations

import numpy as np
import pytest
from thread_engine import Placed, decode, prefilled, recorded_orders

from pipeline.backbone.batch import StepInput
from pipeline.errors import PlanError
from pipeline.experts.mover import PREDICTED
from pipeline.policies.view import Gated, Plan, Routing, Signals, Target, View


class Wasteful(Placed):
    """Predicts another expert of layer 1 in each step, and has the host compute everything."""

    name = "wasteful"

    def __init__(self) -> None:
        self.asked: list[bool] = []  # whether prediction was on

    def predict(self, layer: int, signals: Signals, gated: Gated, view: View) -> tuple[Target, ...]:
        if layer:
            return ()
        self.asked.append(view.prefetching)
        before, now = ((view.step + more) % view.shape.experts for more in (-1, 0))
        return (Target(1, before, 0), Target(1, now, view.shape.tiles)) if view.prefetching else ()


def test_predictions_that_are_not_used_are_switched_off(parts) -> None:
    engine, _, kv = parts
    new = prefilled(engine, kv, capacity=250)
    policy = Wasteful()
    engine.set_policy(policy, None)
    for _ in range(240):
        decode(engine, new)
        if not policy.asked[-1]:
            break
    assert not engine.first.driver.prefetch.on
    assert "0 were used" in engine.first.driver.prefetch.status
    assert policy.asked.count(False) == 1
    assert engine.counters.snapshot()["decode"]["paused_steps"] == 1


class Crowding(Placed):
    """Keeps two experts of layer 1. In layer 0, which the device computes as a whole, it predicts that
    another expert replaces one of them."""

    name = "crowding"
    experts = (0, 1)

    def __init__(self, predicts: tuple[Target, ...]) -> None:
        self._predicts = predicts

    def plan(self, layer: int, routing: Routing, view: View) -> Plan:
        return Plan(np.full(view.shape.experts, 0 if layer else view.shape.tiles, np.int32))

    def predict(self, layer: int, signals: Signals, gated: Gated, view: View) -> tuple[Target, ...]:
        return () if layer else self._predicts


def test_demanded_tiles_are_ordered_before_predicted_ones(parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six tiles are demanded, four slots are free, and the prediction frees three: they belong to the demand.
    No tile is ordered twice."""
    engine, _, kv = parts
    new = prefilled(engine, kv)
    (expected,) = engine.step([StepInput(new, "last")], "decode")
    new = prefilled(engine, kv)
    engine.set_policy(Crowding((Target(1, 0, 0), Target(1, 2, 3))), None)
    ordered = recorded_orders(engine, monkeypatch)
    (logits,) = engine.step([StepInput(new, "last")], "decode")
    engine.first.memory.mover.wait_idle()
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-5)
    assert [urgency for urgency, _ in ordered] == [0] * 6 + [PREDICTED] * 3
    assert {tile[0] for _, tile in ordered[:6]} == {0}
    assert [tile for _, tile in ordered[6:]] == [(1, 2, 0), (1, 2, 1), (1, 2, 2)]
    assert len({tile for _, tile in ordered}) == 9


def test_prediction_must_not_evict_tiles_of_its_own_layer(parts) -> None:
    engine, _, kv = parts
    new = prefilled(engine, kv)

    class Evicting(Crowding):
        def predict(self, layer: int, signals: Signals, gated: Gated, view: View) -> tuple[Target, ...]:
            return (Target(1, 1, 0),) if layer else ()

    engine.set_policy(Evicting(()), None)
    with pytest.raises(PlanError, match="evicts tiles of a layer that is being computed"):
        decode(engine, new)
    prefilled(engine, kv)
