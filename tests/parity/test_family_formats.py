"""Every family in the other formats: bfloat16 is no further from exact numbers than transformers' bfloat16,
and the quantized ones equal transformers on the same quantized weights (see test_quantized.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from equality import near_tie_or_equal
from families import Case, drawn_texts, save, texts
from family_cases import CASES, place
from oracle import Oracle
from quantized_oracle import QuantizedOracle
from test_parity import scored
from test_quantized import Distance, reach

from launch.equality import rounding_bound
from pipeline.config import EngineConfig

NEW = 14  # tokens of a greedy continuation
POLICIES = [("all-host", {}), ("random", {"seed": "2", "churn": "1"})]
MORE = 12  # texts from which a tail is measured: one router's choice that rounding flips makes that of a few

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
    few = texts(case)
    exact = [oracle.logprobs(tokens) for tokens in few]
    theirs = np.concatenate(
        [np.abs(rounded.logprobs(tokens) - oracle.logprobs(tokens)) for tokens in drawn_texts(case, MORE)]
    )
    bounds = (float(theirs.mean()), float(np.quantile(theirs, 0.999)), float(theirs.max()))
    continued, chosen_from = oracle.greedy(few[0], NEW)
    config = EngineConfig(
        model=tmp_path, format="bf16", backbone_dtype="bf16", workers=1, tile=24, expert_cache=0.5, chunk=24
    )
    wrong: list[str] = []
    async with start_engine(config) as (_, client):
        for policy, options in POLICIES:
            await client.set_policy(policy, options)
            for stepwise in (False, True):
                ours = [await scored(client, tokens, stepwise) for tokens in few]
                error = np.abs(np.concatenate(ours) - np.concatenate(exact))
                found = (float(error.mean()), float(np.quantile(error, 0.999)), float(error.max()))
                if not all(e <= bound for e, bound in zip(found, bounds, strict=True)):
                    wrong.append(f"{policy} {stepwise=}: {found}, not {bounds}")
            answer = client.generate(token_ids=few[0], max_tokens=NEW, ignore_eos=True)
            new = [t.token async for t in answer]
            if not near_tie_or_equal(new, continued, chosen_from, 2 * bounds[1]):
                wrong.append(f"{policy} generate: {new} instead of {continued}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("case", [c for c in CASES if place(c) == 3], ids=str)
async def test_quantized_equals_transformers_on_the_same_weights(
    case: Case, start_engine, tmp_path: Path
) -> None:
    save(case, tmp_path)
    experts, backbone = FORMATS[case.family]
    oracle = QuantizedOracle(tmp_path, experts, None if backbone == "f32" else backbone)
    few = texts(case)
    expected = [oracle.logprobs(tokens) for tokens in few]
    allowed = reach(oracle, backbone, few, expected)
    for pair in batched(drawn_texts(case, MORE), 2):
        other = reach(oracle, backbone, pair, [oracle.logprobs(tokens) for tokens in pair])
        allowed = Distance(allowed.mean, max(allowed.tail, other.tail))
    continued, chosen_from = oracle.greedy(few[0], NEW)
    config = EngineConfig(
        model=tmp_path, format=experts, backbone_dtype=backbone, workers=2, expert_cache=0.5, chunk=24
    )
    wrong: list[str] = []
    async with start_engine(config) as (_, client):
        for policy, options in POLICIES:
            await client.set_policy(policy, options)
            for stepwise in (False, True):
                found = Distance.between([await scored(client, tokens, stepwise) for tokens in few], expected)
                if not found.within(allowed):
                    wrong.append(f"{policy} {stepwise=}: {found}, allowed {allowed}")
            answer = client.generate(token_ids=few[0], max_tokens=NEW, ignore_eos=True)
            new = [t.token async for t in answer]
            if not near_tie_or_equal(new, continued, chosen_from, rounding_bound(experts, backbone)):
                wrong.append(f"{policy} generate: {new} instead of {continued}")
    assert not wrong, "\n".join(wrong)


def batched(texts: list[tuple[int, ...]], size: int) -> list[list[tuple[int, ...]]]:
    return [texts[i : i + size] for i in range(0, len(texts), size)]
