"""DeepSeek-V2 and V2-Lite: multi-head latent attention, dense first layers, shared experts, and routing
limited to the best groups of experts."""

from __future__ import annotations

import math

from pipeline.errors import ModelError
from pipeline.models.architecture import Architecture
from pipeline.models.common_config import common, experts, rope, rope_parameters
from pipeline.models.config_keys import Config, count, expect, flag, non_negative, optional, required
from pipeline.models.routing import Softmax
from pipeline.models.spec import Latent, ModelSpec


class DeepseekV2(Architecture):
    model_type = "deepseek_v2"
    shared_name = "shared_experts"

    def spec(self, config: Config) -> ModelSpec:
        expect(config, "mlp_bias", (False, None))
        expect(config, "norm_topk_prob", (False, None))  # DeepSeek's code and transformers disagree on true
        expect(config, "scoring_func", ("softmax", None))
        expect(config, "moe_layer_freq", (1, None))
        expect(config, "sliding_window", (None,))
        fields = common(config)
        layers = fields["layers"]
        routed = experts(config, "n_routed_experts", "num_experts")
        intermediate = required(config, "moe_intermediate_size", int)
        return ModelSpec(
            **fields,
            moe_layers=tuple(range(count(config, "first_k_dense_replace", default=0), layers)),
            intermediate=intermediate,
            experts=routed,
            attention=_attention(config),
            windows=(None,) * layers,
            rope=rope(config),
            router=_router(config, routed, fields["top_k"]),
            dense_intermediate=required(config, "intermediate_size", int),
            shared_intermediate=intermediate * count(config, "n_shared_experts", default=0),
        )


def _attention(config: Config) -> Latent:
    heads = required(config, "num_attention_heads", int)
    expect(config, "num_key_value_heads", (heads, None))
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
    strength = non_negative(parameters, "mscale_all_dim", default=0.0)
    if kind == "default" or strength == 0:
        return 1.0
    factor = required(parameters, "factor", float)
    return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0


def _router(config: Config, routed: int, k: int) -> Softmax:
    expect(config, "topk_method", ("greedy", "group_limited_greedy"))
    scale = optional(config, "routed_scaling_factor", float, 1.0)
    groups = best = 1
    if config.get("topk_method") == "group_limited_greedy":
        groups, best = required(config, "n_group", int), required(config, "topk_group", int)
        if routed % groups or best > groups:
            raise ModelError(f"config.json: {routed} experts have no {best} best of {groups} equal groups")
    return Softmax(k, rescaled=False, scale=scale, groups=groups, best_groups=best)
