"""Routing of a text that was never computed, for models that are not here: steps as a trace would hold them,
drawn from a few measured properties of routing.

A token's logits of a layer are a constant part, which makes some experts popular, and a part of its own,
which resembles that of the token before. The prediction from an earlier layer's x is off by an error that
grows with the distance. So the draws have the properties that policies live on: how far a cache of popular or
of recent experts hits, and how often a prediction is right. They do not have those of a certain text, such as
experts that are used for a passage and then never again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import FloatArray, Phase
from pipeline.policies.view import Routing
from pipeline.traces.header import Header
from pipeline.traces.steps import LayerTrace, TracedStep, halves

SHARPNESS = 1.5  # factor on all logits: how uneven a token's weights are
BISECTIONS = 10
SAMPLE = 64  # tokens and layers from which the error of predictions is found


@dataclass(frozen=True)
class Skew:
    """How uneven and how predictable a model's routing is."""

    spread: float  # standard deviation of the constant part; that of a token's own part is 1
    persistence: float  # correlation of a token's own part with that of the token before
    accuracy: float  # share of the next layer's experts that its router finds from this layer's x


# Of the embedded model: on 790 tokens of held-out text the most used quarter of each layer's experts had 40 %
# of the uses, 45 % of a token's experts were used by the token before (25 % would be chance), and the next
# layer's router found 79 %. Draws with these numbers have 41, 46 and 79 %.
EMBEDDED = Skew(spread=0.45, persistence=0.42, accuracy=0.79)


def synthetic_steps(
    header: Header, skew: Skew, *, prompt: int, chunk: int, tokens: int, batch: int = 1, seed: int = 0
) -> list[TracedStep]:
    """One prompt of `prompt` tokens in steps of `chunk`, then `tokens` steps of decode, each with a row for
    each of `batch` sequences. The same arguments give the same steps."""
    rng = np.random.default_rng(seed)
    shape = header.shape
    popular = skew.spread * rng.standard_normal((shape.layers, shape.experts), np.float32)
    error = _error_of(skew, shape.experts, shape.top_k)
    drawn = _Draws(header, popular, skew.persistence, error, rng)
    steps: list[TracedStep] = []
    for begin in range(0, prompt, chunk):
        rows = min(chunk, prompt - begin)
        steps.append(drawn.step(len(steps), "prefill", (0,) * rows, drawn.text(rows, 1)[:, 0]))
    own = drawn.text(tokens, batch)  # [tokens, batch, L, E]
    steps += [
        drawn.step(len(steps) + i, "decode", tuple(range(batch)), logits) for i, logits in enumerate(own)
    ]
    return steps


class _Draws:
    """Logits, and steps made of them."""

    def __init__(
        self,
        header: Header,
        popular: FloatArray,
        persistence: float,
        error: float,
        rng: np.random.Generator,
    ) -> None:
        self._header, self._popular, self._error, self._rng = header, popular, error, rng
        self._persistence = persistence

    def text(self, tokens: int, sequences: int) -> FloatArray:
        """Logits [tokens, sequences, L, E]."""
        shape = self._header.shape
        own = self._rng.standard_normal((tokens, sequences, shape.layers, shape.experts), np.float32)
        fresh = np.float32((1 - self._persistence**2) ** 0.5)
        for token in range(1, tokens):
            own[token] = np.float32(self._persistence) * own[token - 1] + fresh * own[token]
        return own + self._popular

    def step(
        self, number: int, phase: Phase, sequences: Sequence[int], logits: NDArray[np.float32]
    ) -> TracedStep:
        """`logits` [R, L, E]."""
        header, rows = self._header, len(sequences)
        layers, experts = logits.shape[1:]
        by_layer = np.ascontiguousarray(logits.transpose(1, 0, 2))  # [L, R, E]
        routed = header.router(SHARPNESS * by_layer.reshape(layers * rows, experts))
        chosen = routed.experts.reshape(layers, rows, -1)
        weights = routed.weights.reshape(layers, rows, -1)
        own = halves(SHARPNESS * by_layer)
        ahead: list[NDArray[Any]] = []
        noise = np.zeros_like(by_layer)
        for distance in range(1, min(header.depth, layers - 1) + 1):
            noise = noise + self._error * self._rng.standard_normal(by_layer.shape, np.float32)
            ahead.append(halves(SHARPNESS * (by_layer[distance:] + noise[distance:])))
        made = []
        for layer in range(layers):
            routing = Routing(chosen[layer], weights[layer])
            predictions = tuple(ahead[d][layer] for d in range(header.predictions(layer)))
            made.append(LayerTrace(routing, routing, False, None, own[layer], predictions, None))
        return TracedStep(number, phase, tuple(sequences), tuple(made))


def _error_of(skew: Skew, experts: int, top_k: int) -> float:
    """The standard deviation of a prediction's error with which it finds `skew.accuracy` of the experts."""
    rng = np.random.default_rng(1)
    logits = skew.spread * rng.standard_normal((SAMPLE, experts)) + rng.standard_normal(
        (SAMPLE, SAMPLE, experts)
    )
    noise = rng.standard_normal(logits.shape)
    true = _chosen(logits, top_k)

    def accuracy(error: float) -> float:
        return float((_chosen(logits + error * noise, top_k) & true).sum() / true.sum())

    low, high = 0.0, 4.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if accuracy(middle) > skew.accuracy else (low, middle)
    return (low + high) / 2


def _chosen(logits: NDArray[np.float64], top_k: int) -> NDArray[np.bool_]:
    limit = -np.partition(-logits, top_k - 1, axis=-1)[..., top_k - 1 : top_k]
    chosen: NDArray[np.bool_] = logits >= limit
    return chosen
