"""Engines whose experts, and whose backbone, a GPU computes in a quantized format equal transformers on the
same weights, as those on the host do (tests/parity/test_quantized.py)."""

from __future__ import annotations

import pytest
from comparison import check_policies, within
from quantized_oracle import QuantizedOracle
from test_parity import CHUNK, NEW, passages
from test_quantized import ANYWHERE, LENGTH, reach

from launch.equality import rounding_bound
from pipeline.assets import model_dir
from pipeline.config import EngineConfig

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

TEXTS, SEEDS = 6, 6


@pytest.mark.parametrize(
    ("experts", "backbone"),
    [("int4", "f32"), ("int8", "f32"), ("int4-g128", "f32"), ("int4", "int4"), ("int8", "int8")],
)
async def test_quantized_engines_equal_transformers(experts, backbone, start_engine) -> None:
    oracle = QuantizedOracle(model_dir(), experts, None if backbone == "f32" else backbone)
    texts = passages(TEXTS, LENGTH)
    expected = oracle.batch(texts)
    check = within(reach(oracle, backbone, texts, expected, SEEDS), expected)
    greedy, bound = oracle.greedy(texts[0], NEW), rounding_bound(experts, backbone)
    config = EngineConfig(
        device="cuda", format=experts, backbone_dtype=backbone, workers=2, tile=128, chunk=CHUNK,
        expert_cache=0.4,
    )  # fmt: skip
    async with start_engine(config) as (_, client):
        policies = [("all-host", {}), ("on-demand", {}), ("tandem", {}), ANYWHERE]
        await check_policies(client, policies, texts, check, texts[0], greedy, bound)
