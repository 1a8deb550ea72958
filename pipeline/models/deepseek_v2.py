"""DeepSeek-V2 and V2-Lite: latent attention, dense layers first, shared experts, routing among the best
groups of experts."""

from __future__ import annotations

import math

from pipeline.errors import ModelError
from pipeline.models.architecture import Architecture
from pipeline.models.config_keys import Config, count, expect, flag, from_zero, optional, required
from pipeline.models.reading import common, experts, rope, rope_parameters
from pipeline.models.routing import Softmax
from pipeline.models.spec import Latent, ModelSpec


class DeepseekV2(Architecture):
    model_type = "deepseek_v2"
    shared = "shared_experts"

    def spec(self, config: Config) -> ModelSpec:
        expect(config, "mlp_bias", (False, None))
        expect(config, "norm_topk_prob", (False, None))  # makers and reference disagree on what it would do
        expect(config, "scoring_func", ("softmax", None))
        expect(config, "moe_layer_freq", (1, None))
        expect(config, "sliding_window", (None,))
        shared = common(config)
        layers = shared["layers"]
        routed = experts(config, "n_routed_experts", "num_experts")
        wide = required(config, "moe_intermediate_size", int)
        return ModelSpec(
            **shared,
            moe_layers=tuple(range(count(config, "first_k_dense_replace", 0), layers)),
            intermediate=wide,
            experts=routed,
            attention=_attention(config),
            windows=(None,) * layers,
            rope=rope(config),
            router=_router(config, routed, shared["top_k"]),
            dense_intermediate=required(config, "intermediate_size", int),
            shared_intermediate=wide * count(config, "n_shared_experts", 0),
        )


def _attention(config: Config) -> Latent:
    heads = required(config, "num_attention_heads", int)
    expect(config, "num_key_value_heads", (heads, None))
    plain = required(config, "qk_nope_head_dim", int)
    rotated = required(config, "qk_rope_head_dim", int)
    return Latent(
        heads=heads,
        query_rank=optional(config, "q_lora_rank", int),
        rank=required(config, "kv_lora_rank", int),
        plain=plain,
        rotated=rotated,
        value=required(config, "v_head_dim", int),
        bias=flag(config, "attention_bias", False),
        scale=(plain + rotated) ** -0.5 * _stretch(config) ** 2,
    )


def _stretch(config: Config) -> float:
    """YaRN's factor on queries and keys each, where the config asks for it in attention's scale."""
    kind, parameters = rope_parameters(config)
    strength = from_zero(parameters, "mscale_all_dim", 0.0)
    if kind == "default" or strength == 0:
        return 1.0
    factor = required(parameters, "factor", float)
    return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0


def _router(config: Config, routed: int, k: int) -> Softmax:
    expect(config, "topk_method", ("greedy", "group_limited_greedy"))
    scale = optional(config, "routed_scaling_factor", float)
    groups = best = 1
    if config.get("topk_method") == "group_limited_greedy":
        groups, best = required(config, "n_group", int), required(config, "topk_group", int)
        if routed % groups or best > groups:
            raise ModelError(f"config.json: {routed} experts have no {best} best of {groups} equal groups")
    return Softmax(k, rescaled=False, scale=1.0 if scale is None else scale, groups=groups, best_groups=best)
