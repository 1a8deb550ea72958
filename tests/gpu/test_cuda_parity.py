"""A whole engine on the device `cuda` equals transformers: every preset, with both kinds of prefetcher."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from equality import near_tie_or_equal
from exact_presets import EXACT_PRESETS
from numpy.typing import NDArray
from oracle import Oracle
from transformers import AutoTokenizer

from pipeline.assets import heldout, model_dir
from pipeline.config import EngineConfig
from protocol.client import Client

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

BOUND = 2e-4  # float32 log-probabilities against transformers' on the CPU
LENGTH = 72  # tokens
PREFILL = 24  # of the stepwise path
NEW = 24  # tokens of a greedy continuation
SWEEP = [
    *EXACT_PRESETS,
    ("on-demand", {"scope": "global"}),
    *[("random", {"seed": str(seed), "churn": str(seed % 2)}) for seed in range(4)],
]
SETTINGS = [
    pytest.param({"workers": 1, "tile": None, "expert_cache": 0.25}, id="whole-experts"),
    pytest.param({"workers": 2, "tile": 64, "expert_cache": 0.5}, id="tiles"),
    pytest.param({"workers": 2, "tile": 100, "expert_cache": 0.0}, id="no-cache"),
    pytest.param({"workers": 2, "tile": 48, "expert_cache": 1.0, "prefetcher": "thread"}, id="all-cached"),
    pytest.param({"workers": 2, "tile": 64, "expert_cache": 0.2, "prefetcher": "thread"}, id="thread"),
]


@pytest.fixture(scope="module")
def text() -> tuple[int, ...]:
    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    return tuple(tokenizer(heldout()["python"].read_text()[:2000])["input_ids"][:LENGTH])


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(model_dir(), torch.float32)


async def scored(client: Client, tokens: tuple[int, ...], stepwise: bool) -> NDArray[np.float32]:
    """[len(tokens), vocabulary]"""
    blocks = client.score(token_ids=tokens, full=True, stepwise=stepwise, prefill=PREFILL if stepwise else 1)
    return np.concatenate([block.logprobs async for block in blocks])


@pytest.mark.parametrize("setting", SETTINGS)
async def test_every_preset_equals_transformers(setting, text, oracle, start_engine) -> None:
    plain = {"device": "cuda", "format": "f32", "backbone_dtype": "f32", "chunk": 32}
    expected = oracle.logprobs(text)
    reference, chosen_from = oracle.greedy(text, NEW)
    wrong: list[str] = []
    async with start_engine(EngineConfig(**(setting | plain))) as (_, client):
        assert client.welcome.device.startswith("cuda")
        for policy, options in SWEEP:
            await client.set_policy(policy, options)
            for stepwise in (False, True):
                error = float(np.abs(await scored(client, text, stepwise) - expected).max())
                if not error < BOUND:
                    wrong.append(f"{policy} {options} stepwise={stepwise}: {error:.2e}")
            answer = client.generate(token_ids=text, max_tokens=NEW, ignore_eos=True)
            tokens = [token.token async for token in answer]
            if not near_tie_or_equal(tokens, reference, chosen_from, 2 * BOUND):
                wrong.append(f"{policy} {options} generate: {tokens} instead of {reference}")
    assert not wrong, "\n".join(wrong)
