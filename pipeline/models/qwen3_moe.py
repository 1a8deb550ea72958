"""Qwen3-MoE: queries and keys are normalised head by head; no shared experts."""

from __future__ import annotations

from pipeline.models.architecture import Architecture
from pipeline.models.common_config import common, experts, grouped_query, rope, sparse_layers
from pipeline.models.config_keys import Config, flag, required
from pipeline.models.routing import Softmax
from pipeline.models.spec import ModelSpec


class Qwen3Moe(Architecture):
    model_type = "qwen3_moe"

    def spec(self, config: Config) -> ModelSpec:
        fields = common(config)
        layers = fields["layers"]
        bias = flag(config, "attention_bias", default=False)
        sliding = flag(config, "use_sliding_window", default=False)
        return ModelSpec(
            **fields,
            moe_layers=sparse_layers(config, layers),
            intermediate=required(config, "moe_intermediate_size", int),
            experts=experts(config, "num_experts", "num_local_experts"),
            attention=grouped_query(config, bias=bias, output_bias=bias, qk_norm="head"),
            windows=(required(config, "sliding_window", int) if sliding else None,) * layers,
            rope=rope(config),
            router=Softmax(fields["top_k"], rescaled=flag(config, "norm_topk_prob", default=False)),
            dense_intermediate=required(config, "intermediate_size", int),
        )
