"""The engine equals transformers with the embedded model, under every preset, and a plan's result is the same
bit for bit; every family, other worker counts and formats are in the other files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from comparison import answered, check_policies, exactly, scored
from exact_presets import DIVIDING, EXACT_PRESETS, costs
from numpy.typing import NDArray
from oracle import EXACT, Oracle
from transformers import AutoTokenizer

from pipeline.assets import heldout, model_dir
from pipeline.config import EngineConfig

LENGTH = 30  # tokens of each text
CHUNK = 20  # so that a prefill takes several chunks
NEW = 12  # tokens of a greedy continuation
DRAWN = [("random", {"seed": str(seed), "churn": str(seed % 2)}) for seed in range(2)]
FIXED = [
    ("all-host", {}),
    ("layerwise", {}),
    ("on-demand", {}),
    ("random", {"seed": "5"}),
    ("random", {"seed": "6", "churn": "1"}),
]


def tokenized(kind: str, count: int = LENGTH) -> tuple[int, ...]:
    """The first tokens of a kind's held-out text."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    return tuple(tokenizer(heldout()[kind].read_text()[: 20 * count])["input_ids"][:count])


@pytest.mark.timeout(300)
async def test_every_preset_equals_transformers_in_float32(start_engine, tmp_path: Path) -> None:
    """One engine that SetPolicy takes through them: as one prefill and stepwise, alone and beside others."""
    oracle, texts = Oracle(model_dir(), torch.float32), [tokenized("python"), tokenized("german")]
    config = EngineConfig(
        format="f32",
        backbone_dtype="f32",
        workers=2,
        tile=64,
        expert_cache=0.5,
        chunk=CHUNK,
        costs=costs(tmp_path),
    )
    policies = [*EXACT_PRESETS, *DIVIDING.items(), *DRAWN]
    check, greedy = exactly(oracle.batch(texts), EXACT), oracle.greedy(texts[0], NEW)
    async with start_engine(config) as (_, client):
        await check_policies(client, policies, texts, check, texts[0], greedy, 2 * EXACT, alone=1)


@pytest.mark.timeout(200)
async def test_a_fixed_plan_repeats_bit_for_bit(tiny_model, start_engine) -> None:
    """The same cuts give the same bits, whatever is resident and whichever worker is late: a second time in
    the same engine (with a warm cache), and in another with slower workers and a slower link."""
    text = tuple(5 + 37 * i for i in range(LENGTH))
    rounds: list[list[NDArray[np.float32]]] = []
    for slowdown, link, times in ((1.0, None, 2), (1.5, 0.5, 1)):
        config = EngineConfig(
            model=tiny_model,
            format="bf16",
            workers=2,
            tile=32,
            expert_cache=0.3,
            chunk=CHUNK,
            host_slowdown=slowdown,
            link_gbps=link,
        )
        async with start_engine(config) as (_, client):
            for _ in range(times):
                results = []
                for policy, options in FIXED:
                    await client.set_policy(policy, options)
                    for stepwise in (False, True, False):
                        results.append(await scored(client, text, stepwise))
                    np.testing.assert_array_equal(results[-1], results[-3])
                    results.append(np.array(await answered(client, text, NEW)))
                rounds.append(results)
    for again in rounds[1:]:
        for first, second in zip(rounds[0], again, strict=True):
            np.testing.assert_array_equal(first, second)
