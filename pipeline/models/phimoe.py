"""Phi-3.5-MoE: LayerNorm, biases, sparsemixer routing, and a rotary embedding whose cosines and sines have
scales of their own."""

from __future__ import annotations

from pipeline.models.architecture import Architecture
from pipeline.models.config_keys import Config, expect, flag, from_zero, optional, required
from pipeline.models.reading import common, experts, grouped_query, rope, rope_parameters, trained_positions
from pipeline.models.routing import SparseMixer
from pipeline.models.spec import ModelSpec, Rope


class Phimoe(Architecture):
    model_type = "phimoe"
    moe = "block_sparse_moe"
    fused_router = "router"
    matrices = ("w1", "w3", "w2")

    def spec(self, config: Config) -> ModelSpec:
        expect(config, "num_experts_per_tok", (2,))
        shared = common(config)
        layers = shared["layers"]
        bias = flag(config, "attention_bias", False)
        return ModelSpec(
            **shared,
            moe_layers=tuple(range(layers)),
            intermediate=required(config, "intermediate_size", int),
            experts=experts(config, "num_local_experts"),
            attention=grouped_query(config, bias=bias, output_bias=bias),
            windows=(optional(config, "sliding_window", int),) * layers,
            rope=_rope(config),
            router=SparseMixer(from_zero(config, "router_jitter_noise", 0.01)),
            layer_norm=True,
            head_bias=flag(config, "lm_head_bias", False),
        )


def _rope(config: Config) -> Rope:
    """transformers, our reference, takes the short factors for every length and changes the scale alone."""
    plain = rope(config, 1e6)
    if plain.kind == "default":
        return plain
    # Its config class keeps the number of positions with these parameters, whatever the config says beside.
    _, parameters = rope_parameters(config)
    switch = trained_positions({**config, "original_max_position_embeddings": None})
    scales = tuple(float(required(parameters, f"{name}_mscale", float)) for name in ("short", "long"))
    return Rope(plain.kind, plain.theta, switch, (scales[0], scales[1]))
