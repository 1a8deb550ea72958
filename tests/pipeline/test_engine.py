"""The engine under policies made for one purpose: early decisions, predictions, and the order of orders;
results against hand-computed ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from mover_parts import attached_again
from thread_engine import engine_in_threads
from torch import Tensor

from pipeline.arrays import IntArray, Phase
from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.kv_cache import KVCache
from pipeline.engine.driver import LayerDecision
from pipeline.engine.engine import Engine
from pipeline.errors import PlanError, ShardFailed
from pipeline.experts.fetch_link import DEMANDED, PLACED, PREDICTED
from pipeline.policies.prefetch_meter import LEAST
from pipeline.policies.presets import make_policy
from pipeline.policies.view import Ahead, Gated, Plan, Policy, PolicyRequest, Routing, Signals, Target, View
from shm.store import Store
from workers.kernels.reference import ReferenceKernel

PROMPT = [5, 6, 7, 8, 9]
TOKEN = 11


class Placed(Policy):
    """Places whole experts of layer 1, and has the host compute everything."""

    experts: tuple[int, ...] = ()

    def placement(self, view: View) -> IntArray:
        target = np.zeros((view.shape.layers, view.shape.experts), np.int32)
        target[1, list(self.experts)] = view.shape.tiles
        return target

    def plan(self, layer: int, routing: Routing, view: View) -> Plan:
        return Plan(np.zeros(view.shape.experts, np.int32))


class SecondLayerAhead(Placed):
    """Layer 1 as layer 0's x predicts it, the device's part of each expert being `cut` tiles."""

    name = "second-layer-ahead"
    exact = False
    experts = (0, 1)

    def __init__(self, cut: int, early: bool) -> None:
        self._cut, self._early = cut, early

    def probes(self, layer: int, view: View) -> tuple[int, ...]:
        return (1,) if layer == 0 else ()

    def plan(self, layer: int, routing: Routing, view: View) -> Plan:
        assert layer == 0, "the second layer is decided already"
        return super().plan(layer, routing, view)

    def ahead(self, layer: int, signals: Signals, view: View) -> Ahead | None:
        if layer != 0:
            return None
        assert view.router is not None
        routing = view.router(signals.probes[1])
        cut = np.full(view.shape.experts, self._cut, np.int32)
        return Ahead(Gated(routing, routing, predicted=True), cut, self._early)


@dataclass
class Notes:
    """The calls of an observer."""

    seen: list[LayerDecision] = field(default_factory=list)
    steps: list[tuple[Phase, tuple[int, ...]]] = field(default_factory=list)
    ends: int = 0

    def probes(self, layer: int) -> tuple[int, ...]:
        return (1,) if layer == 0 else ()

    def begin(self, phase: Phase, sequences: tuple[int, ...]) -> None:
        self.steps.append((phase, sequences))

    def layer(self, decision: LayerDecision, x: np.ndarray) -> None:
        self.seen.append(decision)

    def end(self) -> None:
        self.ends += 1


@pytest.fixture(scope="module")
def scene(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Store, KVCache]]:
    with (
        engine_in_threads(tiny_model, tmp_path_factory.mktemp("ahead")) as (engine, _),
        attached_again("thread_engine") as store,
    ):
        kv = KVCache(engine.backbone.spec, torch.float32, torch.device("cpu"), 1024)
        yield engine, store, kv


def prefilled(engine: Engine, kv: KVCache, capacity: int = 16) -> TokenSpan:
    """A sequence with TOKEN as its next token."""
    engine.set_policy(make_policy(PolicyRequest("all-host"), 0), None)
    sequence = kv.allocate(capacity)
    engine.step([StepInput(TokenSpan(sequence, PROMPT), "none")], "prefill")
    return TokenSpan(sequence, [TOKEN])


def decode(engine: Engine, after: TokenSpan, token: int = TOKEN) -> None:
    """One more token of a sequence."""
    engine.step([StepInput(TokenSpan(after.kv, [token]), "none")], "decode")


def by_hand(engine: Engine, store: Store, new: TokenSpan, cut: int, stale: bool) -> np.ndarray:
    """The step's logits [vocabulary], from the backbone's parts and the reference kernel."""
    model, kernel = engine.backbone, ReferenceKernel(store.layout)
    row = torch.zeros(1, dtype=torch.int64)

    def experts(layer: int, routing: Routing, device: Tensor, host: Tensor) -> Tensor:
        y = torch.zeros_like(device)
        for expert, weight in zip(routing.experts[0].tolist(), routing.weights[0].tolist(), strict=True):
            for tile in range(store.layout.shape.tiles):
                data = torch.from_numpy(store.tiles(layer, expert, tile, tile + 1).copy())
                x = kernel.activations(device if tile < cut else host)
                y += weight * kernel.compute(data, x, row)
        return y

    with torch.inference_mode():
        batch = model.batch([new])
        h = model.attention(0, model.embed(batch), batch)
        x0 = model.moe_input(0, h)
        h = h + experts(0, model.spec.router(model.router(0, x0).numpy()), x0, x0)
        predicted = model.spec.router(model.router(1, x0).numpy())
        h = model.attention(1, h, batch)
        x1 = model.moe_input(1, h)
        h = h + experts(1, predicted, x1, x0 if stale else x1)
        return model.head(model.finish(h, batch))[0].numpy()


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("cut", [0, 1, 3])
def test_early_share_is_computed_from_the_layer_before(scene, cut, early) -> None:
    """The device computes its own share from the layer's own input."""
    engine, store, kv = scene
    expected = by_hand(engine, store, prefilled(engine, kv), cut, stale=early)
    new = prefilled(engine, kv)
    notes = Notes()
    engine.set_policy(SecondLayerAhead(cut, early), None)
    engine.observers.append(notes)
    before = engine.counters.snapshot()["decode"]["fidelity"]
    (logits,) = engine.step([StepInput(new, "last")], "decode")
    after = engine.counters.snapshot()["decode"]["fidelity"]
    engine.observers.clear()
    np.testing.assert_allclose(logits[0], expected, rtol=2e-4, atol=2e-5)
    assert notes.steps == [("decode", (new.kv.id,))]
    assert notes.ends == 1
    first, second = notes.seen
    assert first.signals.logits is not None
    assert second.signals.logits is None, "the layer's own router is not run"
    assert (first.stale, second.stale) == (False, early)
    assert after["predicted"] - before["predicted"] == pytest.approx(1, abs=1e-5)
    assert after["stale"] - before["stale"] == pytest.approx((1 - cut / 3) * early, abs=1e-5)


