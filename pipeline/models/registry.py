"""The model families: what each reads of config.json; a config's ModelSpec, and the shape of its experts."""

from __future__ import annotations

import math
from typing import Any

from pipeline.errors import ModelError, UsageError
from pipeline.models.architecture import Architecture
from pipeline.models.config_keys import (
    Config,
    bounded,
    check_rope,
    expect,
    experts,
    flag,
    grouped_query,
    layer_kinds,
    optional,
    original_positions,
    refuse_partial_rotary,
    required,
    rope,
    rope_parameters,
    shown,
    sparse_layers,
    text_config,
)
from pipeline.models.routing import Softmax, SparseMixer
from pipeline.models.spec import GatedDelta, GroupedQuery, Latent, ModelSpec, Rope
from shm.layout import ExpertShape, TileFormat, suitable_tile


def _mixtral(config: Config) -> dict[str, Any]:
    expect(config, "attention_bias", False)
    return {
        "intermediate": required(config, "intermediate_size", int),
        "experts": experts(config, "num_local_experts", "num_experts"),
        "attention": grouped_query(config),
        "windows": _same_window(config),
        "rope": rope(config, theta=1e6),
        "router": Softmax(required(config, "num_experts_per_tok", int), rescaled=True),
    }


def _phimoe(config: Config) -> dict[str, Any]:
    expect(config, "num_experts_per_tok", 2)
    bias = flag(config, "attention_bias", False)
    return {
        "intermediate": required(config, "intermediate_size", int),
        "experts": experts(config, "num_local_experts"),
        "attention": grouped_query(config, bias=bias, output_bias=bias),
        "windows": _same_window(config),
        "rope": _scaled_rope(config),
        "router": SparseMixer(float(optional(config, "router_jitter_noise", float, 0.01, zero=True))),
        "layer_norm": True,
        "head_bias": flag(config, "lm_head_bias", False),
    }


def _olmoe(config: Config) -> dict[str, Any]:
    expect(config, "sliding_window")
    bias, clip = flag(config, "attention_bias", False), optional(config, "clip_qkv", float)
    return {
        "intermediate": required(config, "intermediate_size", int),
        "experts": experts(config, "num_experts", "num_local_experts"),
        "attention": grouped_query(config, bias=bias, output_bias=bias, qk_norm="all", clip=clip),
    }


def _qwen2_moe(config: Config) -> dict[str, Any]:
    return {
        "moe_layers": sparse_layers(config),
        "intermediate": required(config, "moe_intermediate_size", int),
        "experts": experts(config, "num_experts"),
        "attention": grouped_query(config, bias=flag(config, "qkv_bias", True)),
        "windows": _windows(config, bounded(config, "num_hidden_layers")),
        "dense_intermediate": required(config, "intermediate_size", int),
        "shared_intermediate": required(config, "shared_expert_intermediate_size", int),
        "shared_gate": True,
    }


def _qwen3_moe(config: Config) -> dict[str, Any]:
    bias = flag(config, "attention_bias", False)
    sliding = flag(config, "use_sliding_window", False)
    return {
        "moe_layers": sparse_layers(config),
        "intermediate": required(config, "moe_intermediate_size", int),
        "experts": experts(config, "num_experts", "num_local_experts"),
        "attention": grouped_query(config, bias=bias, output_bias=bias, qk_norm="head"),
        "windows": _same_window(config) if sliding else (None,) * bounded(config, "num_hidden_layers"),
        "dense_intermediate": required(config, "intermediate_size", int),
    }


def _qwen3_next(config: Config) -> dict[str, Any]:
    full, recurrent = "full_attention", "linear_attention"
    kinds = layer_kinds(config, full, recurrent)
    dense = sparse_layers(config) != tuple(range(len(kinds)))
    return {
        "moe_layers": sparse_layers(config),
        "intermediate": required(config, "moe_intermediate_size", int),
        "experts": experts(config, "num_experts"),
        "attention": _gated_attention(config),
        "router": Softmax(required(config, "num_experts_per_tok", int), flag(config, "norm_topk_prob", True)),
        "dense_intermediate": required(config, "intermediate_size", int) if dense else 0,
        "shared_intermediate": required(config, "shared_expert_intermediate_size", int),
        "shared_gate": True,
        "recurrent": _gated_delta(config),
        "recurrent_layers": tuple(i for i, kind in enumerate(kinds) if kind == recurrent),
    }


def _qwen3_5_moe(config: Config) -> dict[str, Any]:
    """The text model's part. Its weights of a token always sum to 1, and no layer is dense."""
    expect(config, "attn_output_gate", True)
    plain = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return _qwen3_next({**config, **plain})


