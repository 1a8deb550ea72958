"""The sizes of a prefill chunk, by trials on an engine with a clock of the test."""

from __future__ import annotations

from collections.abc import Sequence
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


def measured(patch: pytest.MonkeyPatch, seconds: Sequence[float], context: int, moves: bool):
    """What is measured where trials take these seconds, and the tokens of each. `moves`: experts are moved to
    the device."""
    spec = model_spec(GOOD)
    kv = KVCache(spec, torch.float32, torch.device("cpu"), CHUNK_MAX)
    now, steps = [10.0], []

    def step(inputs, phase) -> None:
        (item,) = inputs
        assert (phase, item.logits) == ("prefill", "none")
        assert item.span.kv.capacity == -(-len(item.span.tokens) // KV_BLOCK) * KV_BLOCK
        now[0] += seconds[len(steps)]
        steps.append(item.span.tokens)

    patch.setattr(engine_parts, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    policy = SimpleNamespace(uses_device=moves)
    engine = SimpleNamespace(backbone=SimpleNamespace(facts=spec), step=step, policy=policy)
    chunks = measure_chunks(engine, kv, context)
    assert {(tokens[0], tokens[-1]) for tokens in steps} == {(0, spec.vocabulary - 1)}  # all of it
    assert kv.used == 0
    return chunks, [len(tokens) for tokens in steps]


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
    chunks, tokens = measured(monkeypatch, seconds, context, moves=False)
    assert chunks == (chunk, alone)
    assert tokens == [min(64, context)] * trials


@pytest.mark.parametrize(
    ("seconds", "context", "trials", "alone"),
    [
        ((0.6, 0.5, 0.7, 0.7), 4096, [256, 512], CHUNK_MAX),  # as long for twice as many tokens
        ((0.6, 0.5, 0.7, 1.1), 4096, [256, 512], 512),  # 1024 tokens might take longer than two seconds
        ((0.6, 0.5, 1.1), 4096, [256], 256),
        ((0.6, 0.5, 0.7), 400, [256], 400),
        ((0.1, 0.1, 0.1), 4096, [], CHUNK_MAX),
    ],
)
def test_a_lone_requests_chunk_grows_while_that_takes_no_longer(
    monkeypatch, seconds, context, trials, alone
) -> None:
    (_, found), tokens = measured(monkeypatch, seconds, context, moves=True)
    assert found == alone
    assert tokens[tokens.count(64) :] == trials
