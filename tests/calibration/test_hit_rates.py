"""Hit rates by the size of a cache, against a simulation of each cache by itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.arrays import FloatArray, Phase
from pipeline.calibration.observers import TokenOrder
from pipeline.engine.driver import LayerDecision
from pipeline.policies.split import OMEGA, RHO
from pipeline.policies.view import Gated, ModelShape, Routing, Signals

Step = tuple[Phase, list[list[list[int]]]]  # its phase, experts [L][rows][k]


@dataclass
class Shown:
    """Shows steps of several sequences to an observer."""

    order: TokenOrder
    shape: ModelShape

    def step(self, phase: Phase, sequences: tuple[int, ...], experts: np.ndarray) -> None:
        self.order.begin(phase, sequences)
        nothing: FloatArray = np.zeros((len(sequences), 1), np.float32)
        for layer in range(self.shape.layers):
            routing = Routing(experts[layer], np.ones(experts[layer].shape, np.float32))
            signals, cut = Signals(None, {}), np.zeros(self.shape.experts, np.int32)
            self.order.layer(LayerDecision(layer, signals, Gated.from_router(routing), cut, cut), nothing)
        self.order.end()


def simulated(steps: list[Step], layer: int, size: int, experts: int) -> tuple[int, int]:
    """Hits and uses of decode's second half in a cache that holds the `size` experts of the highest
    priority."""
    rows, last, hits, uses = [0] * experts, [0] * experts, 0, 0
    decoded = [now for now, (phase, _) in enumerate(steps) if phase == "decode"]
    counted = decoded[len(decoded) // 2 :]
    for now, (_, by_layer) in enumerate(steps):
        active = sorted({expert for row in by_layer[layer] for expert in row})

        def priority(expert: int) -> float:
            if not rows[expert]:
                return -1.0
            recent = RHO ** ((now - last[expert]) / OMEGA)  # noqa: B023
            return rows[expert] * recent

        # of equal ones the smaller index; rounded, because the logarithms are compared elsewhere
        held = sorted(range(experts), key=lambda e: (-round(priority(e), 9), e))[:size]
        if now in counted:
            uses += len(active)
            hits += len(set(active) & set(held))
        for row in by_layer[layer]:
            for expert in row:
                rows[expert] += 1
        for expert in active:
            last[expert] = now + 1
    return hits, uses


@settings(max_examples=40)
@given(data=st.data())
def test_hit_rates_are_those_of_each_cache(data: st.DataObject) -> None:
    experts, k, layers = data.draw(st.integers(2, 6)), 2, 2
    shape = ModelShape(layers, experts, 1, k)
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    order = TokenOrder(shape)
    shown, seen = Shown(order, shape), {0: [], 1: []}  # type: ignore[var-annotated]

    def show(phase: Phase, sequences: tuple[int, ...]) -> None:
        drawn = np.argsort(rng.random((layers, len(sequences), experts)), axis=2)[:, :, :k].astype(np.int32)
        shown.step(phase, sequences, drawn)
        for sequence in dict.fromkeys(sequences):
            its = [i for i, one in enumerate(sequences) if one == sequence]
            seen[sequence].append((phase, drawn[:, its].tolist()))

    show("prefill", (0, 0, 0))
    show("prefill", (1, 1))
    for _ in range(data.draw(st.integers(1, 12))):
        show("decode", (0, 1))
    decoded = [by_layer for steps in seen.values() for phase, by_layer in steps if phase == "decode"]
    for layer, counts in enumerate(order.decode_counts()):
        used = np.concatenate([by_layer[layer] for by_layer in decoded]).ravel()
        np.testing.assert_array_equal(counts, np.bincount(used, minlength=experts))
    rates = order.hit_rates()
    assert rates.shape == (layers, experts + 1)
    for layer in range(layers):
        for size in range(experts + 1):
            hits, uses = simulated(seen[0] + seen[1], layer, size, experts)
            assert rates[layer, size] == pytest.approx(hits / uses, abs=1e-6), (layer, size)
