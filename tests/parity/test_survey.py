"""Every family of transformers runs as transformers runs it: from a saved tiny checkpoint, with and without
workers, under the exact policies.

All families are `make survey`; a sample of them is in every run of the tests.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from comparison import check_policies, exactly
from exact_presets import costs
from oracle import EXACT, Oracle
from tiny_families import family_names, tiny_config, tiny_model

from pipeline.config import EngineConfig

LENGTHS = (30, 30)  # tokens of the texts
CHUNK = 12  # so that a prefill takes several chunks
NEW = 8  # tokens of a greedy continuation
POLICIES = [(name, dict[str, str]()) for name in ("all-host", "on-demand", "fiddler", "layerwise")]
SAMPLE = (
    *("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next"),
    *("gemma4", "nemotron_h", "granitemoehybrid", "ernie4_5_vl_moe"),
)
REFUSED = {
    "diffusion_gemma": "no decoder that generates token by token",
    "openai_privacy_filter": "no decoder that generates token by token",
    "muse_spark": "each expert's whole output is normalised, which is no sum of tiles",
    "deepseek_v4": "its caches keep compressed parts of what a sequence had",
    "qwen4_exp": "it numbers tokens across the model's layers",
    "unlimited_ocr": "its cache has layers of its own kind",
    "qwen3_omni_moe": "a model of speech, which has no tiny one here",
}
# Sparse attention chooses this many tokens or blocks. Of equal scores the choice depends on the chunks, so
# that transformers' own forward in chunks gives something else: here all tokens are chosen.
CHOSEN = ("index_topk", "index_topk_blocks")
ENLARGING = {"bailing_hybrid"}  # with random weights, of rounding: by more than EXACT
WHOLE_PROMPTS = {"jamba"}  # whose layers forget, in transformers, what came before several tokens


SETTINGS = [(family, workers) for family in family_names() if family not in REFUSED for workers in (0, 2)]
SAMPLED = {(family, 2 * (number % 2)) for number, family in enumerate(SAMPLE)}


@pytest.mark.parametrize(
    ("family", "workers"),
    [pytest.param(*s, marks=() if s in SAMPLED else pytest.mark.slow) for s in SETTINGS],
)
@pytest.mark.timeout(300)
async def test_a_family_equals_transformers(family: str, workers: int, start_engine, tmp_path: Path) -> None:
    fields = tiny_config(family).get_text_config(decoder=True).to_dict()
    tiny_model(family, **{key: 64 for key in CHOSEN if fields.get(key)}).save_pretrained(tmp_path)
    texts = [
        tuple((i * a + b) % 120 + 3 for i in range(n))
        for n, a, b in zip(LENGTHS, (5, 7), (3, 11), strict=True)
    ]
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
        workers=workers,
        tile=16,
        expert_cache=0.3,
        chunk=64 if family in WHOLE_PROMPTS else CHUNK,
        costs=costs(tmp_path),
    )
    async with start_engine(config) as (_, client):
        await check_policies(client, POLICIES, texts, check, texts[0], greedy, 2 * bound, alone=0)