def test_failed_layer_abandons_the_next_layers_early_share(scene) -> None:
    engine, _, kv = scene
    new = prefilled(engine, kv)
    engine.set_policy(SecondLayerAhead(0, True), None)
    result = engine.pool.result
    abandoned: list[object] = []
    abandon = engine.pool.abandon

    def failing(ticket: object) -> object:
        result(ticket)
        raise ShardFailed("no")

    engine.pool.result = failing  # type: ignore[method-assign]
    engine.pool.abandon = lambda ticket: (abandoned.append(ticket), abandon(ticket))  # type: ignore
    try:
        with pytest.raises(ShardFailed):
            engine.step([StepInput(new, "last")], "decode")
    finally:
        del engine.pool.result, engine.pool.abandon
    assert len(abandoned) == 1
    assert new.kv.length == len(PROMPT)
    (logits,) = engine.step([StepInput(new, "last")], "decode")
    assert np.isfinite(logits).all()


class OneTarget(Placed):
    """Predicts expert 2 of layer 1 while layer 0 is computed; the device computes all experts."""

    name = "one-target"

    def plan(self, layer: int, routing: Routing, view: View) -> Plan:
        return Plan(np.full(view.shape.experts, view.shape.tiles, np.int32))

    def predict(self, layer: int, signals: Signals, gated: Gated, view: View) -> tuple[Target, ...]:
        return (Target(1, 2, view.shape.tiles),) if layer == 0 else ()

    def after(self, layer: int, routing: Routing, view: View) -> tuple[Target, ...]:
        return () if layer == 0 else (Target(1, 2, 0),)


def test_predicted_tiles_are_fetched_and_counted(scene) -> None:
    """In each step three tiles are prefetched, or are late; each is used, wasted, or demanded."""
    engine, _, kv = scene
    new = prefilled(engine, kv)
    engine.set_policy(OneTarget(), None)
    before = engine.counters.snapshot()["decode"]
    for token in range(20, 30):
        decode(engine, new, token)
    engine.memory.wait_idle()
    after = engine.counters.snapshot()["decode"]
    kinds = ("predicted", "useful", "wasted")
    counted = {kind: after[f"{kind}_tiles"] - before[f"{kind}_tiles"] for kind in kinds}
    assert counted["predicted"] == counted["useful"] + counted["wasted"]
    late = after["late_tiles"] - before["late_tiles"]
    assert counted["predicted"] + late > 0


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


def test_predictions_that_are_not_used_are_switched_off(scene) -> None:
    engine, _, kv = scene
    new = prefilled(engine, kv, capacity=250)
    policy = Wasteful()
    engine.set_policy(policy, None)
    for _ in range(240):
        decode(engine, new)
        if not policy.asked[-1]:
            break
    assert not engine.driver.prefetch.on
    assert "0 were used" in engine.driver.prefetch.status
    assert policy.asked.count(False) == 1


