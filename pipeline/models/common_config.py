"""The parts of config.json that most families share, read into the parts of a ModelSpec."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pipeline.errors import ModelError
from pipeline.models.config_keys import Config, expect, flag, optional, required, shown
from pipeline.models.spec import GroupedQuery, Rope

# Kinds of rotary embedding that require a factor. Other requirements are checked by transformers'
# initialisers when the tables are made.
SCALED = ("linear", "dynamic", "yarn", "llama3")
ROPE_KINDS = ("default", *SCALED, "longrope")
MAX_COUNT = 10_000  # layers, or experts a layer


def common(config: Config) -> dict[str, Any]:
    """The fields of ModelSpec that have the same keys in every family."""
    expect(config, "hidden_act", ("silu",))
    return {
        "layers": bounded(config, "num_hidden_layers"),
        "hidden": required(config, "hidden_size", int),
        "top_k": required(config, "num_experts_per_tok", int),
        "vocabulary": required(config, "vocab_size", int),
        "max_positions": required(config, "max_position_embeddings", int),
        "norm_eps": float(required(config, "rms_norm_eps", float)),
        "tied_embeddings": flag(config, "tie_word_embeddings", False),
    }


def experts(config: Config, *keys: str) -> int:
    """The number of experts a layer, under the first of these keys that is present."""
    return bounded(config, next((key for key in keys if key in config), keys[0]))


def bounded(config: Config, key: str) -> int:
    """A positive number of layers or experts, small enough to list them all."""
    number = int(required(config, key, int))
    if number > MAX_COUNT:
        raise ModelError(f"config.json: {key} is {number}; more than {MAX_COUNT} make no sense")
    return number


def grouped_query(
    config: Config,
    *,
    bias: bool = False,
    output_bias: bool = False,
    qk_norm: Literal["", "head", "all"] = "",
    clip: float | None = None,
) -> GroupedQuery:
    heads = required(config, "num_attention_heads", int)
    return GroupedQuery(
        heads=heads,
        kv_heads=required(config, "num_key_value_heads", int),
        head_dim=optional(config, "head_dim", int) or required(config, "hidden_size", int) // heads,
        bias=bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        clip=clip,
    )


def rope(config: Config, theta: float = 1e4) -> Rope:
    """`theta`: the family's default."""
    kind, parameters = rope_parameters(config)
    base = optional(parameters, "rope_theta", float) or optional(config, "rope_theta", float, theta)
    return Rope(kind, float(base), original_positions(config) if kind == "longrope" else None)


def rope_parameters(config: Config) -> tuple[str, Mapping[str, Any]]:
    """The kind of rotary embedding and its parameters, under the key of transformers 4 or of version 5."""
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    parameters = config.get(name) or {}
    if not isinstance(parameters, Mapping) or any(isinstance(v, Mapping) for v in parameters.values()):
        raise ModelError(f"config.json: {name} must be a mapping without further mappings in it")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ROPE_KINDS:
        known = ", ".join(ROPE_KINDS)
        raise ModelError(f"config.json: RoPE of type {shown(kind)} is not supported (only {known})")
    expect(parameters, "partial_rotary_factor", (None, 1, 1.0))
    expect(config, "partial_rotary_factor", (None, 1, 1.0))
    if kind in SCALED:
        required(parameters, "factor", float)
    return kind, parameters


def original_positions(config: Config) -> int:
    """The context length of pre-training, which the rotary embedding extends."""
    key = "original_max_position_embeddings"
    _, parameters = rope_parameters(config)
    found = optional(config, key, int) or optional(parameters, key, int)
    return int(found or required(config, "max_position_embeddings", int))


def check_rope(config: Config, rope_dim: int) -> None:
    """Raises ModelError for rotary parameters that do not fit heads with `rope_dim` rotated numbers. All else
    is checked by transformers when the tables are made."""
    kind, parameters = rope_parameters(config)
    for key in ("factor", "attention_factor", "beta_fast", "beta_slow"):
        optional(parameters, key, float)
    optional(parameters, "original_max_position_embeddings", int)
    for key in ("short_factor", "long_factor") if kind == "longrope" else ():
        factors = parameters.get(key)
        if not isinstance(factors, list) or len(factors) != rope_dim // 2 or not all(map(_positive, factors)):
            raise ModelError(f"config.json: RoPE of type {kind!r} needs {rope_dim // 2} numbers as {key}")


def sparse_layers(config: Config, layers: int) -> tuple[int, ...]:
    """The layers with experts: every `decoder_sparse_step`-th, except `mlp_only_layers`."""
    step = optional(config, "decoder_sparse_step", int, 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise ModelError(f"config.json: mlp_only_layers must be a list of layers, it is {shown(dense)}")
    dense = frozenset(dense)
    return tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
