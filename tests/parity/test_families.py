"""Every model family equals transformers in float32: every option, every form of a checkpoint, every preset.

All configurations are compared in this process. Of each family an engine goes through some of the presets
(two in the slow tests): with a sharded checkpoint of transformers 4, or with one file of transformers 5 and
sizes that are no multiple of anything. Every setting is scored as one prefill in several chunks and stepwise
through the decode path, and continues a text greedily, across the number of tokens from which a rotary
embedding is another one.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from comparison import check_policies, exactly
from exact_presets import DIVIDING, costs, sample
from families import Case, save, texts
from family_cases import CASES, EDGES, as_sampled, place
from in_process import InProcess
from oracle import EXACT, Oracle
from safetensors.torch import load_file, save_file

from pipeline.config import EngineConfig

NEW = 14  # tokens of a greedy continuation
DRAWN = [("random", {"seed": str(seed), "churn": str(seed % 2)}) for seed in (3, 4)]

# An engine takes one of these, and a fifth of the presets: each preset meets each setting in one of twenty.
SETTINGS = [
    EngineConfig(workers=1, tile=24, expert_cache=0.3),
    EngineConfig(workers=3, tile=16, expert_cache=0.0),
    EngineConfig(workers=1, tile=None, expert_cache=0.25),
    EngineConfig(workers=3, tile=20, expert_cache=1.0),
]
ENGINES = [case for case in CASES if place(case) < 2]


@pytest.mark.parametrize(
    ("case", "compiled"),
    [
        *(pytest.param(case, True, id=f"{case}-kernels") for case in (*CASES, *EDGES)),
        *(pytest.param(c, False, id=f"{c}-torch") for c in CASES if place(c) < 2),
    ],
)
def test_a_configuration_equals_transformers(case: Case, compiled: bool, tmp_path: Path) -> None:
    save(case, tmp_path)
    oracle = Oracle(tmp_path, torch.float32)
    with InProcess(tmp_path, compiled) as ours:
        for tokens in texts(case):
            count, expected = len(tokens), oracle.logprobs(tokens)
            for chunks in ([15] * (count // 15), [15, *[1] * (count - 15)], [15, 1, count - 16]):
                error = float(np.abs(ours.logprobs(tokens, chunks) - expected).max())
                assert error < EXACT, (count, chunks[:2], error)


@pytest.mark.parametrize("fused", [False, True])
def test_text_model_beside_others_equals_it_alone(fused: bool, tmp_path: Path) -> None:
    """As published: a config with several parts, longer names, a model for images and layers that predict
    further tokens, which are left aside."""
    case = Case("qwen3_5_moe_text", "nested", fused=fused, shards=False)
    save(case, tmp_path)
    oracle, (file,) = Oracle(tmp_path, torch.float32), tmp_path.glob("*.safetensors")
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor for name, tensor in load_file(file).items()
    }
    others = {"model.visual.pos_embed.weight": torch.ones(3, 4), "mtp.fc.weight": torch.ones(2)}
    save_file(tensors | others, file)
    text = json.loads((tmp_path / "config.json").read_bytes())
    whole = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {"depth": 1}}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"tie_word_embeddings": False}))
    tokens = texts(case)[0]
    with InProcess(tmp_path, compiled=True) as ours:
        error = np.abs(ours.logprobs(tokens, [15, *[1] * 15]) - oracle.logprobs(tokens)).max()
    assert error < EXACT


@pytest.mark.parametrize("case", [pytest.param(c, marks=as_sampled(c), id=str(c)) for c in ENGINES])
async def test_a_family_equals_transformers(case: Case, start_engine, tmp_path: Path) -> None:
    number = ENGINES.index(case)
    save(case, tmp_path)
    oracle = Oracle(tmp_path, torch.float32)
    short, long = texts(case)
    both = [long, short]
    check = exactly([oracle.logprobs(tokens) for tokens in both], EXACT)
    config = SETTINGS[number % 4]
    policies = [*sample(number, 5), DRAWN[place(case)]]
    policies += DIVIDING.items() if config.expert_cache and config.tile else ()
    exact = {"format": "f32", "backbone_dtype": "f32", "chunk": 24}
    plain = exact | {"model": tmp_path, "costs": costs(tmp_path)}
    greedy = oracle.greedy(short, NEW)
    async with start_engine(EngineConfig(**(vars(config) | plain))) as (_, client):
        await check_policies(client, policies, both, check, short, greedy, 2 * EXACT, alone=1)


async def test_model_with_one_expert_a_layer(start_engine, tmp_path: Path) -> None:
    """The router has no choice, and the store's layers have a single expert."""
    case = EDGES[0]
    save(case, tmp_path)
    tokens = texts(case)[1]
    oracle = Oracle(tmp_path, torch.float32)
    check, greedy = exactly([oracle.logprobs(tokens)], EXACT), oracle.greedy(tokens, NEW)
    exact = EngineConfig(format="f32", backbone_dtype="f32", expert_cache=0.3)
    config = replace(exact, model=tmp_path, tile=24, chunk=20, workers=1)
    async with start_engine(config) as (_, client):
        policies = [("all-host", {}), ("random", {})]
        await check_policies(client, policies, [tokens], check, tokens, greedy, 2 * EXACT, alone=1)
