"""Reading config.json: the spec, refused variants, the experts' shape, the context."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import DEFAULT_CONTEXT
from pipeline.errors import ModelError, UsageError
from pipeline.memory.limits import choose_context
from pipeline.models.registry import architecture_of, expert_shape, model_spec
from pipeline.models.shapes import SHAPES
from pipeline.models.spec import GroupedQuery, Rope
from shm.layout import FORMATS, REACH, TILE_BYTES, TILES_PER_EXPERT, format_named

BF16 = format_named("bf16")
GOOD: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
NUMBERS = [key for key in GOOD if key not in ("model_type", "hidden_act")]
MIXTRAL_8X7B = GOOD | {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8}


def refused(config: dict[str, Any]) -> str:
    with pytest.raises(ModelError) as caught:
        model_spec(config)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("config.json: ")
    return text


def test_spec_of_a_valid_config() -> None:
    spec = model_spec(GOOD)
    assert (spec.layers, spec.hidden, spec.experts, spec.top_k) == (2, 64, 4, 2)
    assert spec.moe_layers == (0, 1)
    assert spec.attention == GroupedQuery(heads=4, kv_heads=2, head_dim=16)
    assert (spec.rope, spec.windows) == (Rope("default", 1e6), (None, None))
    assert not spec.tied_embeddings
    assert spec.kv_numbers_per_token == 2 * 2 * 2 * 16


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("value", [None, "64", 0, -1, True, [4], float("nan"), float("inf")])
def test_invalid_number_is_named(key, value) -> None:
    assert key in refused(GOOD | {key: value})


@pytest.mark.parametrize("key", NUMBERS)
def test_missing_key_is_named(key) -> None:
    assert key in refused({name: value for name, value in GOOD.items() if name != key})


@pytest.mark.parametrize(
    ("change", "theta"),
    [
        ({}, 1e6),
        ({"rope_theta": 10000}, 1e4),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({"rope_scaling": None, "rope_theta": 2e4}, 2e4),
    ],
)
def test_rope_theta_is_read_from_either_key(change, theta) -> None:
    assert model_spec(GOOD | change).rope.theta == theta


def test_optional_keys_have_defaults() -> None:
    spec = model_spec(GOOD | {"head_dim": 32, "sliding_window": 128, "tie_word_embeddings": True})
    assert (spec.attention.qk_dim, spec.windows, spec.tied_embeddings) == (32, (128, 128), True)
    assert model_spec(GOOD | {"head_dim": None, "sliding_window": None}).attention.qk_dim == 16


def test_context_is_bounded_by_the_models_positions() -> None:
    spec = model_spec(GOOD)
    assert choose_context(None, spec) == 256
    assert choose_context(256, spec) == 256
    assert choose_context(7, spec) == 7
    with pytest.raises(UsageError, match=r"--context 257 .* 256 positions"):
        choose_context(257, spec)
    assert choose_context(None, model_spec(GOOD | {"max_position_embeddings": 1 << 20})) == DEFAULT_CONTEXT


def test_tiles_of_known_models() -> None:
    small, large = expert_shape(GOOD, None, BF16), expert_shape(MIXTRAL_8X7B, None, BF16)
    assert (small.tile, small.tiles) == (96, 1)  # a tile is at most an expert
    assert (large.tile, large.tiles) == (896, 16)
    assert expert_shape(GOOD, 40, BF16).tiles == 3
    assert expert_shape(GOOD, 1000, BF16).tile == 96


@given(st.integers(1, 1024), st.integers(1, 30000))
def test_default_tiles_are_large_enough_and_not_too_many(hidden, intermediate) -> None:
    config = GOOD | {"hidden_size": hidden * 8, "intermediate_size": intermediate}
    shape = expert_shape(config, None, BF16)
    assert 1 <= shape.tiles <= REACH * TILES_PER_EXPERT
    assert shape.tile <= intermediate <= shape.padded < intermediate + shape.tile
    if shape.tiles > 1:
        assert shape.tile % 32 == 0
        assert REACH * 6 * shape.hidden * shape.tile >= TILE_BYTES


@pytest.mark.parametrize("name", FORMATS)
@given(hidden=st.integers(1, 64), intermediate=st.integers(1, 4096), asked=st.integers(1, 64) | st.none())
def test_tiles_are_whole_groups_and_hold_the_expert(name, hidden, intermediate, asked) -> None:
    form = format_named(name)
    config = GOOD | {"hidden_size": hidden * 8, "intermediate_size": intermediate}
    shape = expert_shape(config, asked and asked * form.granularity, form)
    assert shape.tile % form.granularity == 0
    assert shape.tile <= shape.padded < intermediate + shape.tile
    form.tile_bytes(shape.hidden, shape.tile)  # raises where the format has no such tile


def test_tiles_of_quantized_formats() -> None:
    int4, wide = format_named("int4"), format_named("int4-g128")
    for form in (int4, wide, format_named("int8")):
        assert expert_shape(MIXTRAL_8X7B, None, form).tile == 896
    qwen3 = GOOD | {"hidden_size": 2048, "intermediate_size": 768}
    assert [expert_shape(qwen3, None, form).tile for form in (BF16, int4, wide)] == [96, 384, 384]
    deepseek = GOOD | {"hidden_size": 2048, "intermediate_size": 1408}
    assert [expert_shape(deepseek, None, form).tile for form in (BF16, int4, wide)] == [128, 704, 128]
    assert (expert_shape(GOOD, None, int4).tile, expert_shape(GOOD, 6400, int4).tile) == (128, 128)
    with pytest.raises(UsageError, match=r"^--tile 100: --format int4 .* groups of 64 .* like 128$"):
        expert_shape(MIXTRAL_8X7B, 100, int4)


def test_expert_tensor_names() -> None:
    """Gate, up, down are w1, w3, w2: not the order of the names."""
    parts = architecture_of(GOOD).expert(model_spec(GOOD), 1, 3, fused=False)
    assert [part.name.split(".")[-2] for part in parts] == ["w1", "w3", "w2"]
    assert all(part.name.startswith("model.layers.1.block_sparse_moe.experts.3.") for part in parts)
    assert [(part.shape, part.first, part.rows) for part in parts] == [
        ((96, 64), 0, 96),
        ((96, 64), 0, 96),
        ((64, 96), 0, 64),
    ]


def test_location_of_a_fused_expert() -> None:
    gate, up, down = architecture_of(GOOD).expert(model_spec(GOOD), 1, 3, fused=True)
    assert (gate.name, gate.shape) == ("model.layers.1.mlp.experts.gate_up_proj", (4, 192, 64))
    assert (gate[1:], up[1:]) == (((4, 192, 64), 3 * 192, 96), ((4, 192, 64), 3 * 192 + 96, 96))
    assert down == ("model.layers.1.mlp.experts.down_proj", (4, 64, 96), 3 * 64, 64)


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_has_a_spec(name) -> None:
    spec = model_spec(SHAPES[name])
    family = architecture_of(SHAPES[name])
    for fused in (False, True):
        tensors = family.tensors(spec, fused)
        assert family.is_fused(tensors, spec) == fused
        assert all(size > 0 for shape in tensors.values() for size in shape)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mixtral-8x7b", 46.7),
        ("mixtral-8x22b", 140.6),
        ("phi-3.5-moe", 41.9),
        ("qwen1.5-moe-a2.7b", 14.3),
        ("qwen2-57b-a14b", 57.4),
        ("qwen3-30b-a3b", 30.5),
        ("qwen3-235b-a22b", 235.1),
        ("deepseek-v2-lite", 15.7),
        ("deepseek-v2", 235.7),
        ("olmoe-1b-7b", 6.9),
    ],
)
def test_shapes_have_the_published_number_of_weights(name, billions) -> None:
    tensors = architecture_of(SHAPES[name]).tensors(model_spec(SHAPES[name]), fused=False)
    assert sum(map(math.prod, tensors.values())) / 1e9 == pytest.approx(billions, abs=0.06)


DEEPSEEK = SHAPES["deepseek-v2-lite"]
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
SCALES = {"short_mscale": 1.0, "long_mscale": 1.0}
QWEN2 = SHAPES["qwen1.5-moe-a2.7b"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GOOD | {"model_type": "llama"}, "'llama'"),
        (GOOD | {"model_type": None}, "None"),
        (GOOD | {"model_type": ["mixtral"]}, "mixtral"),
        (GOOD | {"hidden_act": "gelu"}, "hidden_act"),
        (GOOD | {"attention_bias": True}, "attention_bias"),
        (GOOD | {"num_experts_per_tok": 5}, "5 experts a token"),
        (GOOD | {"num_key_value_heads": 3}, "key/value heads"),
        (GOOD | {"head_dim": 15}, "a head has 15"),
        (GOOD | {"head_dim": "16"}, "head_dim"),
        (GOOD | {"head_dim": -16}, "head_dim"),
        (GOOD | {"sliding_window": "wide"}, "sliding_window"),
        (GOOD | {"sliding_window": -4}, "sliding_window"),
        (GOOD | {"rope_theta": "large"}, "rope_theta"),
        (GOOD | {"rope_theta": -1e4}, "rope_theta"),
        (GOOD | {"rope_scaling": {"type": "mrope", "factor": 4}}, "'mrope'"),
        (GOOD | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor"),
        (
            GOOD | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary",
        ),
        (GOOD | {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        (GOOD | {"rope_parameters": "default"}, "rope_parameters"),
        (DEEPSEEK | {"topk_method": "noaux_tc"}, "topk_method"),
        (DEEPSEEK | {"norm_topk_prob": True}, "norm_topk_prob"),
        (DEEPSEEK | {"mlp_bias": True}, "mlp_bias"),
        (DEEPSEEK | {"first_k_dense_replace": 27}, "no layer has experts"),
        (DEEPSEEK | {"num_key_value_heads": 4}, "num_key_value_heads"),
        (DEEPSEEK | {"topk_method": "group_limited_greedy", "n_group": 7, "topk_group": 2}, "7 equal groups"),
        (DEEPSEEK | {"qk_rope_head_dim": 63}, "a head has 63"),
        (DEEPSEEK | {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        (QWEN2 | {"mlp_only_layers": "all"}, "mlp_only_layers"),
        (QWEN2 | {"qkv_bias": 1}, "qkv_bias"),
        (
            QWEN2 | {"use_sliding_window": True, "sliding_window": 4096, "layer_types": ["full_attention"]},
            "24 layers",
        ),
        (SHAPES["phi-3.5-moe"] | {"num_experts_per_tok": 3}, "num_experts_per_tok"),
        (SHAPES["phi-3.5-moe"] | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "short_mscale"),
        (SHAPES["olmoe-1b-7b"] | {"sliding_window": 16}, "sliding_window"),
        (SHAPES["olmoe-1b-7b"] | {"clip_qkv": -1}, "clip_qkv"),
        (GOOD | {"num_hidden_layers": 10**12}, "num_hidden_layers"),
        (GOOD | {"num_local_experts": 1 << 70}, "num_local_experts"),
        (
            DEEPSEEK | {"rope_scaling": {"type": "yarn", "factor": 4, "attention_factor": "x"}},
            "attention_factor",
        ),
        (GOOD | {"rope_scaling": LONGROPE | {"short_factor": [1.0, 2.0]}}, "8 numbers as short_factor"),
        (GOOD | {"rope_scaling": LONGROPE | {"long_factor": None}}, "8 numbers as long_factor"),
        (GOOD | {"rope_scaling": LONGROPE | {"long_factor": [1.0] * 7 + [0.0]}}, "long_factor"),
        (SHAPES["phi-3.5-moe"] | {"rope_scaling": LONGROPE | SCALES}, "64 numbers"),
    ],
)
def test_unsupported_variant_is_named(config, message) -> None:
    assert message in refused(config)


def test_layers_with_experts() -> None:
    assert model_spec(DEEPSEEK).moe_layers == tuple(range(1, 27))
    every_third = QWEN2 | {"decoder_sparse_step": 3, "mlp_only_layers": [5]}
    assert model_spec(every_third).moe_layers == (2, 8, 11, 14, 17, 20, 23)


def test_layers_with_a_sliding_window() -> None:
    sliding = QWEN2 | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}
    assert model_spec(sliding).windows[:5] == (64, None, 64, None, None)
    types = ["full_attention"] * 23 + ["sliding_attention"]
    assert model_spec(sliding | {"layer_types": types}).windows == (None,) * 23 + (64,)
    assert set(model_spec(QWEN2 | {"sliding_window": 64}).windows) == {None}
