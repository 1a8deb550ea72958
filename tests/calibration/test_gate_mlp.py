"""The MLPs that correct the next gate: what they learn, when they learn nothing, and how they are counted."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from pipeline.arrays import FloatArray
from pipeline.calibration.gate_mlp import WIDTH, GateMlps, GatePairs, predicted_layers, train_mlp
from pipeline.engine.driver import LayerDecision
from pipeline.policies.view import Gated, ModelShape, Routing, Signals

SHAPE = ModelShape(layers=3, experts=6, tiles=2, top_k=2)
HIDDEN = 12


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products are slower by several threads, and beside other programs much slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def router(logits: FloatArray) -> Routing:
    order = np.argsort(-logits, axis=1, kind="stable")[:, : SHAPE.top_k].astype(np.int32)
    return Routing(order, np.ones(order.shape, np.float32))


def named(logits: FloatArray, own: FloatArray) -> float:
    found = router(own).experts[:, :, None] == router(logits).experts[:, None]
    return float(found.any(axis=2).mean())


def rows(number: int, seed: int = 0) -> tuple[FloatArray, FloatArray, FloatArray]:
    """x, the next gate's logits, and own ones that differ from them by a function of x that is not linear."""
    random = np.random.default_rng(seed)
    x = 3 * random.standard_normal((number, HIDDEN)).astype(np.float32)
    gate = random.standard_normal((2, HIDDEN, SHAPE.experts)).astype(np.float32)
    ahead = x @ gate[0]
    return x, ahead, ahead + 2 * np.abs(x) @ gate[1]


def test_what_the_next_gate_lacks_is_learnt() -> None:
    x, ahead, own = rows(1500)
    inner, outer = train_mlp(x[:1000], ahead[:1000], own[:1000], seed=1)
    assert (inner.shape, outer.shape) == ((WIDTH, HIDDEN), (SHAPE.experts, WIDTH))
    mlps = GateMlps(inner[None], outer[None])
    before, after = (named(a[1000:], own[1000:]) for a in (ahead, ahead + mlps.logits(1, x)))
    assert before < 0.6 < 0.7 < after


def test_the_next_gate_stays_where_nothing_is_better() -> None:
    x, ahead, _ = rows(300)
    _, outer = train_mlp(x, ahead, ahead, seed=1)
    assert not outer.any()


def test_training_is_repeatable_and_watched() -> None:
    parts, ticks = rows(400), []
    one = train_mlp(*parts, seed=3, tick=lambda: ticks.append(1))
    again, other = train_mlp(*parts, seed=3), train_mlp(*parts, seed=4)
    for a, b, c in zip(one, again, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a != c).any()
    assert len(ticks) > 1


def step(observer: Any, x: list[FloatArray], own: list[FloatArray], ahead: list[FloatArray]) -> None:
    """The layers of a step: layer l has x[l], its own logits, and the next gate's ahead[l + 1] on x[l]."""
    observer.begin("decode", tuple(range(len(x[0]))))
    for layer in range(SHAPE.layers):
        probes = {target: ahead[target] for target in observer.probes(layer)}
        decision = SimpleNamespace(
            layer=layer, signals=Signals(own[layer], probes), gated=Gated.from_router(router(own[layer]))
        )
        observer.layer(cast(LayerDecision[object], decision), x[layer])
    observer.end()


def steps(number: int, size: int) -> list[tuple[list[FloatArray], ...]]:
    random = np.random.default_rng(5)
    return [
        tuple(
            [random.standard_normal((size, width)).astype(np.float32) for _ in range(SHAPE.layers)]
            for width in (HIDDEN, SHAPE.experts, SHAPE.experts)
        )
        for _ in range(number)
    ]


@pytest.mark.parametrize("every", [1, 3])
def test_pairs_are_of_neighbouring_layers_and_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    seen: list[Any] = []

    def spied(*parts: Any) -> tuple[FloatArray, FloatArray]:
        seen.append(parts[:4])
        return np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32)

    monkeypatch.setattr("pipeline.calibration.gate_mlp.train_mlp", spied)
    pairs, taken = GatePairs(SHAPE, every), steps(4, 5)
    for x, own, ahead in taken:
        step(pairs, x, own, ahead)
    pairs.train(7, lambda: None)
    assert len(seen) == predicted_layers(SHAPE) == 2
    for layer, (x, ahead, own, seed) in enumerate(seen, start=1):
        wanted = [np.concatenate([s[part][at] for s in taken])[::every] for part, at in
                  ((0, layer - 1), (2, layer), (1, layer))]  # fmt: skip
        for found, right in zip((x, ahead, own), wanted, strict=True):
            np.testing.assert_array_equal(found, right)
        assert seed == 6 + layer


def test_a_model_of_one_layer_has_no_mlp() -> None:
    assert GatePairs(ModelShape(1, 6, 2, 2), 1).train(0, lambda: None) is None
