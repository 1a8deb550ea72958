"""Every family of transformers runs as transformers runs it: from a saved tiny checkpoint, with and without
workers, under some of the exact policies each.

All families are `make survey`; a sample of them is in every run of the tests.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from comparison import ALONE, Tokens, check_policies, exactly, within
from exact_presets import costs
from oracle import EXACT, Oracle
from rounding import Rounding
from tiny_families import FAMILIES, described, tiny_config, tiny_model

from pipeline.checkpoint.open import open_model
from pipeline.config import EngineConfig
from pipeline.models import facts

pytestmark = pytest.mark.survey
TEXTS = ((5, 3), (7, 11))  # of the texts, how tokens follow from places
CHUNK = 12  # so that a prefill takes several chunks
NEW = 8  # tokens of a greedy continuation
POLICIES = [(name, dict[str, str]()) for name in ("all-host", "on-demand", "fiddler", "layerwise", "tandem")]
# One that has a description of ours; test_families.py takes all of those, and gpt-oss, through more.
SAMPLE = ("qwen3_moe", "gemma4", "nemotron_h", "granitemoehybrid", "ernie4_5_vl_moe")
# Sparse attention chooses this many tokens or blocks. Of equal scores the choice depends on the chunks, so
# that transformers' own forward in chunks gives something else: here all tokens are chosen.
CHOSEN = ("index_topk", "index_topk_blocks", "indexer_budget")
ENLARGING = {"bailing_hybrid"}  # with random weights, of rounding: by more than EXACT
SINKS = "mimo_v2_flash"  # a family whose windows have them, on the generic backbone
BF16_NOISE, BF16_SEEDS = 2**-9, 8  # as in test_family_formats.py


def text(factor: int, first: int, length: int = 30) -> Tokens:
    return tuple((i * factor + first) % 120 + 3 for i in range(length))


def save(family: str, folder: Path) -> None:
    """A checkpoint of it, which is described here: a process for that would import transformers again."""
    fields = tiny_config(family).get_text_config(decoder=True).to_dict()
    tiny_model(family, **{key: 64 for key in CHOSEN if fields.get(key)}).save_pretrained(folder)
    open_model(folder)


@pytest.fixture(autouse=True)
def _described_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_ask", described)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in SAMPLE else pytest.mark.slow) for f in FAMILIES]
)
@pytest.mark.timeout(300)
async def test_a_family_equals_transformers(family: str, start_engine, tmp_path: Path) -> None:
    save(family, tmp_path)
    texts = [text(*numbers) for numbers in TEXTS]
    oracle = Oracle(tmp_path, torch.float32)
    expected = oracle.batch(texts)
    bound = EXACT
    if family in ENLARGING:  # transformers' own rounding is the measure
        exact = Oracle(tmp_path, torch.float64).batch(texts)
        own = max(float(np.abs(ours - rows).max()) for ours, rows in zip(expected, exact, strict=True))
        bound = max(EXACT, 4 * own)
    check, greedy = exactly(expected, bound), oracle.greedy(texts[0], NEW)
    config = EngineConfig(
        model=tmp_path,
        format="f32",
        backbone_dtype="f32",
        tile=16,
        expert_cache=0.3,
        chunk=64 if family in facts.WHOLE_PROMPTS else CHUNK,
        costs=costs(tmp_path),
    )
    number = FAMILIES.index(family)
    for workers, first in ((0, number % 2), (2, 1 - number % 2)):  # each policy with workers in every second
        async with start_engine(replace(config, workers=workers)) as (_, client):
            policies = POLICIES[first::2]
            await check_policies(client, policies, texts, check, texts[0], greedy, 2 * bound, alone=0)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_sinks_in_bf16_are_as_close_as_transformers_bf16(start_engine, tmp_path: Path) -> None:
    """By the rule of rounding.py, from transformers' bfloat16 with noise of bfloat16's size."""
    save(SINKS, tmp_path)
    oracle, rounded = Oracle(tmp_path, torch.float32), Oracle(tmp_path, torch.bfloat16)
    texts = [text(factor, factor + 2) for factor in range(1, 3 * ALONE + 1)]
    exact = oracle.batch(texts)
    theirs = Rounding.of(rounded.noisy(texts, BF16_NOISE, BF16_SEEDS), exact, factor=1.0)
    check, greedy = within(theirs, exact), oracle.greedy(texts[0], NEW)
    config = EngineConfig(
        model=tmp_path,
        format="bf16",
        backbone_dtype="bf16",
        workers=2,
        tile=16,
        expert_cache=0.3,
        chunk=CHUNK,
        costs=costs(tmp_path),
    )
    async with start_engine(config) as (_, client):
        await check_policies(client, POLICIES[:2], texts, check, texts[0], greedy, 2 * theirs.tail)