def _gated_attention(config: Config) -> GroupedQuery:
    bias = flag(config, "attention_bias", False)
    return grouped_query(config, bias=bias, output_bias=bias, qk_norm="head", rotary=0.25, gated=True)


def _gated_delta(config: Config) -> GatedDelta:
    keys, values = (required(config, f"linear_num_{kind}_heads", int) for kind in ("key", "value"))
    if values % keys:
        raise ModelError(f"config.json: {values} heads of values cannot share {keys} heads of keys")
    return GatedDelta(
        key_heads=keys,
        value_heads=values,
        key_dim=required(config, "linear_key_head_dim", int),
        value_dim=required(config, "linear_value_head_dim", int),
        taps=required(config, "linear_conv_kernel_dim", int),
    )


def _deepseek_v2(config: Config) -> dict[str, Any]:
    expect(config, "mlp_bias", False)
    expect(config, "norm_topk_prob", False)  # DeepSeek's code and transformers disagree on true
    expect(config, "scoring_func", "softmax")
    expect(config, "moe_layer_freq", 1)
    expect(config, "sliding_window")
    intermediate = required(config, "moe_intermediate_size", int)
    routed = experts(config, "n_routed_experts", "num_experts")
    dense = optional(config, "first_k_dense_replace", int, 0, zero=True)
    return {
        "moe_layers": tuple(range(dense, bounded(config, "num_hidden_layers"))),
        "intermediate": intermediate,
        "experts": routed,
        "attention": _latent(config),
        "router": _limited_softmax(config, routed),
        "dense_intermediate": required(config, "intermediate_size", int),
        "shared_intermediate": intermediate * optional(config, "n_shared_experts", int, 0, zero=True),
    }


def _same_window(config: Config) -> tuple[int | None, ...]:
    """One sliding window for all layers."""
    return (optional(config, "sliding_window", int),) * bounded(config, "num_hidden_layers")


def _windows(config: Config, layers: int) -> tuple[int | None, ...]:
    """Sliding windows in the layers that `layer_types` names, by default in every second of the first
    `max_window_layers`."""
    if not flag(config, "use_sliding_window", default=False):
        return (None,) * layers
    types = config.get("layer_types")
    if types is None:
        end = optional(config, "max_window_layers", int, 28, zero=True)
        sliding = [i % 2 == 0 and i < end for i in range(layers)]
    elif isinstance(types, list) and len(types) == layers:
        sliding = [kind == "sliding_attention" for kind in types]
    else:
        raise ModelError(f"config.json: layer_types must name {layers} layers")
    window = required(config, "sliding_window", int)
    return tuple(window if slides else None for slides in sliding)


def _scaled_rope(config: Config) -> Rope:
    """Phi-3.5-MoE's, as in transformers: the short factors for every length, a scale for each side of the
    switch."""
    base = rope(config, theta=1e6)
    if base.kind == "default":
        return base
    # transformers takes the number of positions from the parameters, not from the config itself.
    _, parameters = rope_parameters(config)
    switch = original_positions({**config, "original_max_position_embeddings": None})
    short, long = (float(required(parameters, f"{name}_mscale", float)) for name in ("short", "long"))
    return Rope(base.kind, base.theta, switch, (short, long))


def _latent(config: Config) -> Latent:
    heads = required(config, "num_attention_heads", int)
    expect(config, "num_key_value_heads", heads)
    nope_dim = required(config, "qk_nope_head_dim", int)
    rope_dim = required(config, "qk_rope_head_dim", int)
    return Latent(
        heads=heads,
        query_rank=optional(config, "q_lora_rank", int),
        rank=required(config, "kv_lora_rank", int),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=required(config, "v_head_dim", int),
        bias=flag(config, "attention_bias", default=False),
        scale=(nope_dim + rope_dim) ** -0.5 * _yarn_scale(config) ** 2,
    )


def _yarn_scale(config: Config) -> float:
    """YaRN's factor of queries and of keys, where the config wants it applied to the scores."""
    kind, parameters = rope_parameters(config)
    strength = optional(parameters, "mscale_all_dim", float, 0.0, zero=True)
    if kind == "default" or strength == 0:
        return 1.0
    factor = required(parameters, "factor", float)
    return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0


def _limited_softmax(config: Config, routed: int) -> Softmax:
    expect(config, "topk_method", "greedy", "group_limited_greedy")
    k = required(config, "num_experts_per_tok", int)
    scale = optional(config, "routed_scaling_factor", float, 1.0)
    groups = best = 1
    if config.get("topk_method") == "group_limited_greedy":
        groups, best = required(config, "n_group", int), required(config, "topk_group", int)
        if routed % groups or best > groups:
            raise ModelError(f"config.json: {routed} experts have no {best} best of {groups} equal groups")
    return Softmax(k, rescaled=False, scale=scale, groups=groups, best_groups=best)


