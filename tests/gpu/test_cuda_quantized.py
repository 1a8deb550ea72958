"""Engines whose experts, and whose backbone, a GPU computes in a quantized format equal transformers on the
same weights, as those on the host do (tests/parity/test_family_formats.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from comparison import check_policies, within
from families import drawn_texts, save
from family_cases import WHOLE_GROUPS
from quantized_oracle import QuantizedOracle
from test_family_formats import ANYWHERE, CHUNK, NEW, TOKENS

from launch.equality import rounding_bound
from pipeline.config import EngineConfig

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

TEXTS, SEEDS = 6, 6


@pytest.mark.parametrize(
    ("experts", "backbone"),
    [
        ("int4", "f32"),
        ("int8", "f32"),
        ("int4-g128", "f32"),
        ("q8_0", "f32"),
        ("mxfp4", "f32"),
        ("nvfp4", "f32"),
        ("int4", "int4"),
        ("int8", "int8"),
    ],
)
async def test_quantized_engines_equal_transformers(experts, backbone, start_engine, tmp_path: Path) -> None:
    save(WHOLE_GROUPS, tmp_path)
    oracle = QuantizedOracle(tmp_path, experts, backbone)
    texts = drawn_texts(WHOLE_GROUPS, TEXTS, TOKENS)
    expected = oracle.batch(texts)
    check = within(oracle.rounding(texts, expected, SEEDS), expected)
    greedy, bound = oracle.greedy(texts[0], NEW), rounding_bound(experts, backbone)
    config = EngineConfig(
        model=tmp_path,
        device="cuda",
        format=experts,
        backbone_dtype=backbone,
        workers=2,
        tile=128,
        chunk=CHUNK,
        expert_cache=0.4,
    )
    async with start_engine(config) as (_, client):
        policies = [("all-host", {}), ("on-demand", {}), ("tandem", {}), ANYWHERE]
        await check_policies(client, policies, texts, check, texts[0], greedy, bound)