def test_predictions_during_a_prompt_are_not_judged(scene) -> None:
    engine, _, kv = scene
    new = prefilled(engine, kv, capacity=250)
    policy = Wasteful()
    engine.set_policy(policy, None)
    before = engine.counters.snapshot()["prefill"]["wasted_tiles"]
    for _ in range(200):
        engine.step([StepInput(TokenSpan(new.kv, [TOKEN]), "none")], "prefill")
    engine.memory.wait_idle()
    assert engine.counters.snapshot()["prefill"]["wasted_tiles"] - before > 2 * LEAST
    assert all(policy.asked)
    assert engine.driver.prefetch.on


def test_meter_of_a_new_policy_ignores_earlier_predictions(scene) -> None:
    engine, _, kv = scene
    new = prefilled(engine, kv, capacity=250)
    policy = Wasteful()
    engine.set_policy(policy, None)
    while engine.driver.prefetch.on:
        decode(engine, new)
    brought = int(engine.driver.prefetch.status.partition(": of ")[2].split()[0])
    assert brought <= 3 * len(policy.asked)


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


def recorded_orders(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, tuple[int, int, int]]]:
    """The tiles that are ordered from now on: (urgency, (layer, expert, tile)) of each."""
    ordered: list[tuple[int, tuple[int, int, int]]] = []
    link = engine.memory.mover._link
    order = link.order

    def noted(layer: int, expert: int, lo: int, slots: list[int], urgency: int) -> object:
        ordered.extend((urgency, (layer, expert, lo + index)) for index in range(len(slots)))
        return order(layer, expert, lo, slots, urgency)

    monkeypatch.setattr(link, "order", noted)
    return ordered


def test_demanded_tiles_are_ordered_before_predicted_ones(scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six tiles are demanded, four slots are free, and the prediction frees three: they belong to the demand.
    No tile is ordered twice."""
    engine, _, kv = scene
    new = prefilled(engine, kv)
    (expected,) = engine.step([StepInput(new, "last")], "decode")
    new = prefilled(engine, kv)
    engine.set_policy(Crowding((Target(1, 0, 0), Target(1, 2, 3))), None)
    ordered = recorded_orders(engine, monkeypatch)
    (logits,) = engine.step([StepInput(new, "last")], "decode")
    engine.memory.wait_idle()
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-5)
    assert [urgency for urgency, _ in ordered] == [DEMANDED] * 6 + [PREDICTED] * 3
    assert {tile[0] for _, tile in ordered[:6]} == {0}
    assert [tile for _, tile in ordered[6:]] == [(1, 2, 0), (1, 2, 1), (1, 2, 2)]
    assert len({tile for _, tile in ordered}) == 9


def test_tile_below_target_is_not_ordered_beside_its_demand(scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that keeps what it fetches, and a prediction in the same layer: every tile is ordered once."""
    engine, _, kv = scene
    new = prefilled(engine, kv, capacity=32)
    engine.set_policy(make_policy(PolicyRequest("mixtral-offloading"), 0), None)
    ordered = recorded_orders(engine, monkeypatch)
    for token in range(20, 40):
        ordered.clear()
        decode(engine, new, token)
        demanded = {tile for urgency, tile in ordered if urgency == DEMANDED}
        assert not demanded & {tile for urgency, tile in ordered if urgency == PLACED}


def test_prediction_must_not_evict_tiles_of_its_own_layer(scene) -> None:
    engine, _, kv = scene
    new = prefilled(engine, kv)

    class Evicting(Crowding):
        def predict(self, layer: int, signals: Signals, gated: Gated, view: View) -> tuple[Target, ...]:
            return (Target(1, 1, 0),) if layer else ()

    engine.set_policy(Evicting(()), None)
    with pytest.raises(PlanError, match="evicts tiles of a layer that is being computed"):
        decode(engine, new)
    prefilled(engine, kv)


def test_forget_trials_clears_popularity_and_counters(scene) -> None:
    engine, _, kv = scene
    new = prefilled(engine, kv)
    decode(engine, new)
    assert engine.driver.view.popularity.sum() > 0
    engine.forget_trials()
    assert engine.driver.view.popularity.sum() == 0
    assert engine.counters.phases["decode"].rows == 0
    engine.set_policy(make_policy(PolicyRequest("all-host"), 0), None)
    assert engine.driver.view.popularity.sum() == 0
    decode(engine, new)
    assert engine.driver.view.popularity.sum() == 2 * 2, "two experts in each of two layers"
