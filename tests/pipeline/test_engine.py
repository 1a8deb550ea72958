"""The engine's early decisions, against the same computed by hand from the parts of the model."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from thread_engine import PROMPT, Placed, prefilled
from torch import Tensor

from pipeline.arrays import Phase
from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.engine.driver import LayerDecision
from pipeline.engine.engine import Engine
from pipeline.errors import ShardFailed
from pipeline.policies.view import Ahead, Gated, Plan, Routing, Signals, View
from shm.store import Store
from workers.kernels.reference import ReferenceKernel


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
        routing = view.router(signals.probes[1], 1)
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
        first = model.attend(0, model.embed(batch), batch)
        x0 = first.x.clone()  # it is valid until the next layer
        h = first.h + experts(0, model.router_math(first.logits().numpy(), 0), x0, x0)
        predicted = model.router_math(model.router(1, x0).numpy(), 1)
        second = model.attend(1, h, batch)
        h = second.h + experts(1, predicted, second.x, x0 if stale else second.x)
        return model.head(model.finish(h, batch))[0].numpy()


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("cut", [0, 1, 3])
def test_early_share_is_computed_from_the_layer_before(parts, cut, early) -> None:
    """The device computes its own share from the layer's own input."""
    engine, store, kv = parts
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


def test_failed_layer_abandons_the_next_layers_early_share(parts, monkeypatch) -> None:
    engine, _, kv = parts
    new = prefilled(engine, kv)
    engine.set_policy(SecondLayerAhead(0, True), None)
    parts_of = engine.pool.parts
    abandoned: list[object] = []
    abandon = engine.pool.abandon

    def failing(ticket: object) -> object:
        parts_of(ticket)
        raise ShardFailed("no")

    with monkeypatch.context() as patch:
        patch.setattr(engine.pool, "parts", failing)
        patch.setattr(engine.pool, "abandon", lambda ticket: (abandoned.append(ticket), abandon(ticket)))
        with pytest.raises(ShardFailed):
            engine.step([StepInput(new, "last")], "decode")
    assert len(abandoned) == 2  # the early share, and the failed one
    assert new.kv.length == len(PROMPT)
    (logits,) = engine.step([StepInput(new, "last")], "decode")
    assert np.isfinite(logits).all()
