"""Phi-3.5-MoE: LayerNorm, biases, SparseMixer routing, and rotary cosines and sines with their own scales."""

from __future__ import annotations

from pipeline.models.architecture import Architecture
from pipeline.models.common_config import (
    common,
    experts,
    grouped_query,
    original_positions,
    rope,
    rope_parameters,
)
from pipeline.models.config_keys import Config, expect, flag, non_negative, optional, required
from pipeline.models.routing import SparseMixer
from pipeline.models.spec import ModelSpec, Rope


class Phimoe(Architecture):
    model_type = "phimoe"
    moe_name = "block_sparse_moe"
    fused_router_name = "router"
    matrix_names = ("w1", "w3", "w2")

    def spec(self, config: Config) -> ModelSpec:
        expect(config, "num_experts_per_tok", (2,))
        fields = common(config)
        layers = fields["layers"]
        bias = flag(config, "attention_bias", default=False)
        return ModelSpec(
            **fields,
            moe_layers=tuple(range(layers)),
            intermediate=required(config, "intermediate_size", int),
            experts=experts(config, "num_local_experts"),
            attention=grouped_query(config, bias=bias, output_bias=bias),
            windows=(optional(config, "sliding_window", int),) * layers,
            rope=_rope(config),
            router=SparseMixer(non_negative(config, "router_jitter_noise", default=0.01)),
            layer_norm=True,
            head_bias=flag(config, "lm_head_bias", default=False),
        )


def _rope(config: Config) -> Rope:
    """As in transformers: the short factors for every length, and a scale for each side of the switch."""
    base = rope(config, theta=1e6)
    if base.kind == "default":
        return base
    # transformers takes the number of positions from the parameters, not from the config itself.
    _, parameters = rope_parameters(config)
    switch = original_positions({**config, "original_max_position_embeddings": None})
    short, long = (float(required(parameters, f"{name}_mscale", float)) for name in ("short", "long"))
    return Rope(base.kind, base.theta, switch, (short, long))
