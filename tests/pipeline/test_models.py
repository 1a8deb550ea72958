"""Reading config.json: the spec, refused variants, the experts' shape, the context."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from pipeline.assets import model_dir
from pipeline.backbone.rope import RopeTables
from pipeline.device import open_device
from pipeline.errors import ModelError, UsageError
from pipeline.models.facts import check_kind, expert_shape, facts_of
from pipeline.models.registry import architecture_of, model_spec
from pipeline.models.routing import Scored, Softmax
from pipeline.models.shapes import SHAPES
from pipeline.models.spec import GroupedQuery, Latent, ModelSpec, Rope
from shm.expert_math import ExpertMath, Relu2
from shm.layout import FORMATS, HALF_BYTES, REACH, TILE_BYTES, TILES_PER_EXPERT, format_named

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


@pytest.mark.parametrize("key", NUMBERS)
def test_invalid_or_missing_number_is_named(key) -> None:
    for value in (None, "64", 0, -1, True, [4], float("nan"), float("inf")):
        assert key in refused(GOOD | {key: value}), value
    assert key in refused({name: value for name, value in GOOD.items() if name != key})


@given(st.integers(1, 1024), st.integers(1, 30000))
def test_default_tiles_are_large_enough_and_not_too_many(hidden, intermediate) -> None:
    config = GOOD | {"hidden_size": hidden * 8, "intermediate_size": intermediate}
    shape = expert_shape(config, None, BF16)
    assert 1 <= shape.tiles <= REACH * TILES_PER_EXPERT
    assert shape.tile <= intermediate <= shape.padded < intermediate + shape.tile
    if shape.tiles > 1:
        assert shape.tile % 32 == 0
        tile = 6 * shape.hidden * shape.tile
        assert REACH * tile >= TILE_BYTES or (shape.tiles == 2 and tile >= HALF_BYTES)


@settings(max_examples=400)
@given(
    name=st.sampled_from(list(FORMATS)),
    hidden=st.integers(1, 64),
    intermediate=st.integers(1, 4096),
    asked=st.integers(1, 64) | st.none(),
)
def test_tiles_are_whole_groups_and_hold_the_expert(name, hidden, intermediate, asked) -> None:
    form = format_named(name)
    config = GOOD | {"hidden_size": hidden * 8, "intermediate_size": intermediate}
    shape = expert_shape(config, asked and asked * form.granularity, form)
    assert shape.tile % form.granularity == 0
    assert shape.tile <= shape.padded < intermediate + shape.tile
    form.tile_bytes(shape.hidden, shape.tile)  # raises where the format has no such tile


def test_formats_that_read_gate_by_channel_refuse_ungated_experts() -> None:
    text = r"--format floe streams gate's channels, and this model's experts have no gate \(ungated relu\^2\)"
    with pytest.raises(UsageError, match=text):
        check_kind(ExpertMath(Relu2()), format_named("floe"))
    check_kind(ExpertMath(Relu2()), format_named("int4"))
    check_kind(ExpertMath(bias=True), format_named("floe"))


def test_small_expert_is_halved_in_every_format() -> None:
    """So that the embedded model's experts can be resident, fetched and divided in part."""
    config = json.loads((model_dir() / "config.json").read_text())
    halves = {name: expert_shape(config, None, format_named(name)).tiles for name in FORMATS}
    assert halves == dict.fromkeys(FORMATS, 2) | {"int2": 1}  # whose halves would be too small
    assert expert_shape(GOOD, None, BF16).tiles == 1  # a half would be too small


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
        ("qwen3-next-80b-a3b", 79.7),
        ("qwen3.5-35b-a3b", 34.7),
        ("deepseek-v2-lite", 15.7),
        ("deepseek-v2", 235.7),
        ("olmoe-1b-7b", 6.9),
        # without the layers that predict further tokens
        ("glm-4.7-flash", 29.94),
        ("glm-4.5-air", 106.85),
        ("minimax-m2", 228.69),
        ("deepseek-v3", 671.03),
        ("kimi-k2", 1026.41),
    ],
)
def test_shapes_have_the_published_number_of_weights(name, billions) -> None:
    family, spec = architecture_of(SHAPES[name]), model_spec(SHAPES[name])
    for fused in (False, True):
        tensors = family.tensors(spec, fused)
        assert family.is_fused(tensors, spec) == fused
        assert sum(map(math.prod, tensors.values())) / 1e9 == pytest.approx(billions, abs=0.06)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mixtral-8x7b", 46.7),
        ("gpt-oss-20b", 20.91),
        ("gpt-oss-120b", 116.83),
        ("qwen3-next-80b-a3b", 79.67),
        ("qwen3.5-35b-a3b", 34.66),
    ],
)
def test_facts_have_the_published_number_of_weights(name: str, billions: float) -> None:
    assert facts_of(SHAPES[name]).weights / 1e9 == pytest.approx(billions, abs=0.06)


