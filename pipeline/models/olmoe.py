"""OLMoE: queries and keys are normalised over all heads together and may be clipped."""

from __future__ import annotations

from pipeline.models.architecture import Architecture
from pipeline.models.common_config import common, experts, grouped_query, rope
from pipeline.models.config_keys import Config, expect, flag, optional, required
from pipeline.models.routing import Softmax
from pipeline.models.spec import ModelSpec


class Olmoe(Architecture):
    model_type = "olmoe"

    def spec(self, config: Config) -> ModelSpec:
        expect(config, "sliding_window", (None,))
        fields = common(config)
        layers = fields["layers"]
        bias = flag(config, "attention_bias", default=False)
        clip = optional(config, "clip_qkv", float)
        return ModelSpec(
            **fields,
            moe_layers=tuple(range(layers)),
            intermediate=required(config, "intermediate_size", int),
            experts=experts(config, "num_experts", "num_local_experts"),
            attention=grouped_query(config, bias=bias, output_bias=bias, qk_norm="all", clip=clip),
            windows=(None,) * layers,
            rope=rope(config),
            router=Softmax(fields["top_k"], rescaled=flag(config, "norm_topk_prob", default=False)),
        )
