"""Routing of a text that was never computed, for models that are not here: steps as a trace would hold them,
drawn from a few measured properties of routing.

A token's logits of a layer are a constant part, which makes some experts popular, a part of its text, which
makes others hot as long as that text lasts, and a part of its own, which resembles that of the token before.
The prediction from an earlier layer's x is off by an error that grows with the distance. So the draws have
the properties that policies live on: how far a cache of popular or of recent experts hits, how much of that
another text takes away, and how often a prediction is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    # correlation of a token's own part with that of the token before; several: from the first layer to the
    # last one, at even distances
    persistence: float | tuple[float, ...]
    accuracy: float  # share of the next layer's experts that its router finds from this layer's x
    topic: float = 0.0  # standard deviation of a text's part


# Of the embedded model: on 790 tokens of held-out text the most used quarter of each layer's experts had 40 %
# of the uses, 45 % of a token's experts were used by the token before (25 % would be chance), and the next
# layer's router found 79 %. Draws with these numbers have 41, 46 and 79 %.
EMBEDDED = Skew(spread=0.45, persistence=0.42, accuracy=0.79)

# Of models as they were published, by the names of `pipeline/assets/shapes.json` where it has them. What was
# published, and how near the draws come, is in tests/traces/test_profiles.py. The accuracies are DAOP's for
# Mixtral and DALI's, with its correction, for Qwen3; no others are published.
PROFILES = {
    "mixtral-8x7b": Skew(0.05, (0.0, 0.29, 0.08), 0.841, topic=0.1),
    "qwen3-30b-a3b": Skew(0.8, 0.3, 0.933, topic=1.0),
    "qwen3.8-flash-next": Skew(0.2, 0.75, 0.85, topic=0.68),  # many texts of many kinds
    "qwen3.8-flash-next-cold": Skew(0.25, 0.45, 0.85, topic=0.3),  # another run: one text of 300 tokens
    "gemma-4-26b-a4b": Skew(0.75, 0.35, 0.85, topic=0.9),
    "olmoe-1b-7b": Skew(0.35, 0.3, 0.85, topic=0.25),
}

TEXT = 256  # tokens of each of the texts that experts are counted over, where texts differ


class SyntheticText:
    """Draws texts of one model: all have the same popular experts, and each its own hot ones. The same calls
    after the same seed give the same steps."""

    def __init__(self, header: Header, skew: Skew, seed: int = 0) -> None:
        shape = header.shape
        self.header, self._rng = header, np.random.default_rng(seed)
        self._popular = np.float32(skew.spread) * self._normal(shape.layers, shape.experts)
        known, depth = np.atleast_1d(skew.persistence), np.linspace(0, 1, shape.layers)
        by_layer = np.interp(depth, np.linspace(0, 1, len(known)), known)
        self._persistence = by_layer[:, None].astype(np.float32)  # [L, 1]
        self._topic = np.float32(skew.topic)
        self._error = np.float32(_error_of(skew, shape.experts, shape.top_k))
        self._number = self._sequence = 0  # of the next step and the next sequence

    def steps(self, prompt: int, chunk: int, tokens: int, batch: int = 1) -> list[TracedStep]:
        """`batch` prompts of `prompt` tokens, each in steps of at most `chunk`, then `tokens` steps of decode
        with a row of each."""
        sequences = tuple(range(self._sequence, self._sequence + batch))
        self._sequence += batch
        topics = self._topics(batch)
        made = []
        for index, sequence in enumerate(sequences):
            for begin in range(0, prompt, chunk):
                rows = min(chunk, prompt - begin)
                logits = self._logits(rows, topics[index : index + 1])[:, 0]
                made.append(self._step("prefill", (sequence,) * rows, logits))
        return made + [self._step("decode", sequences, logits) for logits in self._logits(tokens, topics)]

    def counts(self, tokens: int) -> NDArray[np.int64]:
        """The rows [L, E] that use each expert in so many tokens, where texts differ of several ones."""
        shape = self.header.shape
        texts = -(-tokens // TEXT) if self._topic else 1
        drawn = self._logits(-(-tokens // texts), self._topics(texts))
        logits = drawn.reshape(-1, shape.layers, shape.experts)[:tokens].transpose(1, 0, 2)  # [L, tokens, E]
        routed = [self.header.router(own, layer) for layer, own in enumerate(logits)]
        return np.stack([routing.workload(shape.experts) for routing in routed]).astype(np.int64)

    def _topics(self, texts: int) -> FloatArray:
        """The logits that each text adds, [texts, L, E]."""
        shape = self.header.shape
        if not self._topic:
            return np.zeros((texts, shape.layers, shape.experts), np.float32)
        return self._topic * self._normal(texts, shape.layers, shape.experts)

    def _logits(self, tokens: int, topics: FloatArray) -> FloatArray:
        """[tokens, sequences, L, E], with a sequence of each of the topics."""
        own = self._normal(tokens, *topics.shape)
        fresh = np.sqrt(1 - self._persistence**2)
        for token in range(1, tokens):
            own[token] = self._persistence * own[token - 1] + fresh * own[token]
        logits: FloatArray = np.float32(SHARPNESS) * (own + (self._popular + topics))
        return logits

    def _step(self, phase: Phase, sequences: tuple[int, ...], logits: FloatArray) -> TracedStep:
        """`logits` [R, L, E]."""
        header, rows = self.header, len(sequences)
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


@dataclass(frozen=True)
class DrawnTrace:
    """Routing in a `Trace`'s place that was drawn."""

    path: Path  # what it is of, for a person
    header: Header
    drawn: Sequence[TracedStep]
    counts: NDArray[np.int64]  # [L, E] rows that used each expert in other texts
    cut_short = False

    def steps(self) -> Iterator[TracedStep]:
        """The steps in order."""
        yield from self.drawn


def _error_of(skew: Skew, experts: int, top_k: int) -> float:
    """The standard deviation of a prediction's error with which it finds `skew.accuracy` of the experts."""
    rng = np.random.default_rng(1)
    logits = np.hypot(skew.spread, skew.topic) * rng.standard_normal((SAMPLE, experts)) + rng.standard_normal(
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