FAMILIES = (
    Architecture("mixtral", _mixtral, moe_name="block_sparse_moe", matrix_names=("w1", "w3", "w2")),
    # LayerNorm, biases, SparseMixer routing, and rotary cosines and sines with their own scales.
    Architecture(
        "phimoe",
        _phimoe,
        moe_name="block_sparse_moe",
        fused_router_name="router",
        matrix_names=("w1", "w3", "w2"),
    ),
    # Biases of queries, keys and values; a gated shared expert; some layers dense.
    Architecture("qwen2_moe", _qwen2_moe),
    # Queries and keys are normalised head by head; no shared experts.
    Architecture("qwen3_moe", _qwen3_moe),
    # Multi-head latent attention, dense first layers, shared experts, routing limited to the best groups.
    Architecture("deepseek_v2", _deepseek_v2, shared_name="shared_experts"),
    # Queries and keys are normalised over all heads together and may be clipped.
    Architecture("olmoe", _olmoe),
    # Most layers are recurrent, by the gated delta rule; the others have gates behind their attention.
    Architecture("qwen3_next", _qwen3_next, joined=True, norms_plus=1.0, unread=("mtp.",)),
    # The same with other projections. Beside the text model it may have one for images, which is left aside.
    Architecture("qwen3_5_moe_text", _qwen3_5_moe, norms_plus=1.0, unread=("mtp.",)),
    Architecture(
        "qwen3_5_moe",
        _qwen3_5_moe,
        prefix="model.language_model",
        norms_plus=1.0,
        unread=("mtp.", "model.visual."),
    ),
)
MAX_SIZE = 1 << 24  # numbers of a vector; the largest known vocabulary has a fiftieth
ARCHITECTURES = {family.model_type: family for family in FAMILIES}


def architecture_of(config: Config) -> Architecture:
    """The model family. Raises ModelError for an unknown one."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"config.json: architecture {shown(kind)} is not supported (only {known})")
    return ARCHITECTURES[kind]


def model_spec(config: Config) -> ModelSpec:
    """The checked spec. Raises ModelError for an unknown family, or a variant that is not supported."""
    architecture, config = architecture_of(config), text_config(config)
    spec = architecture.spec(config)
    if spec.top_k > spec.experts:
        raise ModelError(f"config.json: {spec.top_k} experts a token, but only {spec.experts} a layer")
    if not spec.moe_layers:
        raise ModelError("config.json: no layer has experts; Tandem is for mixture-of-experts models")
    _check_sizes(spec)
    attention = spec.attention
    if isinstance(attention, GroupedQuery) and attention.heads % attention.kv_heads:
        raise ModelError(
            f"config.json: {attention.heads} heads cannot share {attention.kv_heads} key/value heads"
            f" of {attention.head_dim} numbers"
        )
    if not (isinstance(attention, GroupedQuery) and attention.rotary):
        refuse_partial_rotary(config)
    if attention.rope_dim % 2:
        raise ModelError(f"config.json: RoPE rotates pairs of numbers, and a head has {attention.rope_dim}")
    check_rope(config, attention.rope_dim)
    return spec


def _check_sizes(spec: ModelSpec) -> None:
    """Refuse sizes for which even a plan of the memory takes long."""
    attention = spec.attention
    sizes = {
        "hidden size": spec.hidden,
        "intermediate size": max(spec.intermediate, spec.dense_intermediate, spec.shared_intermediate),
        "vocabulary": spec.vocabulary,
        "attention's size": attention.heads * attention.qk_dim,
    }
    for name, size in sizes.items():
        if size > MAX_SIZE:
            raise ModelError(
                f"config.json: a model whose {name} is {size} makes no sense (at most {MAX_SIZE})"
            )


def expert_shape(config: Config, tile: int | None, tile_format: TileFormat) -> ExpertShape:
    """The shape of the routed experts, in tiles of `tile` channels (at most a whole expert) or of a suitable
    number. Raises UsageError where the format has no such tiles."""
    spec = model_spec(config)
    group = tile_format.granularity
    if tile is None:
        tile = suitable_tile(spec.hidden, spec.intermediate, tile_format)
    elif tile % group:
        raise UsageError(
            f"--tile {tile}: --format {tile_format.name} has tiles of whole groups of {group} channels; "
            f"use a multiple, like {_up(tile, group)}"
        )
    tile = min(tile, _up(spec.intermediate, group))
    return ExpertShape(len(spec.moe_layers), spec.experts, spec.hidden, spec.intermediate, tile)


def _up(number: int, step: int) -> int:
    """Rounded up to a multiple of `step`."""
    return -(-number // step) * step
