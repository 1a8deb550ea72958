"""Backbone and store have exactly the planned sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.backbone.backbone import Backbone
from pipeline.backbone.linear import Precision
from pipeline.checkpoint.open import open_model
from pipeline.config import BackboneDType, EngineConfig
from pipeline.device import open_device
from pipeline.memory.needs import needs
from pipeline.models.registry import model_spec
from pipeline.models.shapes import SHAPES

SMALLER = {
    **{"hidden_size": 128, "vocab_size": 320, "intermediate_size": 192, "moe_intermediate_size": 96},
    **{"shared_expert_intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "head_dim": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32},
    **{"qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 16, "max_position_embeddings": 64},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("family", ["mixtral-8x7b", "phi-3.5-moe", "qwen1.5-moe-a2.7b", "deepseek-v2"])
def test_backbone_has_the_planned_size(
    family: str, dtype: BackboneDType, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SHAPES[family]
    smaller = {key: SMALLER.get(key, value) for key, value in config.items()} | {"tie_word_embeddings": tied}
    smaller |= {"q_lora_rank": 48} if config.get("q_lora_rank") else {}
    monkeypatch.setitem(SHAPES, "smaller", smaller)
    source = open_model(Path("shape:smaller"))
    device = open_device("cpu")
    try:
        spec = model_spec(source.config)
        backbone = Backbone(source, spec, Precision(dtype, device), 64)
    finally:
        device.close()
    planned = needs(source, EngineConfig(device="cpu", backbone_dtype=dtype), "bf16")
    assert planned.backbone == backbone.bytes


async def test_store_has_the_planned_size(start_engine, tiny_model: Path) -> None:
    config = EngineConfig(model=tiny_model, device="cpu", workers=1, format="int4")
    before = needs(open_model(tiny_model), config, "int4")
    async with start_engine(config):
        during = needs(open_model(tiny_model), config, "int4")
    assert (before.present, during.present) == (0, during.store)
    assert before.store == during.store
