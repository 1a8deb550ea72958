"""From a config.json to its architecture, and to the shape of its experts."""

from __future__ import annotations

from pipeline.errors import ModelError, UsageError
from pipeline.models.architecture import Architecture
from pipeline.models.config_keys import Config
from pipeline.models.deepseek_v2 import DeepseekV2
from pipeline.models.mixtral import Mixtral
from pipeline.models.olmoe import Olmoe
from pipeline.models.phimoe import Phimoe
from pipeline.models.qwen2_moe import Qwen2Moe
from pipeline.models.qwen3_moe import Qwen3Moe
from pipeline.models.reading import check_rope
from pipeline.models.spec import GroupedQuery, ModelSpec
from shm.layout import ExpertShape, TileFormat, suitable_tile

FAMILIES = (Mixtral(), Phimoe(), Qwen2Moe(), Qwen3Moe(), DeepseekV2(), Olmoe())
ARCHITECTURES: dict[str, Architecture] = {family.model_type: family for family in FAMILIES}


def architecture_of(config: Config) -> Architecture:
    """Raises ModelError for an architecture without a class."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"config.json: architecture {kind!r} is not supported; there is {known}")
    return ARCHITECTURES[kind]


def model_spec(config: Config) -> ModelSpec:
    """Raises ModelError for an unknown architecture or a variant that is not supported."""
    spec = architecture_of(config).spec(config)
    if spec.top_k > spec.experts:
        raise ModelError(f"config.json: {spec.top_k} experts a token, but only {spec.experts} a layer")
    if not spec.moe_layers:
        raise ModelError("config.json: no layer has experts; Tandem is for mixture-of-experts models")
    attention = spec.attention
    if isinstance(attention, GroupedQuery) and attention.heads % attention.kv_heads:
        raise ModelError(
            f"config.json: {attention.heads} heads cannot share {attention.kv_heads} key/value heads"
            f" of {attention.head_dim} numbers"
        )
    if attention.rotated % 2:
        raise ModelError(f"config.json: RoPE turns pairs of numbers, and a head has {attention.rotated}")
    check_rope(config, attention.rotated)
    return spec


def expert_shape(config: Config, tile: int | None, tile_format: TileFormat) -> ExpertShape:
    """The routed experts in tiles of `tile` channels, or of a size that suits them; at most one tile holds
    them, filled up to what the format can hold. Raises UsageError where the format has no such tiles."""
    spec = model_spec(config)
    group = tile_format.granularity
    if tile is None:
        tile = suitable_tile(spec.hidden, spec.intermediate, tile_format)
    elif tile % group:
        raise UsageError(
            f"--tile {tile}: --format {tile_format.name} has tiles of whole groups of {group} channels; "
            f"use a multiple, like {_up(tile, group)}"
        )
    tile = min(tile, _up(spec.intermediate, group))
    return ExpertShape(len(spec.moe_layers), spec.experts, spec.hidden, spec.intermediate, tile)


def _up(number: int, step: int) -> int:
    """The first multiple of `step` that is not below."""
    return -(-number // step) * step
