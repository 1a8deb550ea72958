"""Qwen1.5-MoE and Qwen2-MoE: biases of queries, keys and values; a gated shared expert; some layers dense."""

from __future__ import annotations

from pipeline.errors import ModelError
from pipeline.models.architecture import Architecture
from pipeline.models.common_config import common, experts, grouped_query, rope, sparse_layers
from pipeline.models.config_keys import Config, count, flag, required
from pipeline.models.routing import Softmax
from pipeline.models.spec import ModelSpec


class Qwen2Moe(Architecture):
    model_type = "qwen2_moe"

    def spec(self, config: Config) -> ModelSpec:
        fields = common(config)
        layers = fields["layers"]
        return ModelSpec(
            **fields,
            moe_layers=sparse_layers(config, layers),
            intermediate=required(config, "moe_intermediate_size", int),
            experts=experts(config, "num_experts"),
            attention=grouped_query(config, bias=flag(config, "qkv_bias", default=True)),
            windows=_windows(config, layers),
            rope=rope(config),
            router=Softmax(fields["top_k"], rescaled=flag(config, "norm_topk_prob", default=False)),
            dense_intermediate=required(config, "intermediate_size", int),
            shared_intermediate=required(config, "shared_expert_intermediate_size", int),
            shared_gate=True,
        )


def _windows(config: Config, layers: int) -> tuple[int | None, ...]:
    """Sliding windows in the layers that `layer_types` names, by default in every second of the first
    `max_window_layers`."""
    if not flag(config, "use_sliding_window", default=False):
        return (None,) * layers
    types = config.get("layer_types")
    if types is None:
        end = count(config, "max_window_layers", default=28)
        sliding = [i % 2 == 0 and i < end for i in range(layers)]
    elif isinstance(types, list) and len(types) == layers:
        sliding = [kind == "sliding_attention" for kind in types]
    else:
        raise ModelError(f"config.json: layer_types must name {layers} layers")
    window = required(config, "sliding_window", int)
    return tuple(window if slides else None for slides in sliding)
