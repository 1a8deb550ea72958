"""Train and validation passes over steps with several sequences, any k, and weights of 0, against plain
loops."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.arrays import FloatArray, Phase
from pipeline.calibration.observers import DROPS, LIMITS, TrainPass, ValidationPass
from pipeline.calibration.trained_gates import GateMlps
from pipeline.engine.driver import LayerDecision
from pipeline.engine.observer import Observer
from pipeline.policies.view import Gated, ModelShape, Routing, Signals

HIDDEN = 5


@dataclass(frozen=True)
class Step:
    phase: Phase
    sequences: tuple[int, ...]
    x: FloatArray  # [L, R, H]


class World:
    """A model's routers, and a router's rule: the k largest logits, of which the negative ones weigh 0."""

    def __init__(self, layers: int, experts: int, k: int, seed: int) -> None:
        self.shape = ModelShape(layers, experts, 1, k)
        self.random = np.random.default_rng(seed)
        self.gates = self.random.standard_normal((layers, experts, HIDDEN)).astype(np.float32)

    def route(self, logits: FloatArray, layer: int = 0) -> Routing:
        experts = np.argsort(-logits, axis=1, kind="stable")[:, : self.shape.top_k].astype(np.int32)
        weights = np.maximum(np.take_along_axis(logits, experts, axis=1), 0)
        weights[:, 0] = 1
        return Routing(experts, weights)

    def steps(self, sequences: int) -> list[Step]:
        """Each sequence's prompt in two steps, then three tokens of all of them together."""

        def step(phase: Phase, rows: tuple[int, ...]) -> Step:
            shape = (self.shape.layers, len(rows), HIDDEN)
            return Step(phase, rows, self.random.standard_normal(shape).astype(np.float32))

        prompts = [step("prefill", (n,) * count) for n in range(sequences) for count in (4, 1 + n)]
        return prompts + [step("decode", tuple(range(sequences))) for _ in range(3)]

    def show(self, step: Step, observer: Observer) -> None:
        observer.begin(step.phase, step.sequences)
        nothing = np.zeros(self.shape.experts, np.int32)
        for layer, x in enumerate(step.x):
            logits = x @ self.gates[layer].T
            probes = {to: x @ self.gates[to].T for to in observer.probes(layer)}
            gated = Gated.from_router(self.route(logits))
            lent = x.copy()
            decision = LayerDecision[object](layer, Signals(logits, probes), gated, nothing, nothing)
            observer.layer(decision, lent)
            for array in (lent, logits, *probes.values()):
                array[:] = np.nan  # they are valid during the call only
        observer.end()

    def used(self, layer: int, x: FloatArray) -> set[int]:
        """A token's experts."""
        routing = self.route((x @ self.gates[layer].T)[None])
        return {int(e) for e, w in zip(routing.experts[0], routing.weights[0], strict=True) if w}

    def kept(self, logits: FloatArray, limit: float) -> set[int]:
        """A token's experts of weight, without the smallest ones, up to this share of all."""
        routing = self.route(logits[None])
        experts, weights = routing.experts[0].tolist(), routing.weights[0].astype(float).tolist()
        ranked = sorted(reversed(range(len(experts))), key=weights.__getitem__)
        dropped, kept = 0.0, []
        for slot in ranked:
            dropped += weights[slot]
            if slot == ranked[-1] or dropped / sum(sorted(weights)) > limit:
                kept.append(slot)
        return {experts[slot] for slot in kept if weights[slot]}

    def named(self, logits: FloatArray) -> set[int]:
        return set(self.route(logits[None]).experts[0].tolist())


worlds = st.builds(
    World,
    layers=st.integers(1, 3),
    experts=st.integers(4, 6),
    k=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)


def texts(steps: list[Step], sequences: int) -> list[list[tuple[Phase, FloatArray]]]:
    """Of each sequence its tokens in order: phase and x [L, H]."""
    found: list[list[tuple[Phase, FloatArray]]] = [[] for _ in range(sequences)]
    for step in steps:
        for row, sequence in enumerate(step.sequences):
            found[sequence].append((step.phase, step.x[:, row]))
    return found


