"""The sizes of a prefill chunk, by trials on an engine with a clock of the test."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from test_models import GOOD

from pipeline.backbone.kv_cache import KVCache
from pipeline.config import KV_BLOCK
from pipeline.memory.needs import CHUNK_MAX
from pipeline.models.registry import model_spec
from pipeline.serving import engine_parts
from pipeline.serving.engine_parts import measure_chunks


@pytest.mark.parametrize(
    ("seconds", "context", "trials", "chunk", "alone"),
    [
        ((0.2, 0.1, 0.3), 4096, 3, 128, 1024),  # by the fastest: 64 tokens in 0.1 s are 160 in 0.25 s
        ((0.1, 0.2, 0.25), 4096, 3, 128, 1024),
        ((0.6, 0.5, 0.1), 4096, 2, 32, 256),  # no third trial after a second
        ((1.5,), 4096, 1, 16, 128),  # a chunk has 16 tokens or more
        ((0.001,) * 3, 4096, 3, CHUNK_MAX, CHUNK_MAX),
        ((0.001,) * 3, 200, 3, 200, 200),
        ((0.1,) * 3, 200, 3, 128, 200),
        ((0.125,) * 3, 32, 3, 32, 32),  # a trial has no more tokens than the context
    ],
)
def test_chunk_takes_a_quarter_of_a_second(monkeypatch, seconds, context, trials, chunk, alone) -> None:
    spec = model_spec(GOOD)
    kv = KVCache(spec, torch.float32, torch.device("cpu"), min(64, context))
    now, steps = [10.0], []

    def step(inputs, phase) -> None:
        (item,) = inputs
        assert (phase, item.logits, item.span.kv.capacity) == ("prefill", "none", KV_BLOCK)
        now[0] += seconds[len(steps)]
        steps.append(item.span.tokens)

    monkeypatch.setattr(engine_parts, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    engine = SimpleNamespace(backbone=SimpleNamespace(facts=spec), step=step)
    assert measure_chunks(engine, kv, context) == (chunk, alone)
    assert len(steps) == trials
    assert {len(tokens) for tokens in steps} == {min(64, context)}
    assert (steps[0][0], steps[0][-1]) == (0, spec.vocabulary - 1)  # the whole vocabulary
    assert kv.used == 0
