"""What is read from a config.json: the spec, what is refused and how, the experts' shape, the context."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import DEFAULT_CONTEXT
from pipeline.errors import ModelError, UsageError
from pipeline.models.registry import architecture_of, expert_shape, model_spec
from pipeline.room import choose_context
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


def test_a_good_config() -> None:
    spec = model_spec(GOOD)
    assert (spec.layers, spec.hidden, spec.experts, spec.top_k) == (2, 64, 4, 2)
    assert (spec.head_dim, spec.rope_theta, spec.sliding_window) == (16, 1e6, None)
    assert not spec.tied_embeddings
    assert spec.kv_numbers_per_token == 2 * 2 * 2 * 16


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("value", [None, "64", 0, -1, True, [4], float("nan"), float("inf")])
def test_a_number_that_is_missing_or_none_is_named(key, value) -> None:
    assert key in refused(GOOD | {key: value})


@pytest.mark.parametrize("key", NUMBERS)
def test_a_missing_key_is_named(key) -> None:
    assert key in refused({name: value for name, value in GOOD.items() if name != key})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "llama"}, "'llama'"),
        ({"model_type": None}, "None"),
        ({"model_type": ["mixtral"]}, "mixtral"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_experts_per_tok": 5}, "5 experts a token"),
        ({"num_key_value_heads": 3}, "key/value heads"),
        ({"head_dim": 15}, "of 15 numbers"),
        ({"head_dim": "16"}, "head_dim"),
        ({"head_dim": -16}, "head_dim"),
        ({"sliding_window": "wide"}, "sliding_window"),
        ({"sliding_window": -4}, "sliding_window"),
        ({"rope_theta": "large"}, "rope_theta"),
        ({"rope_theta": -1e4}, "rope_theta"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "'yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "'linear'"),
        ({"rope_parameters": "default"}, "rope_parameters"),
    ],
)
def test_a_variant_that_is_not_supported_is_named(change, said) -> None:
    assert said in refused(GOOD | change)


@pytest.mark.parametrize(
    ("change", "theta"),
    [
        ({}, 1e6),
        ({"rope_theta": 10000}, 1e4),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({"rope_scaling": None, "rope_theta": 2e4}, 2e4),
    ],
)
def test_the_rotary_base_is_read_from_either_place(change, theta) -> None:
    assert model_spec(GOOD | change).rope_theta == theta


def test_optional_keys() -> None:
    spec = model_spec(GOOD | {"head_dim": 32, "sliding_window": 128, "tie_word_embeddings": True})
    assert (spec.head_dim, spec.sliding_window, spec.tied_embeddings) == (32, 128, True)
    assert model_spec(GOOD | {"head_dim": None, "sliding_window": None}).head_dim == 16


def test_the_context() -> None:
    spec = model_spec(GOOD)
    assert choose_context(None, spec) == 256
    assert choose_context(256, spec) == 256
    assert choose_context(7, spec) == 7
    with pytest.raises(UsageError, match=r"--context 257 .* 256 positions"):
        choose_context(257, spec)
    assert choose_context(None, model_spec(GOOD | {"max_position_embeddings": 1 << 20})) == DEFAULT_CONTEXT


def test_tiles_of_known_models() -> None:
    small, large = expert_shape(GOOD, None, BF16), expert_shape(MIXTRAL_8X7B, None, BF16)
    assert (small.tile, small.tiles) == (96, 1)  # a tile is never more than the expert
    assert (large.tile, large.tiles) == (896, 16)
    assert expert_shape(GOOD, 40, BF16).tiles == 3
    assert expert_shape(GOOD, 1000, BF16).tile == 96


@given(st.integers(1, 1024), st.integers(1, 30000))
def test_automatic_tiles_are_large_enough_and_not_too_many(hidden, intermediate) -> None:
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
    assert [expert_shape(deepseek, None, form).tile for form in (BF16, int4, wide)] == [96, 704, 128]
    assert (expert_shape(GOOD, None, int4).tile, expert_shape(GOOD, 6400, int4).tile) == (128, 128)
    with pytest.raises(UsageError, match=r"^--tile 100: --format int4 .* groups of 64 .* like 128$"):
        expert_shape(MIXTRAL_8X7B, 100, int4)


def test_the_names_of_an_expert_s_tensors() -> None:
    """Gate, up, down are w1, w3, w2: the order of names is not the order of use."""
    names = architecture_of(GOOD).expert_names(1, 3)
    assert [name.split(".")[-2] for name in names] == ["w1", "w3", "w2"]
    assert all(name.startswith("model.layers.1.block_sparse_moe.experts.3.") for name in names)
