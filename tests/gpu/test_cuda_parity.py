"""A whole engine on the device `cuda` equals transformers: every preset, with both kinds of prefetcher."""

from __future__ import annotations

import pytest
import torch
from comparison import check_policies, exactly
from exact_presets import DIVIDING, EXACT_PRESETS
from oracle import Oracle
from transformers import AutoTokenizer

from pipeline.assets import heldout, model_dir
from pipeline.config import EngineConfig

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

BOUND = 2e-4  # float32 log-probabilities against transformers' on the CPU
LENGTH = 96  # tokens; the stepwise path decodes half of them
NEW = 24  # tokens of a greedy continuation
SWEEP = [
    *EXACT_PRESETS,
    *DIVIDING.items(),
    *[("random", {"seed": str(seed), "churn": str(seed % 2)}) for seed in range(4)],
]
SETTINGS = [
    pytest.param({"workers": 1, "tile": None, "expert_cache": 0.25}, id="whole-experts"),
    pytest.param({"workers": 2, "tile": 64, "expert_cache": 0.5}, id="tiles"),
    pytest.param({"workers": 2, "tile": 100, "expert_cache": 0.0}, id="no-cache"),
    pytest.param({"workers": 2, "tile": 48, "expert_cache": 1.0}, id="all-cached"),
]


@pytest.fixture(scope="module")
def text() -> tuple[int, ...]:
    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    return tuple(tokenizer(heldout()["python"].read_text()[:2000])["input_ids"][:LENGTH])


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(model_dir(), torch.float32)


@pytest.mark.parametrize("setting", SETTINGS)
async def test_every_preset_equals_transformers(setting, text, oracle, start_engine) -> None:
    plain = {"device": "cuda", "format": "f32", "backbone_dtype": "f32", "chunk": 32}
    check, greedy = exactly([oracle.logprobs(text)], BOUND), oracle.greedy(text, NEW)
    async with start_engine(EngineConfig(**(setting | plain))) as (_, client):
        assert client.welcome.device.startswith("cuda")
        await check_policies(client, SWEEP, [text], check, text, greedy, 2 * BOUND)
