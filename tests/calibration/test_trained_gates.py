"""The trained gates: what they learn, and when they learn nothing."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from pipeline.arrays import FloatArray
from pipeline.calibration.trained_gates import (
    WIDTH,
    GateMlps,
    GatePairs,
    predicted_layers,
    train_first_gate,
    train_mlp,
)
from pipeline.engine.driver import LayerDecision
from pipeline.policies.calibration import Trajectory
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


def router(logits: FloatArray, layer: int = 0) -> Routing:
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
    blank = np.zeros((len(x), 4), np.float32)
    inner, outer, history = train_mlp(x[:1000], blank[:1000], ahead[:1000], own[:1000], seed=1)
    assert (inner.shape, outer.shape) == ((WIDTH, HIDDEN), (SHAPE.experts, WIDTH))
    mlps = GateMlps(inner[None], outer[None], history[None])
    before, after = (named(a[1000:], own[1000:]) for a in (ahead, ahead + mlps.logits(1, x, blank)))
    assert before < 0.6 < 0.7 < after


def test_what_only_the_trajectory_says_is_learnt() -> None:
    """The next layer's experts follow from those of the first layer alone."""
    random = np.random.default_rng(2)
    x, ahead = (random.standard_normal((1000, width)).astype(np.float32) for width in (HIDDEN, SHAPE.experts))
    first, width = random.integers(0, SHAPE.experts, (1000, 1)), 2 * SHAPE.experts
    trajectory = Trajectory(2, SHAPE.experts)
    trajectory.add(0, first.astype(np.int32), np.ones(first.shape, np.float32))
    own = 6 * np.eye(SHAPE.experts, dtype=np.float32)[(first[:, 0] + 1) % SHAPE.experts]
    parts = train_mlp(x[:800], trajectory.weights[:800], ahead[:800], own[:800], seed=1)
    assert parts[2].shape == (SHAPE.experts, width)
    added = GateMlps(*(part[None] for part in parts)).logits(1, x, trajectory.weights)
    wrong, right = (np.mean(a.argmax(1)[800:] == own.argmax(1)[800:]) for a in (ahead, ahead + added))
    assert wrong < 0.4 < 0.8 < right


def test_the_next_gate_stays_where_nothing_is_better() -> None:
    x, ahead, _ = rows(300)
    _, outer, history = train_mlp(x, x, ahead, ahead, seed=1)
    assert not outer.any()
    assert not history.any()


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

    def spied(*parts: Any) -> list[FloatArray]:
        seen.append(parts[:5])
        return [np.zeros((1, 1), np.float32)] * 3

    monkeypatch.setattr("pipeline.calibration.trained_gates.train_mlp", spied)
    pairs, taken = GatePairs(SHAPE, every), steps(4, 5)
    for x, own, ahead in taken:
        step(pairs, x, own, ahead)
    pairs.train(7, lambda: None)
    assert len(seen) == predicted_layers(SHAPE) == 2
    chosen = [[router(own).experts for own in s[1]] for s in taken]
    for layer, (x, trajectory, ahead, own, seed) in enumerate(seen, start=1):
        before = [np.concatenate([c[at] + at * SHAPE.experts for c in chosen]) for at in range(layer)]
        ones = [np.flatnonzero(row).tolist() for row in trajectory]
        assert ones == np.sort(np.concatenate(before, axis=1))[::every].tolist()
        wanted = [np.concatenate([s[part][at] for s in taken])[::every] for part, at in
                  ((0, layer - 1), (2, layer), (1, layer))]  # fmt: skip
        for found, right in zip((x, ahead, own), wanted, strict=True):
            np.testing.assert_array_equal(found, right)
        assert seed == 6 + layer


EXPERTS, WIDE, ROWS = 8, 48, 3000


def taught(noise: float, size: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, the logits that a linear teacher gives with noise on them, and the teacher [E, H]."""
    random = np.random.default_rng(seed)
    teacher = random.standard_normal((EXPERTS, WIDE)) * 2 / np.sqrt(WIDE)
    x = random.standard_normal((ROWS, WIDE))
    logits = x @ teacher.T + noise * random.standard_normal((ROWS, EXPERTS))
    return (size * x).astype(np.float32), logits.astype(np.float32), teacher


def held_out_accuracy(gate: np.ndarray, x: np.ndarray, logits: np.ndarray) -> float:
    """Share of the two largest logits of the last fifth of the rows that are the gate's two largest too."""
    rows = slice(-ROWS // 5, None)
    best, guess = (np.argsort(-each, axis=1)[:, :2] for each in (logits[rows], x[rows] @ gate.T))
    return float(np.mean([len({*a} & {*b}) / 2 for a, b in zip(best.tolist(), guess.tolist(), strict=True)]))


@pytest.mark.parametrize("size", [0.01, 30.0])
def test_linear_teacher_is_recovered(size: float) -> None:
    x, logits, teacher = taught(noise=0.0, size=size)
    found = train_first_gate(x, logits, seed=1)
    assert found.dtype == np.float32
    assert found.shape == (EXPERTS, WIDE)
    assert held_out_accuracy(found, x, logits) > 0.95
    # Up to a vector added to every expert's: softmax does not depend on it.
    wanted = (teacher - teacher.mean(axis=0)) / size
    assert np.abs(found - found.mean(axis=0) - wanted).max() < 0.1 * np.abs(wanted).max()


def test_noisy_teacher_is_recovered_by_the_same_seed_in_the_same_way() -> None:
    x, logits, _ = taught(noise=1.0)
    found, again, other = (train_first_gate(x, logits, seed) for seed in (1, 1, 2))
    untrained = np.random.default_rng(9).standard_normal((EXPERTS, WIDE)).astype(np.float32)
    accuracy = held_out_accuracy(found, x, logits)
    assert max(held_out_accuracy(untrained, x, logits), 2 / EXPERTS) + 0.3 < accuracy < 0.9
    np.testing.assert_array_equal(found, again)
    assert (found != other).any()


def test_training_stops_before_it_overfits_few_rows() -> None:
    random = np.random.default_rng(3)
    x = random.standard_normal((60, WIDE)).astype(np.float32)
    logits = 3 * random.standard_normal((60, EXPERTS)).astype(np.float32)  # nothing to learn
    found = train_first_gate(x, logits, seed=1)

    def divergence(gate: np.ndarray) -> float:
        truth, guess = (torch.from_numpy(a).log_softmax(dim=1) for a in (logits[-12:], x[-12:] @ gate.T))
        return float((truth.exp() * (truth - guess)).sum(dim=1).mean())

    assert divergence(found) <= divergence(np.zeros_like(found)) * (1 + 1e-6)


@pytest.mark.parametrize("rows", [(1, 1), (5, 4)])
def test_arrays_of_different_lengths_are_refused(rows: tuple[int, int]) -> None:
    x, logits, _ = taught(noise=0.0)
    with pytest.raises(ValueError, match="pairs of tokens"):
        train_first_gate(x[: rows[0]], logits[: rows[1]], seed=1)
