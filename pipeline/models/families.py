"""The model families of our own: what each reads of config.json, and the names of its tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.errors import ModelError
from pipeline.models.architecture import Architecture
from pipeline.models.config_keys import (
    Config,
    bounded,
    check_groups,
    expect,
    experts,
    flag,
    grouped_query,
    latent,
    layer_kinds,
    optional,
    original_positions,
    required,
    rope,
    rope_parameters,
    sigmoid_router,
    sparse_layers,
)
from pipeline.models.routing import Scored, Softmax, SparseMixer
from pipeline.models.spec import GatedDelta, GroupedQuery, Rope
from shm.expert_math import ExpertMath, Glu


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
    return grouped_query(config, bias=bias, output_bias=bias, qk_norm="head", rotated=0.25, gated=True)


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
        "attention": latent(config),
        "router": _limited_softmax(config, routed),
        "dense_intermediate": required(config, "intermediate_size", int),
        "shared_intermediate": intermediate * optional(config, "n_shared_experts", int, 0, zero=True),
    }


def _deepseek_v3(config: Config) -> dict[str, Any]:
    """DeepSeek-V3 and Kimi-K2: latent attention, dense first layers, shared experts, and a sigmoid router
    whose choice has a bias and is limited to the best groups."""
    expect(config, "moe_layer_freq", 1)
    dense = optional(config, "first_k_dense_replace", int, 3, zero=True)
    layers = tuple(range(dense, bounded(config, "num_hidden_layers")))
    return _latent_with_shared_experts(config, layers, groups=8, best=4)


def _latent_with_shared_experts(
    config: Config, moe_layers: tuple[int, ...], groups: int = 1, best: int = 1
) -> dict[str, Any]:
    """The fields of a ModelSpec with latent attention and these layers of experts; `groups` and `best`: of
    its router, by default."""
    intermediate = required(config, "moe_intermediate_size", int)
    routed = experts(config, "n_routed_experts", "num_local_experts")
    return {
        "moe_layers": moe_layers,
        "intermediate": intermediate,
        "experts": routed,
        "attention": latent(config),
        "router": sigmoid_router(config, routed, groups, best),
        "dense_intermediate": required(config, "intermediate_size", int),
        "shared_intermediate": intermediate * optional(config, "n_shared_experts", int, 1),
        "extra_layers": _extra_layers(config),
    }


def _extra_layers(config: Config) -> int:
    """The layers behind the last that predict further tokens; some configs do not count the one there is."""
    counted: int = optional(config, "num_nextn_predict_layers", int, 1, zero=True)
    return max(1, counted)


def _glm4_moe(config: Config) -> dict[str, Any]:
    """GLM-4.5 to 4.7: grouped-query attention that rotates half of each head, and DeepSeek-V3's router and
    shared experts."""
    dense = optional(config, "first_k_dense_replace", int, 1, zero=True)
    intermediate = required(config, "moe_intermediate_size", int)
    routed = experts(config, "n_routed_experts", "num_local_experts")
    return {
        "moe_layers": tuple(range(dense, bounded(config, "num_hidden_layers"))),
        "intermediate": intermediate,
        "experts": routed,
        "attention": grouped_query(
            config,
            bias=flag(config, "attention_bias", False),
            qk_norm="head" if flag(config, "use_qk_norm", False) else "",
            rotated=0.5,
        ),
        "router": sigmoid_router(config, routed),
        "dense_intermediate": required(config, "intermediate_size", int),
        "shared_intermediate": intermediate * optional(config, "n_shared_experts", int, 1),
        "extra_layers": _extra_layers(config),
    }


def _glm4_moe_lite(config: Config) -> dict[str, Any]:
    """GLM-4.7-Flash: DeepSeek-V3's layers, of which a list says which are dense."""
    layers, kinds = bounded(config, "num_hidden_layers"), config.get("mlp_layer_types")
    if kinds is None:
        expect(config, "first_k_dense_replace", 1)
        kinds = ["dense"] + ["sparse"] * (layers - 1)
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or not all(k in ("dense", "sparse") for k in kinds)
    ):
        raise ModelError(f"config.json: mlp_layer_types must name {layers} layers, dense or sparse each")
    return _latent_with_shared_experts(config, tuple(i for i, kind in enumerate(kinds) if kind == "sparse"))


