"""Mixtral: grouped-query attention without biases, E experts a layer, softmax over the chosen k."""

from __future__ import annotations

from pipeline.models.architecture import Architecture
from pipeline.models.config_keys import Config, expect, optional, required
from pipeline.models.reading import common, experts, grouped_query, rope
from pipeline.models.routing import Softmax
from pipeline.models.spec import ModelSpec


class Mixtral(Architecture):
    model_type = "mixtral"
    moe = "block_sparse_moe"
    matrices = ("w1", "w3", "w2")

    def spec(self, config: Config) -> ModelSpec:
        expect(config, "attention_bias", (False, None))
        shared = common(config)
        layers = shared["layers"]
        return ModelSpec(
            **shared,
            moe_layers=tuple(range(layers)),
            intermediate=required(config, "intermediate_size", int),
            experts=experts(config, "num_local_experts", "num_experts"),
            attention=grouped_query(config),
            windows=(optional(config, "sliding_window", int),) * layers,
            rope=rope(config, 1e6),
            router=Softmax(shared["top_k"], rescaled=True),
        )
