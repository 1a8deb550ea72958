"""Routing of a text that was never computed, for models that are not here: steps as a trace would hold them,
drawn from a few measured properties of routing.

A token's logits of a layer are a constant part, which makes some experts popular, and a part of its own,
which resembles that of the token before. The prediction from an earlier layer's x is off by an error that
grows with the distance. So the draws have the properties that policies live on: how far a cache of popular or
of recent experts hits, and how often a prediction is right. They do not have those of a certain text, such as
experts that are used for a passage and then never again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import FloatArray, Phase
from pipeline.policies.view import Routing
from pipeline.traces.trace import Header, LayerTrace, TracedStep, halves

SHARPNESS = 1.5  # factor on all logits: how uneven a token's weights are
BISECTIONS = 10
SAMPLE = 64  # tokens and layers from which the error of predictions is found


@dataclass(frozen=True)
class Skew:
    """A model's routing: how uneven and how predictable it is."""

    spread: float  # standard deviation of the constant part; that of a token's own part is 1
    persistence: float  # correlation of a token's own part with that of the token before
    accuracy: float  # share of the next layer's experts that its router finds from this layer's x


# Of the embedded model: on 790 tokens of held-out text the most used quarter of each layer's experts had 40 %
# of the uses, 45 % of a token's experts were used by the token before (25 % would be chance), and the next
# layer's router found 79 %. Draws with these numbers have 41, 46 and 79 %.
EMBEDDED = Skew(spread=0.45, persistence=0.42, accuracy=0.79)


class SyntheticText:
    """Draws texts of one model: all have the same popular experts. The same calls after the same seed give
    the same steps."""

    def __init__(self, header: Header, skew: Skew, seed: int = 0) -> None:
        shape = header.shape
        self._header, self._rng = header, np.random.default_rng(seed)
        self._popular = np.float32(skew.spread) * self._normal(shape.layers, shape.experts)
        self._persistence = np.float32(skew.persistence)
        self._error = np.float32(_error_of(skew, shape.experts, shape.top_k))
        self._number = self._sequence = 0  # of the next step and the next sequence

    def steps(self, prompt: int, chunk: int, tokens: int, batch: int = 1) -> list[TracedStep]:
        """`batch` prompts of `prompt` tokens, each in steps of at most `chunk`, then `tokens` steps of decode
        with a row of each."""
        sequences = tuple(range(self._sequence, self._sequence + batch))
        self._sequence += batch
        chunks = [(s, min(chunk, prompt - begin)) for s in sequences for begin in range(0, prompt, chunk)]
        made = [self._step("prefill", (s,) * rows, self._logits(rows, 1)[:, 0]) for s, rows in chunks]
        return made + [self._step("decode", sequences, logits) for logits in self._logits(tokens, batch)]

    def counts(self, tokens: int) -> NDArray[np.int64]:
        """The rows [L, E] that use each expert in a text of so many tokens."""
        shape = self._header.shape
        logits = self._logits(tokens, 1)[:, 0].transpose(1, 0, 2)  # [L, tokens, E]
        routed = [self._header.router(own, layer) for layer, own in enumerate(logits)]
        return np.stack([routing.workload(shape.experts) for routing in routed]).astype(np.int64)

    def _logits(self, tokens: int, sequences: int) -> FloatArray:
        """[tokens, sequences, L, E]"""
        shape = self._header.shape
        own = self._normal(tokens, sequences, shape.layers, shape.experts)
        fresh = np.sqrt(1 - self._persistence**2)
        for token in range(1, tokens):
            own[token] = self._persistence * own[token - 1] + fresh * own[token]
        logits: FloatArray = np.float32(SHARPNESS) * (own + self._popular)
        return logits

    def _step(self, phase: Phase, sequences: tuple[int, ...], logits: FloatArray) -> TracedStep:
        """`logits` [R, L, E]."""
        header, rows = self._header, len(sequences)
        layers, experts = logits.shape[1:]
        by_layer = np.ascontiguousarray(logits.transpose(1, 0, 2))  # [L, R, E]
        routed = header.router(by_layer.reshape(layers * rows, experts), np.arange(layers).repeat(rows))
        chosen = routed.experts.reshape(layers, rows, -1)
        weights = routed.weights.reshape(layers, rows, -1)
        own, ahead, noise = halves(by_layer), [], np.zeros_like(by_layer)
        for distance in range(1, header.predictions(0) + 1):
            noise += np.float32(SHARPNESS) * self._error * self._normal(*by_layer.shape)
            ahead.append(halves(by_layer[distance:] + noise[distance:]))
        made = []
        for layer in range(layers):
            routing = Routing(chosen[layer], weights[layer])
            predictions = tuple(ahead[d][layer] for d in range(header.predictions(layer)))
            made.append(LayerTrace(routing, own[layer], predictions, None))
        self._number += 1
        return TracedStep(self._number - 1, phase, sequences, tuple(made))

    def _normal(self, *shape: int) -> FloatArray:
        return self._rng.standard_normal(shape, np.float32)


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