@given(world=worlds, sequences=st.integers(1, 3), every=st.integers(1, 3))
@settings(max_examples=40)
def test_train_pass_equals_plain_loops(world: World, sequences: int, every: int) -> None:
    steps, shape = world.steps(sequences), world.shape
    learner = TrainPass(shape, HIDDEN, every)
    for step in steps:
        world.show(step, learner)
    read = texts(steps, sequences)
    every_x = np.array([x for tokens in read for _, x in tokens])  # [T, L, H]
    np.testing.assert_allclose(learner.residuals(), np.diff(every_x.mean(axis=0), axis=0), atol=1e-5)
    # Neighbours in a text: of every so many pairs one is kept, of any sequence.
    pairs = {
        before[-1].tobytes(): after[0] @ world.gates[0].T
        for tokens in read
        for (_, before), (_, after) in pairwise(tokens)
    }
    last, logits = learner.pairs()
    for x, row in zip(last, logits, strict=True):
        np.testing.assert_allclose(row, pairs[x.tobytes()], atol=1e-4)
    assert len(last) == len({x.tobytes() for x in last}) == -(-len(pairs) // every)


@given(world=worlds, sequences=st.integers(1, 3), gated=st.booleans())
@settings(max_examples=40)
def test_validation_pass_equals_plain_loops(world: World, sequences: int, gated: bool) -> None:
    steps, shape = world.steps(sequences), world.shape
    residuals = world.random.standard_normal((shape.layers - 1, shape.experts)).astype(np.float32)
    first = world.random.standard_normal((shape.experts, HIDDEN)).astype(np.float32) if gated else None
    mlps = None
    if gated and shape.layers > 1:
        sizes = (1, 7, HIDDEN), (1, shape.experts, 7), (1, shape.experts, shape.experts)
        mlps = GateMlps(*(world.random.standard_normal(s).astype(np.float32) for s in sizes))
    checker = ValidationPass(shape, world.route, residuals, first, mlps)
    for step in steps:
        world.show(step, checker)
    predictors = ("raw", "residual", "first", "mlp")
    hits: dict[str, list[list[bool]]] = {name: [[] for _ in range(shape.layers)] for name in predictors}
    for tokens in texts(steps, sequences):
        for place, (_, x) in enumerate(tokens):
            for layer in range(shape.layers):
                used = world.used(layer, x[layer])
                if layer > 0:
                    raw = world.gates[layer] @ x[layer - 1]
                    hits["raw"][layer] += [e in world.named(raw) for e in used]
                    corrected = world.named(raw + residuals[layer - 1])
                    hits["residual"][layer] += [e in corrected for e in used]
                    if layer == 1 and mlps is not None:
                        chosen = world.route((world.gates[0] @ x[0])[None], 0)
                        history = np.zeros((1, shape.experts), np.float32)
                        history[0, chosen.experts[0]] = chosen.weights[0]
                        named = world.named(raw + mlps.logits(1, x[:1], history)[0])
                        hits["mlp"][1] += [e in named for e in used]
                elif first is not None and place > 0:
                    named = world.named(first @ tokens[place - 1][1][-1])
                    hits["first"][layer] += [e in named for e in used]
    for name, found in checker.accuracy().items():
        expected = [np.mean(layer) if layer else 0 for layer in hits[name]]
        np.testing.assert_allclose(found, expected, atol=1e-6)
    if mlps is None:
        assert checker.mlp_accuracy() is None
    else:
        assert checker.mlp_accuracy() == pytest.approx([np.mean(hits["mlp"][1])])
    decoded = [x for tokens in texts(steps, sequences) for phase, x in tokens if phase == "decode"]
    assert [len(np.concatenate(layer)) for layer in checker.weights] == [len(decoded)] * shape.layers


@given(world=worlds, sequences=st.integers(1, 3), step=st.sampled_from([0, 1, 9, 20, 40, DROPS - 1]))
@settings(max_examples=40)
def test_validation_pass_counts_what_gates_leave(world: World, sequences: int, step: int) -> None:
    """Of decoded tokens alone, whose predictions are gated as they are."""
    steps, shape = world.steps(sequences), world.shape
    residuals = world.random.standard_normal((shape.layers - 1, shape.experts)).astype(np.float32)
    first = world.random.standard_normal((shape.experts, HIDDEN)).astype(np.float32)
    checker = ValidationPass(shape, world.route, residuals, first)
    for one in steps:
        world.show(one, checker)
    limit = LIMITS[step]  # no share equals one by chance, but for 0
    counts = np.zeros((shape.layers, shape.top_k + 1))
    hits = {name: np.zeros(shape.layers) for name in ("raw", "residual", "first")}
    for tokens in texts(steps, sequences):
        for (_, before), (phase, x) in pairwise(tokens):
            if phase == "prefill":
                continue
            for layer in range(shape.layers):
                kept = world.kept(world.gates[layer] @ x[layer], limit)
                counts[layer, len(kept)] += 1
                if layer == 0:
                    hits["first"][0] += len(kept & world.kept(first @ before[-1], limit))
                    continue
                raw = world.gates[layer] @ x[layer - 1]
                hits["raw"][layer] += len(kept & world.kept(raw, limit))
                hits["residual"][layer] += len(kept & world.kept(raw + residuals[layer - 1], limit))
    tokens_read = counts.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(checker.drops.kept()[:, step], counts / tokens_read, atol=1e-6)
    asked = counts @ np.arange(shape.top_k + 1)
    for name, table in checker.drops.accuracy().items():
        np.testing.assert_allclose(table[:, step], hits[name] / asked, atol=1e-6)
