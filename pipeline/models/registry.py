"""Finds a config.json's model family; makes its ModelSpec and the shape of its experts."""

from __future__ import annotations

from pipeline.errors import ModelError, UsageError
from pipeline.models.architecture import Architecture
from pipeline.models.common_config import check_rope
from pipeline.models.config_keys import Config, shown
from pipeline.models.deepseek_v2 import DeepseekV2
from pipeline.models.mixtral import Mixtral
from pipeline.models.olmoe import Olmoe
from pipeline.models.phimoe import Phimoe
from pipeline.models.qwen2_moe import Qwen2Moe
from pipeline.models.qwen3_moe import Qwen3Moe
from pipeline.models.spec import GroupedQuery, ModelSpec
from shm.layout import ExpertShape, TileFormat, suitable_tile

FAMILIES: tuple[Architecture, ...] = (Mixtral(), Phimoe(), Qwen2Moe(), Qwen3Moe(), DeepseekV2(), Olmoe())
MAX_SIZE = 1 << 24  # numbers of a vector; the largest known vocabulary has a fiftieth
ARCHITECTURES = {family.model_type: family for family in FAMILIES}


def architecture_of(config: Config) -> Architecture:
    """The model family. Raises ModelError for an unknown one."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"config.json: architecture {shown(kind)} is not supported (only {known})")
    return ARCHITECTURES[kind]


def model_spec(config: Config) -> ModelSpec:
    """The checked spec. Raises ModelError for an unknown family, or a variant that is not supported."""
    spec = architecture_of(config).spec(config)
    if spec.top_k > spec.experts:
        raise ModelError(f"config.json: {spec.top_k} experts a token, but only {spec.experts} a layer")
    if not spec.moe_layers:
        raise ModelError("config.json: no layer has experts; Tandem is for mixture-of-experts models")
    _check_sizes(spec)
    attention = spec.attention
    if isinstance(attention, GroupedQuery) and attention.heads % attention.kv_heads:
        raise ModelError(
            f"config.json: {attention.heads} heads cannot share {attention.kv_heads} key/value heads"
            f" of {attention.head_dim} numbers"
        )
    if attention.rope_dim % 2:
        raise ModelError(f"config.json: RoPE rotates pairs of numbers, and a head has {attention.rope_dim}")
    check_rope(config, attention.rope_dim)
    return spec


def _check_sizes(spec: ModelSpec) -> None:
    """Refuse sizes for which even a plan of the memory takes long."""
    attention = spec.attention
    sizes = {
        "hidden size": spec.hidden,
        "intermediate size": max(spec.intermediate, spec.dense_intermediate, spec.shared_intermediate),
        "vocabulary": spec.vocabulary,
        "attention's size": attention.heads * attention.qk_dim,
    }
    for name, size in sizes.items():
        if size > MAX_SIZE:
            raise ModelError(
                f"config.json: a model whose {name} is {size} makes no sense (at most {MAX_SIZE})"
            )


def expert_shape(config: Config, tile: int | None, tile_format: TileFormat) -> ExpertShape:
    """The shape of the routed experts, in tiles of `tile` channels (at most a whole expert) or of a suitable
    number. Raises UsageError where the format has no such tiles."""
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
    """Rounded up to a multiple of `step`."""
    return -(-number // step) * step
