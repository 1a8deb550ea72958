"""GLM-4.7-Flash: DeepSeek-V3's layers, of which a list says which are dense."""

from __future__ import annotations

from typing import Any

from pipeline.errors import ModelError
from pipeline.models.architecture import Architecture
from pipeline.models.config_keys import Config, bounded, expect
from pipeline.models.families.deepseek_v3 import latent_with_shared_experts


def _read(config: Config) -> dict[str, Any]:
    layers, kinds = bounded(config, "num_hidden_layers"), config.get("mlp_layer_types")
    if kinds is None:
        expect(config, "first_k_dense_replace", 1)
        kinds = ["dense"] + ["sparse"] * (layers - 1)
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or not all(k in ("dense", "sparse") for k in kinds)
    ):
        raise ModelError(f"config.json: mlp_layer_types must name {layers} layers, dense or sparse each")
    return latent_with_shared_experts(config, tuple(i for i, kind in enumerate(kinds) if kind == "sparse"))


FAMILY = Architecture(
    "glm4_moe_lite", _read, shared_name="shared_experts", choice_bias="gate.e_score_correction_bias"
)
