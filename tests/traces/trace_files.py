"""Traces for tests: routings from random router logits, or given by a test."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipeline.arrays import FloatArray, Phase
from pipeline.models.routing import Softmax
from pipeline.policies.view import ModelShape, Router, Routing
from pipeline.traces.trace import Header, LayerTrace, TracedStep, encode_step, halves

FINGERPRINT = "0123456789abcdef" * 4


def make_header(shape: ModelShape, depth: int = 3, router: Router | None = None) -> Header:
    router = router or Softmax(shape.top_k, rescaled=True)
    return Header("/models/one", FINGERPRINT, FINGERPRINT, shape, 1000, router, depth)


def drawn_step(header: Header, rng: np.random.Generator, number: int, rows: int, phase: Phase) -> TracedStep:
    """Correlated logits: predictions of later layers are mostly right, and some experts are popular."""
    shape = header.shape
    popular = np.random.default_rng(7).normal(size=(shape.layers, 1, shape.experts))
    own = (popular + rng.normal(size=(shape.layers, rows, shape.experts))).astype(np.float32)
    layers = []
    for layer in range(shape.layers):
        logits = own[layer].astype(np.float16).astype(np.float32)
        routing = header.router(logits, layer)
        noise = rng.normal(scale=0.3, size=(header.predictions(layer), rows, shape.experts))
        predictions = tuple(
            halves((own[layer + 1 + ahead] + noise[ahead]).astype(np.float32))
            for ahead in range(header.predictions(layer))
        )
        layers.append(LayerTrace(routing, halves(logits), predictions, None))
    return TracedStep(number, phase, tuple(range(rows)), tuple(layers))


def drawn_steps(header: Header, prompt: int, tokens: int) -> list[TracedStep]:
    """A prompt in one step, then decoded tokens one by one."""
    rng = np.random.default_rng(3)
    steps = [drawn_step(header, rng, 0, prompt, "prefill")] if prompt else []
    for _ in range(tokens):
        steps.append(drawn_step(header, rng, len(steps), 1, "decode"))
    return steps


def scripted_steps(
    header: Header, steps: Sequence[Sequence[Sequence[int]]], phase: Phase = "decode"
) -> list[TracedStep]:
    """steps[s][layer]: the experts that one row uses, the first most. All predictions are right."""
    made = []
    for number, experts in enumerate(steps):
        logits = [halves(logits_for(header, chosen)) for chosen in experts]
        layers = []
        for layer, own in enumerate(logits):
            routing = header.router(own.astype(np.float32), layer)
            following = tuple(logits[layer + 1 : layer + 1 + header.predictions(layer)])
            layers.append(LayerTrace(routing, own, following, None))
        made.append(TracedStep(number, phase, (0,), tuple(layers)))
    return made


def in_order(*texts: Sequence[TracedStep]) -> list[TracedStep]:
    """Texts one after the other, each with sequences of its own."""
    steps = [(number << 8, step) for number, text in enumerate(texts) for step in text]
    return [
        replace(step, number=number, sequences=tuple(first + sequence for sequence in step.sequences))
        for number, (first, step) in enumerate(steps)
    ]


def logits_for(header: Header, chosen: Sequence[int]) -> FloatArray:
    """float32 [1, E] from which a router takes these, each half as probable as the one before."""
    logits = np.full((1, header.shape.experts), -20, np.float32)
    for place, expert in enumerate(chosen):
        logits[0, expert] = -place * np.log(2)
    return logits


def write_trace(path: Path, header: Header, steps: Iterable[TracedStep]) -> Path:
    path.write_bytes(header.encode() + b"".join(encode_step(step) for step in steps))
    return path


def equal(a: Routing, b: Routing) -> bool:
    return np.array_equal(a.experts, b.experts) and np.array_equal(a.weights, b.weights)