def _minimax_m2(config: Config) -> dict[str, Any]:
    """MiniMax-M2: grouped-query attention with queries and keys normalised over all heads, of each of which a
    part is rotated, and a sigmoid router with a bias for the choice."""
    expect(config, "scoring_func", "sigmoid")
    expect(config, "use_routing_bias", True)
    expect(config, "use_qk_norm", True)
    expect(config, "qk_norm_type", "per_layer")
    expect(config, "shared_intermediate_size", 0)
    expect(config, "attn_type_list", [1] * bounded(config, "num_hidden_layers"))  # none of them is linear
    width = optional(config, "head_dim", int, 128)
    share = optional(config, "rotary_dim", int, width) / width
    return {
        "intermediate": required(config, "intermediate_size", int),
        "experts": experts(config, "num_local_experts", "num_experts"),
        "attention": grouped_query({**config, "head_dim": width}, qk_norm="all", rotated=share),
        "rope": rope(config, theta=5e6),
        "router": Scored("sigmoid", required(config, "num_experts_per_tok", int), rescaled=True),
    }


def _gpt_oss(config: Config) -> dict[str, Any]:
    bias, layers = flag(config, "attention_bias", True), bounded(config, "num_hidden_layers")
    limit = float(optional(config, "swiglu_limit", float, 7.0))
    alpha = float(optional(config, "swiglu_alpha", float, 1.702))
    return {
        "intermediate": required(config, "intermediate_size", int),
        "experts": experts(config, "num_local_experts", "num_experts"),
        "attention": grouped_query(config, bias=bias, output_bias=bias, sinks=True),
        "windows": _typed_windows(config, [i % 2 == 0 for i in range(layers)]),
        "rope": _stretched_rope(config),
        "router": Softmax(required(config, "num_experts_per_tok", int), rescaled=True),
        "router_bias": True,
        "math": ExpertMath(Glu(alpha=alpha, gate_max=limit, up_limit=limit, offset=1.0), bias=True),
    }


def _stretched_rope(config: Config) -> Rope:
    """gpt_oss's: YaRN where the config does not say, with numbers that transformers knows."""
    plain = rope(config, theta=150000.0)
    said = config.get("rope_scaling") or config.get("rope_parameters")
    return plain if said else replace(plain, kind="yarn")


def _same_window(config: Config) -> tuple[int | None, ...]:
    """One sliding window for all layers."""
    return (optional(config, "sliding_window", int),) * bounded(config, "num_hidden_layers")


def _windows(config: Config, layers: int) -> tuple[int | None, ...]:
    """Sliding windows in the layers that `layer_types` names, by default in every second of the first
    `max_window_layers`."""
    if not flag(config, "use_sliding_window", default=False):
        return (None,) * layers
    end = optional(config, "max_window_layers", int, 28, zero=True)
    return _typed_windows(config, [i % 2 == 0 and i < end for i in range(layers)])


def _typed_windows(config: Config, sliding: list[bool]) -> tuple[int | None, ...]:
    """Sliding windows in the layers that `layer_types` names; `sliding`: where it is missing."""
    types, layers = config.get("layer_types"), len(sliding)
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise ModelError(f"config.json: layer_types must name {layers} layers")
        for kind in types:
            expect({"layer_types": kind}, "layer_types", "sliding_attention", "full_attention")
        sliding = [kind == "sliding_attention" for kind in types]
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


def _limited_softmax(config: Config, routed: int) -> Softmax:
    expect(config, "topk_method", "greedy", "group_limited_greedy")
    k = required(config, "num_experts_per_tok", int)
    scale = optional(config, "routed_scaling_factor", float, 1.0)
    groups = best = 1
    if config.get("topk_method") == "group_limited_greedy":
        groups, best = required(config, "n_group", int), required(config, "topk_group", int)
        check_groups(routed, groups, best)
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
    # Attention sinks, windows in every second layer, biases everywhere, and experts with clamped gates.
    Architecture("gpt_oss", _gpt_oss, fused_router_name="router", interleaved=True),
    *(
        Architecture(
            name,
            _deepseek_v3,
            shared_name="shared_experts",
            choice_bias="gate.e_score_correction_bias",
            known_as="deepseek_v3",
        )
        for name in ("deepseek_v3", "kimi_k2")
    ),
    Architecture(
        "glm4_moe", _glm4_moe, shared_name="shared_experts", choice_bias="gate.e_score_correction_bias"
    ),
    Architecture(
        "glm4_moe_lite",
        _glm4_moe_lite,
        shared_name="shared_experts",
        choice_bias="gate.e_score_correction_bias",
    ),
    Architecture(
        "minimax_m2",
        _minimax_m2,
        moe_name="block_sparse_moe",
        matrix_names=("w1", "w3", "w2"),
        choice_bias="e_score_correction_bias",
    ),
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
