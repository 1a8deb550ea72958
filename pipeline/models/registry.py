"""A config's model family of our own, and its checked ModelSpec."""

from __future__ import annotations

from dataclasses import replace

from pipeline.errors import ModelError
from pipeline.models.architecture import Architecture
from pipeline.models.config_keys import (
    DRAFTS,
    Config,
    check_rope,
    shown,
    text_config,
)
from pipeline.models.families import FAMILIES
from pipeline.models.spec import GroupedQuery, ModelSpec

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
    drafts = config.get(DRAFTS) is True
    architecture, config = architecture_of(config), text_config(config)
    spec = replace(architecture.spec(config), drafts=drafts)
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
    whole = attention.head_dim if isinstance(attention, GroupedQuery) else attention.rope_dim
    check_rope(config, attention.rope_dim, whole)
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
