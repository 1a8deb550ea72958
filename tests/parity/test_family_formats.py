"""Every family in the other formats: bfloat16 is no further from exact numbers than transformers' bfloat16,
and the quantized ones equal transformers on the same quantized weights (see test_quantized.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from comparison import check_policies, within
from families import Case, drawn_texts, save, texts
from family_cases import CASES, place
from oracle import Oracle
from quantized_oracle import QuantizedOracle
from rounding import Rounding
from test_parity import BF16_NOISE, BF16_SEEDS
from test_quantized import reach

from launch.equality import rounding_bound
from pipeline.config import EngineConfig

NEW = 14  # tokens of a greedy continuation
POLICIES = [("all-host", {}), ("random", {"seed": "2", "churn": "1"})]
TEXTS = 21
TOKENS = 50  # of each text, across the number from which rotary embeddings are others
CHUNK = 32  # so that a prefill takes two chunks
SEEDS = 16  # of noise

ROUNDED = ("phimoe", "qwen2_moe", "deepseek_v2")  # between them every kind of tensor

FORMATS = {  # of experts and of the rest; no size of a model here is a whole number of their groups
    "mixtral": ("int4-g128", "int8"),
    "phimoe": ("int8", "int8"),
    "qwen2_moe": ("int4", "int4"),
    "qwen3_moe": ("int8", "f32"),
    "deepseek_v2": ("int4", "int4"),
    "olmoe": ("int4", "f32"),
}


@pytest.mark.parametrize(
    "case", [case for case in CASES if place(case) == 2 and case.family in ROUNDED], ids=str
)
async def test_bf16_is_as_close_as_transformers_bf16(case: Case, start_engine, tmp_path: Path) -> None:
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
        await check_policies(client, POLICIES, many, check, prompt, greedy, 2 * theirs.tail)


@pytest.mark.parametrize("case", [c for c in CASES if place(c) == 3], ids=str)
async def test_quantized_equals_transformers_on_the_same_weights(
    case: Case, start_engine, tmp_path: Path
) -> None:
    save(case, tmp_path)
    experts, backbone = FORMATS[case.family]
    oracle = QuantizedOracle(tmp_path, experts, None if backbone == "f32" else backbone)
    many, prompt = drawn_texts(case, TEXTS, TOKENS), texts(case)[0]
    expected = oracle.batch(many)
    check = within(reach(oracle, backbone, many, expected, SEEDS), expected)
    greedy, bound = oracle.greedy(prompt, NEW), rounding_bound(experts, backbone)
    config = EngineConfig(
        model=tmp_path, format=experts, backbone_dtype=backbone, workers=2, expert_cache=0.5, chunk=CHUNK
    )
    async with start_engine(config) as (_, client):
        await check_policies(client, POLICIES, many, check, prompt, greedy, bound)
