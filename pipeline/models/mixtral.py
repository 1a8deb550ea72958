"""Mixtral: grouped-query attention without biases; weights are softmax over the chosen k experts."""

from __future__ import annotations

from pipeline.models.architecture import Architecture
from pipeline.models.common_config import common, experts, grouped_query, rope
from pipeline.models.config_keys import Config, expect, optional, required
from pipeline.models.routing import Softmax
from pipeline.models.spec import ModelSpec


class Mixtral(Architecture):
    model_type = "mixtral"
    moe_name = "block_sparse_moe"
    matrix_names = ("w1", "w3", "w2")

    def spec(self, config: Config) -> ModelSpec:
        expect(config, "attention_bias", (False, None))
        fields = common(config)
        layers = fields["layers"]
        return ModelSpec(
            **fields,
            moe_layers=tuple(range(layers)),
            intermediate=required(config, "intermediate_size", int),
            experts=experts(config, "num_local_experts", "num_experts"),
            attention=grouped_query(config),
            windows=(optional(config, "sliding_window", int),) * layers,
            rope=rope(config, theta=1e6),
            router=Softmax(fields["top_k"], rescaled=True),
        )
