"""MiniMax-M2: grouped-query attention with queries and keys normalised over all heads, of each of which a
part is rotated, and a sigmoid router with a bias for the choice."""

from __future__ import annotations

from typing import Any

from pipeline.models.architecture import Architecture
from pipeline.models.config_keys import (
    Config,
    bounded,
    expect,
    experts,
    grouped_query,
    optional,
    required,
    rope,
)
from pipeline.models.routing import Scored


def _read(config: Config) -> dict[str, Any]:
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


FAMILY = Architecture(
    "minimax_m2",
    _read,
    moe_name="block_sparse_moe",
    matrix_names=("w1", "w3", "w2"),
    choice_bias="e_score_correction_bias",
)
