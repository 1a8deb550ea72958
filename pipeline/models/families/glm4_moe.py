"""GLM-4.5 to 4.7: grouped-query attention that rotates half of each head, and DeepSeek-V3's router and shared
experts."""

from __future__ import annotations

from typing import Any

from pipeline.models.architecture import Architecture
from pipeline.models.config_keys import (
    Config,
    bounded,
    experts,
    flag,
    grouped_query,
    optional,
    required,
    sigmoid_router,
)


def _read(config: Config) -> dict[str, Any]:
    dense = optional(config, "first_k_dense_replace", int, 1, zero=True)
    intermediate = required(config, "moe_intermediate_size", int)
    routed = experts(config, "n_routed_experts", "num_local_experts")
    return {
        "moe_layers": tuple(range(dense, bounded(config, "num_hidden_layers"))),
        "intermediate": intermediate,
        "experts": routed,
        "attention": grouped_query(
            config,
            bias=flag(config, "attention_bias", False),
            qk_norm="head" if flag(config, "use_qk_norm", False) else "",
            rotated=0.5,
        ),
        "router": sigmoid_router(config, routed),
        "dense_intermediate": required(config, "intermediate_size", int),
        "shared_intermediate": intermediate * optional(config, "n_shared_experts", int, 1),
        "extra_layers": 1,
    }


FAMILY = Architecture(
    "glm4_moe", _read, shared_name="shared_experts", choice_bias="gate.e_score_correction_bias"
)
