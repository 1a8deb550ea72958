"""Formats other than float32: bfloat16 is no further from exact numbers than transformers' bfloat16, and the
quantized ones equal transformers on the same quantized weights, whichever process computes a tile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from comparison import check_policies, within
from families import Case, drawn_texts, save, texts
from family_cases import CASES, WHOLE_GROUPS, as_sampled, place
from oracle import Oracle
from quantized_oracle import QuantizedOracle
from rounding import Rounding

from launch.equality import rounding_bound
from pipeline.config import EngineConfig

NEW = 14  # tokens of a greedy continuation
ANYWHERE = ("random", {"seed": "2", "churn": "1"})
TEXTS = 21
TOKENS = 50  # of each text, across the number from which rotary embeddings are others
CHUNK = 32  # so that a prefill takes two chunks
SEEDS = 16  # of noise
BF16_NOISE = 2**-9  # relative: half a unit in the last place, as much as bfloat16 itself rounds
BF16_SEEDS = 8

KINDS = ("phimoe", "qwen2_moe", "deepseek_v2", "gpt_oss")  # between them every kind of tensor
ROUNDED = [case for case in CASES if place(case) == 2 and case.family in KINDS]

FORMATS = {  # of experts and of the rest; no size of a model here is a whole number of their groups
    "mixtral": ("int4-g128", "int8"),
    "phimoe": ("int8", "int8"),
    "qwen2_moe": ("int4-g128", "int4"),
    "qwen3_moe": ("int8", "f32"),
    "deepseek_v2": ("int4", "int4"),
    "olmoe": ("int4", "f32"),
    "gpt_oss": ("int4", "int8"),
    "glm4_moe": ("int4", "int8"),
    "minimax_m2": ("int8", "int4"),
    "glm4_moe_lite": ("int4-g128", "int8"),
    "deepseek_v3": ("int4", "int4"),
    "qwen3_next": ("int4", "int8"),
    "qwen3_5_moe_text": ("int8", "int4"),
}
QUANTIZED = [  # a model, formats of experts and of the rest, workers, tile, policy
    *(
        pytest.param(c, FORMATS[c.family], 2, None, "all-host", marks=as_sampled(c), id=str(c))
        for c in CASES
        if place(c) == 3
    ),
    pytest.param(WHOLE_GROUPS, ("int8", "int4"), 2, 128, "on-demand", id="int8"),
    pytest.param(WHOLE_GROUPS, ("int4", "f32"), 3, 64, "all-host", id="int4"),
    pytest.param(WHOLE_GROUPS, ("int4-g128", "int8"), 1, None, "on-demand", id="int4-g128"),
    pytest.param(WHOLE_GROUPS, ("int2", "f32"), 1, None, "on-demand", id="int2"),
]


@pytest.mark.parametrize("case", ROUNDED, ids=str)
async def test_bf16_is_as_close_as_transformers_bf16(case: Case, start_engine, tmp_path: Path) -> None:
    """By the rule of rounding.py, from transformers' bfloat16 with noise of bfloat16's size."""
    save(case, tmp_path)
    oracle, rounded = Oracle(tmp_path, torch.float32), Oracle(tmp_path, torch.bfloat16)
    many, prompt = drawn_texts(case, TEXTS, TOKENS), texts(case)[0]
    exact = oracle.batch(many)
    theirs = Rounding.of(rounded.noisy(many, BF16_NOISE, BF16_SEEDS), exact, factor=1.0)
    check, greedy = within(theirs, exact), oracle.greedy(prompt, NEW)
    config = EngineConfig(
        model=tmp_path,
        format="bf16",
        backbone_dtype="bf16",
        workers=1,
        tile=24,
        expert_cache=0.5,
        chunk=CHUNK,
    )
    async with start_engine(config) as (_, client):
        policies = [("all-host", {}), ANYWHERE]
        await check_policies(client, policies, many, check, prompt, greedy, 2 * theirs.tail)


@pytest.mark.parametrize(("case", "formats", "workers", "tile", "policy"), QUANTIZED)
async def test_quantized_equals_transformers_on_the_same_weights(
    case: Case, formats, workers, tile, policy, start_engine, tmp_path: Path
) -> None:
    save(case, tmp_path)
    experts, backbone = formats
    oracle = QuantizedOracle(tmp_path, experts, backbone)
    many, prompt = drawn_texts(case, TEXTS, TOKENS), texts(case)[0]
    expected = oracle.batch(many)
    check = within(oracle.rounding(many, expected, SEEDS), expected)
    greedy, bound = oracle.greedy(prompt, NEW), rounding_bound(experts, backbone)
    config = EngineConfig(
        model=tmp_path,
        format=experts,
        backbone_dtype=backbone,
        workers=workers,
        tile=tile,
        expert_cache=0.5,
        chunk=CHUNK,
    )
    async with start_engine(config) as (_, client):
        await check_policies(client, [(policy, {}), ANYWHERE], many, check, prompt, greedy, bound)
