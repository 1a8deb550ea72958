"""DeepSeek-V3 and Kimi-K2: latent attention, dense first layers, shared experts, and a sigmoid router whose
choice has a bias and is limited to the best groups."""

from __future__ import annotations

from typing import Any

from pipeline.models.architecture import Architecture
from pipeline.models.config_keys import (
    Config,
    bounded,
    expect,
    experts,
    latent,
    optional,
    required,
    sigmoid_router,
)


def _read(config: Config) -> dict[str, Any]:
    expect(config, "moe_layer_freq", 1)
    dense = optional(config, "first_k_dense_replace", int, 3, zero=True)
    layers = tuple(range(dense, bounded(config, "num_hidden_layers")))
    return latent_with_shared_experts(config, layers, groups=8, best=4)


def latent_with_shared_experts(
    config: Config, moe_layers: tuple[int, ...], groups: int = 1, best: int = 1
) -> dict[str, Any]:
    """The fields of a ModelSpec with latent attention and these layers of experts; `groups` and `best`: of
    its router, by default."""
    intermediate = required(config, "moe_intermediate_size", int)
    routed = experts(config, "n_routed_experts", "num_local_experts")
    return {
        "moe_layers": moe_layers,
        "intermediate": intermediate,
        "experts": routed,
        "attention": latent(config),
        "router": sigmoid_router(config, routed, groups, best),
        "dense_intermediate": required(config, "intermediate_size", int),
        "shared_intermediate": intermediate * optional(config, "n_shared_experts", int, 1),
        "extra_layers": 1,
    }


FAMILIES = tuple(
    Architecture(
        name,
        _read,
        shared_name="shared_experts",
        choice_bias="gate.e_score_correction_bias",
        known_as="deepseek_v3",
    )
    for name in ("deepseek_v3", "kimi_k2")
)