DEEPSEEK = SHAPES["deepseek-v2-lite"]
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
SCALES = {"short_mscale": 1.0, "long_mscale": 1.0}
QWEN2 = SHAPES["qwen1.5-moe-a2.7b"]
QWEN3_NEXT = SHAPES["qwen3-next-80b-a3b"]


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
        (DEEPSEEK | {"scoring_func": "sigmoid"}, "scoring_func"),
        (DEEPSEEK | {"moe_layer_freq": 2}, "moe_layer_freq"),
        (DEEPSEEK | {"sliding_window": 5}, "sliding_window"),
        (DEEPSEEK | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 9}, "9 best of 8"),
        (QWEN3_NEXT | {"linear_num_key_heads": 5}, "32 heads of values cannot share 5"),
        (QWEN3_NEXT | {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim"),
        (QWEN3_NEXT | {"layer_types": ["full_attention"]}, "48 layers, each full_attention or"),
        (QWEN3_NEXT | {"layer_types": ["full_attention"] * 47 + [["x"]]}, "48 layers, each full_attention"),
        (QWEN3_NEXT | {"full_attention_interval": 0}, "full_attention_interval"),
        (QWEN3_NEXT | {"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5 of 256"),
        (QWEN3_NEXT | {"partial_rotary_factor": 1e-6}, "partial_rotary_factor = 1e-06 of 256"),
        (QWEN3_NEXT | {"mlp_only_layers": [0]}, "intermediate_size"),
        (SHAPES["qwen3.5-35b-a3b"] | {"attn_output_gate": False}, "attn_output_gate"),
        (GOOD | {"model_type": "qwen3_5_moe", "text_config": "x"}, "moe_intermediate_size"),
        (GOOD | {"num_hidden_layers": 10_001}, "num_hidden_layers is 10001"),
        (GOOD | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (SHAPES["phi-3.5-moe"] | {"router_jitter_noise": -0.1}, "router_jitter_noise"),
        (QWEN2 | {"mlp_only_layers": [True]}, "mlp_only_layers"),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": None}, "sliding_window"),
        (
            QWEN2 | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": -1},
            "max_window_layers",
        ),
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


# --- every field of every family ------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
FOUR = {"num_key_value_heads": 2}
NARROW = {"moe_intermediate_size": 40}
LATENT = {"kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 14}
RECURRENT = NARROW | {
    "num_experts": 5,
    "shared_expert_intermediate_size": 44,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}
LEAST: dict[str, dict[str, Any]] = {
    "mixtral": SMALL | FOUR | {"num_local_experts": 5},
    "phimoe": SMALL | FOUR | {"num_local_experts": 5},
    "qwen2_moe": SMALL | FOUR | NARROW | {"num_experts": 5, "shared_expert_intermediate_size": 44},
    "qwen3_moe": SMALL | FOUR | NARROW | {"num_experts": 5},
    "deepseek_v2": SMALL | NARROW | LATENT | {"n_routed_experts": 6},
    "olmoe": SMALL | FOUR | {"num_experts": 5},
    "glm4_moe": SMALL | FOUR | NARROW | {"n_routed_experts": 5},
    "minimax_m2": SMALL | FOUR | {"num_local_experts": 5},
    "glm4_moe_lite": SMALL | NARROW | LATENT | {"n_routed_experts": 5},
    "deepseek_v3": SMALL | NARROW | LATENT | {"n_routed_experts": 16, "num_hidden_layers": 4},
    "kimi_k2": SMALL | NARROW | LATENT | {"n_routed_experts": 16, "num_hidden_layers": 4},
    "qwen3_next": SMALL | FOUR | RECURRENT,
    "qwen3_5_moe_text": SMALL | FOUR | RECURRENT,
    "qwen3_5_moe": {"text_config": SMALL | FOUR | RECURRENT},
}
# Where a key is absent that a class of transformers has a value of its own for, we go by the makers' files.
HEADS = {"num_key_value_heads": 4, "q_lora_rank": None, "routed_scaling_factor": 1.0}
ABSENT: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"q_lora_rank": None, "n_shared_experts": None},
    "deepseek_v3": HEADS,
    "glm4_moe_lite": HEADS,
    "qwen3_next": {"head_dim": 16},
    "qwen3_5_moe_text": {"head_dim": 16},
}
KNOWN = {"kimi_k2": "deepseek_v3", "qwen3_5_moe": "qwen3_5_moe_text"}  # to transformers by another name


def least(family: str) -> ModelSpec:
    return model_spec({"model_type": family} | LEAST[family])


def written_out(family: str) -> ModelSpec:
    """Of the same config with every default of transformers in it."""
    known = KNOWN.get(family, family)
    config = AutoConfig.for_model(known, **LEAST[known]).to_json_string(use_diff=False)
    return model_spec(json.loads(config) | ABSENT.get(known, {}))


@pytest.mark.parametrize("family", LEAST)
def test_spec_of_the_least_config_of_a_family(family: str) -> None:
    """Defaults are those of transformers; null is as absent."""
    config = {"model_type": family} | LEAST[family]
    optional = ("head_dim", "attention_bias", "rope_theta", "rope_scaling", "norm_topk_prob", "clip_qkv")
    optional += ("sliding_window", "router_jitter_noise", "lm_head_bias", "mlp_only_layers", "q_lora_rank")
    optional += ("qkv_bias", "routed_scaling_factor", "n_shared_experts", "first_k_dense_replace")
    nulls = dict.fromkeys(optional) | {"tie_word_embeddings": None, "decoder_sparse_step": None}
    assert model_spec(config) == model_spec(config | nulls) == written_out(family)


YARN = {"type": "yarn", "factor": 40, "mscale_all_dim": 0.5, "rope_theta": 3e4}
HALF = [1.0] * 8
PHI_ROPE = {"type": "longrope", "short_factor": HALF, "long_factor": HALF, "short_mscale": 1.25}
PHI_ROPE |= {"long_mscale": 1.5, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("family", "given", "changes"),
    [
        (  # the number of positions is that of the parameters
            "phimoe",
            {"rope_scaling": PHI_ROPE, "original_max_position_embeddings": 64},
            {"rope": Rope("longrope", 1e6, 128, (1.25, 1.5))},
        ),
        (
            "deepseek_v2",
            {"q_lora_rank": 12, "attention_bias": True, "first_k_dense_replace": 1, "n_shared_experts": 2}
            | {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2}
            | {"routed_scaling_factor": 16.0, "rope_scaling": YARN},
            {
                "attention": Latent(4, 12, 20, 10, 8, 14, True, 18**-0.5 * (0.05 * math.log(40) + 1) ** 2),
                "moe_layers": (1, 2),
                "shared_intermediate": 80,
                "rope": Rope("yarn", 3e4),
                "router": Softmax(2, rescaled=False, scale=16.0, groups=3, best_groups=2),
            },
        ),
        (  # of groups that are not limited, no number is read
            "deepseek_v2",
            {"topk_method": "greedy", "n_group": 3, "topk_group": 2},
            {},
        ),
        (  # as its maker writes it
            "minimax_m2",
            {
                "head_dim": 32,
                "rotary_dim": 16,
                "scoring_func": "sigmoid",
                "use_routing_bias": True,
                "use_qk_norm": True,
            }
            | {"qk_norm_type": "per_layer", "attn_type_list": [1, 1, 1], "shared_intermediate_size": 0},
            {"attention": GroupedQuery(4, 2, 32, qk_norm="all", rotated=16)},
        ),
        (
            "kimi_k2",
            {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 1, "topk_group": 1}
            | {"first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "rope_scaling": YARN},
            {"attention": Latent(4, None, 20, 10, 8, 14, False, 18**-0.5 * (0.05 * math.log(40) + 1) ** 2)}
            | {"router": Scored("sigmoid", 2, True, 2.827), "moe_layers": (1, 2, 3)}
            | {"rope": Rope("yarn", 3e4)},
        ),
    ],
)
def test_spec_follows_the_options_of_a_family(family: str, given: dict, changes: dict) -> None:
    """Those that transformers does not know or writes otherwise; tests/parity has the others."""
    config = {"model_type": family} | LEAST[family] | given
    assert model_spec(config) == replace(least(family), **changes)


@pytest.mark.parametrize(
    ("given", "switch"),
    [
        ({"original_max_position_embeddings": 64}, 64),
        ({"rope_scaling": {"original_max_position_embeddings": 96}}, 96),
        (
            {
                "rope_scaling": {"original_max_position_embeddings": 96},
                "original_max_position_embeddings": 64,
            },
            64,
        ),
        ({}, 256),
    ],
)
def test_longrope_switches_at_the_positions_of_the_training(given: dict, switch: int) -> None:
    scaling = LONGROPE | given.get("rope_scaling", {})
    assert model_spec(GOOD | given | {"rope_scaling": scaling}).rope == Rope("longrope", 1e6, switch)
    assert model_spec(GOOD | given | {"rope_scaling": None}).rope == Rope("default", 1e6)


@pytest.mark.parametrize(
    ("scaling", "factor"),
    [
        ({"type": "yarn", "factor": 1, "mscale_all_dim": 0.5}, 1.0),
        ({"type": "yarn", "factor": 40, "mscale_all_dim": 0}, 1.0),
        ({"type": "yarn", "factor": 40}, 1.0),
        ({"type": "yarn", "factor": 4, "mscale_all_dim": 1}, 0.1 * math.log(4) + 1),
    ],
)
def test_latent_scores_are_scaled_as_the_config_wants(scaling: dict, factor: float) -> None:
    spec = model_spec({"model_type": "deepseek_v2"} | LEAST["deepseek_v2"] | {"rope_scaling": scaling})
    assert isinstance(spec.attention, Latent)
    assert spec.attention.scale == pytest.approx(18**-0.5 * factor**2)


def test_largest_number_of_layers_is_allowed() -> None:
    assert model_spec(GOOD | {"num_hidden_layers": 10_000}).layers == 10_000


@pytest.mark.parametrize(
    ("family", "given", "words"),
    [
        ("glm4_moe", {"n_group": 2}, "5 experts have no 1 best of 2 equal groups"),
        ("glm4_moe", {"topk_group": 2}, "no 2 best of 1 equal groups"),
        ("deepseek_v3", {"num_experts_per_tok": 9}, "9 experts a token do not fit 4 groups of 2"),
        ("deepseek_v3", {"n_group": 16}, "2 experts a token do not fit 4 groups of 1"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("glm4_moe", {"partial_rotary_factor": 2}, "partial_rotary_factor = 2 of 16 numbers"),
        ("glm4_moe", {"head_dim": 6}, "a head has 3"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1]}, "attn_type_list"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must name 3 layers"),
        ("glm4_moe_lite", {"first_k_dense_replace": 2}, "first_k_dense_replace"),
    ],
)
def test_variants_of_sigmoid_families_are_refused(family: str, given: dict, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        model_spec({"model_type": family} | LEAST[family] | given)


def test_layers_that_predict_further_tokens_are_left_aside() -> None:
    config = {"model_type": "glm4_moe"} | LEAST["glm4_moe"]
    glm, spec = architecture_of(config), model_spec(config)
    assert glm.optional("model.layers.3.eh_proj.weight", spec)
    assert glm.optional("model.layers.3.mlp.experts.0.up_proj.weight", spec)
    for name in ("model.layers.2.eh_proj.weight", "model.layers.4.eh_proj.weight", "model.layers.3"):
        assert not glm.optional(name, spec)
    assert not glm.optional("model.layers.3.eh_proj.weight", least("qwen3_moe"))


def test_kimi_has_the_rotary_embedding_of_deepseek() -> None:
    """transformers does not know its model_type."""
    given = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}
    found = []
    for family in ("kimi_k2", "deepseek_v3"):
        config = {"model_type": family} | LEAST[family] | given
        table = RopeTables(model_spec(config).rope, config, 8, 100, open_device("cpu"))
        found.append(torch.cat(table[[0, 50, 99]]))
    assert torch.equal(*found)
