"""Typed reads of config.json: a key is required or has a default; unsupported variants are refused by name,
in a ModelError of one line that begins with `config.json:`. Then the parts that most families share, as
fields of a ModelSpec."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Literal

from pipeline.errors import ModelError
from pipeline.models.routing import Scored, Softmax
from pipeline.models.spec import GroupedQuery, Latent, Rope

Config = Mapping[str, Any]
MAX_INT, MAX_FLOAT = 1 << 31, 1e38  # beyond them, computing with it fails
MAX_SHOWN = 80  # characters of a value in an error
# Kinds of rotary embedding that require a factor. Other requirements are checked by transformers'
# initialisers when the tables are made.
SCALED = ("linear", "dynamic", "yarn", "llama3")
ROPE_KINDS = ("default", *SCALED, "longrope")
MAX_COUNT = 10_000  # layers, or experts a layer
LAYERS = re.compile(r"(^|_)layers?$")  # the end of a key that counts layers
# A key of ours: the checkpoint has a layer that drafts, which is to be read. No checkpoint's file may say so.
DRAFTS = "tandem_drafts"
LABELS = ("num_labels", "id2label", "label2id")


def required(config: Config, key: str, kind: type[int] | type[float], *, zero: bool = False) -> Any:
    """A positive number, with `zero` also 0; an int is accepted as a float. JSON's may be NaN, infinite, or
    have any digits."""
    value = config.get(key)
    is_number = isinstance(value, int | kind) and not isinstance(value, bool)
    most = MAX_INT if kind is int else MAX_FLOAT
    if not is_number or value is None or not 0 <= value < most or (value == 0 and not zero):
        what = f"{kind.__name__} from 0 on" if zero else f"positive {kind.__name__}"
        raise ModelError(f"config.json: {key} must be a {what}, it is {shown(value)}")
    return value


def optional(
    config: Config,
    key: str,
    kind: type[int] | type[float],
    default: int | float | None = None,
    *,
    zero: bool = False,
) -> Any:
    """A number as `required`; `default` where it is missing or null."""
    return default if config.get(key) is None else required(config, key, kind, zero=zero)


def flag(config: Config, key: str, default: bool) -> bool:
    """True or false; `default` where it is missing or null."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"config.json: {key} must be true or false, it is {shown(value)}")
    return value


def shown(value: object) -> str:
    """A value of any size for an error, shortened."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def expect(config: Config, key: str, *allowed: object) -> None:
    """Refuse unsupported variants: `key`, where present and not null, must have one of these values."""
    if config.get(key) is not None and config[key] not in allowed:
        known = ", ".join(map(repr, (*allowed, None)))
        raise ModelError(f"config.json: {key} = {shown(config[key])} is not supported (only {known})")


def common(config: Config) -> dict[str, Any]:
    """The fields of ModelSpec as most families have them."""
    expect(config, "hidden_act", "silu")
    layers, top_k = bounded(config, "num_hidden_layers"), required(config, "num_experts_per_tok", int)
    return {
        "layers": layers,
        "moe_layers": tuple(range(layers)),
        "windows": (None,) * layers,
        "hidden": required(config, "hidden_size", int),
        "top_k": top_k,
        "router": Softmax(top_k, rescaled=flag(config, "norm_topk_prob", False)),
        "rope": rope(config),
        "vocabulary": required(config, "vocab_size", int),
        "max_positions": required(config, "max_position_embeddings", int),
        "norm_eps": float(required(config, "rms_norm_eps", float)),
        "tied_embeddings": flag(config, "tie_word_embeddings", False),
    }


def for_transformers(config: Config) -> dict[str, Any]:
    """A copy that transformers may change. It makes a list of as many labels or layers as a config claims:
    labels, which are a classifier's, are left out. Raises ModelError for more layers than make sense."""
    copied: dict[str, Any] = {}
    for key, value in config.items():
        if LAYERS.search(key) and isinstance(value, int) and value > MAX_COUNT:
            raise ModelError(f"config.json: {shown(value)} layers make no sense (at most {MAX_COUNT})")
        if key not in LABELS:
            copied[key] = for_transformers(value) if isinstance(value, dict) else deepcopy(value)
    return copied


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
    sinks: bool = False,
    gated: bool = False,
    rotated: float | None = None,
) -> GroupedQuery:
    """`rotated`: where the family rotates a part of each head, its share unless the config says."""
    heads = required(config, "num_attention_heads", int)
    width = optional(config, "head_dim", int) or required(config, "hidden_size", int) // heads
    return GroupedQuery(
        heads=heads,
        kv_heads=required(config, "num_key_value_heads", int),
        head_dim=width,
        bias=bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        clip=clip,
        sinks=sinks,
        gated=gated,
        rotated=None if rotated is None else _rotated(config, width, rotated),
    )


def _rotated(config: Config, width: int, share: float) -> int:
    """The leading numbers of a head that are rotated."""
    key = "partial_rotary_factor"
    _, parameters = rope_parameters(config)
    given = optional(parameters, key, float) or optional(config, key, float, share)
    number = int(width * given)
    if not 0 < number <= width:
        raise ModelError(f"config.json: {key} = {given} of {width} numbers makes no sense")
    return number


def latent(config: Config) -> Latent:
    """Returns DeepSeek's attention."""
    heads = required(config, "num_attention_heads", int)
    expect(config, "num_key_value_heads", heads)
    nope_dim = required(config, "qk_nope_head_dim", int)
    rope_dim = required(config, "qk_rope_head_dim", int)
    return Latent(
        heads=heads,
        query_rank=optional(config, "q_lora_rank", int),
        rank=required(config, "kv_lora_rank", int),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=required(config, "v_head_dim", int),
        bias=flag(config, "attention_bias", default=False),
        scale=(nope_dim + rope_dim) ** -0.5 * _yarn_scale(config) ** 2,
        interleaved=flag(config, "rope_interleave", default=True),
    )


def _yarn_scale(config: Config) -> float:
    """YaRN's factor of queries and of keys, where the config wants it applied to the scores."""
    kind, parameters = rope_parameters(config)
    strength = optional(parameters, "mscale_all_dim", float, 0.0, zero=True)
    if kind == "default" or strength == 0:
        return 1.0
    factor = required(parameters, "factor", float)
    return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0


def sigmoid_router(config: Config, routed: int, groups: int = 1, best: int = 1) -> Scored:
    """DeepSeek-V3's router of `routed` experts, which other families have too; `groups`, `best`: the
    family's defaults."""
    expect(config, "scoring_func", "sigmoid")
    expect(config, "topk_method", "noaux_tc")
    k = required(config, "num_experts_per_tok", int)
    groups = optional(config, "n_group", int, groups)
    best = optional(config, "topk_group", int, best)
    check_groups(routed, groups, best)
    of_group = routed // groups
    if best * of_group < k or of_group < 2:
        raise ModelError(f"config.json: {k} experts a token do not fit {best} groups of {of_group}")
    rescaled = flag(config, "norm_topk_prob", True)
    scale = float(optional(config, "routed_scaling_factor", float, 1.0))
    return Scored("sigmoid", k, rescaled, scale, groups, best)


def check_groups(routed: int, groups: int, best: int) -> None:
    """Raises ModelError unless so many experts have so many equal groups, and these a number of best ones."""
    if routed % groups or best > groups:
        raise ModelError(f"config.json: {routed} experts have no {best} best of {groups} equal groups")


def rope(config: Config, theta: float = 1e4) -> Rope:
    """Returns the rotary embedding that a config asks for; `theta`: the family's default."""
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
    if kind in SCALED:
        required(parameters, "factor", float)
    return kind, parameters


def original_positions(config: Config) -> int:
    """The context length of pre-training, which the rotary embedding extends."""
    key = "original_max_position_embeddings"
    _, parameters = rope_parameters(config)
    positions = optional(config, key, int) or optional(parameters, key, int)
    return int(positions or required(config, "max_position_embeddings", int))


def check_rope(config: Config, rope_dim: int, width: int) -> None:
    """Raises ModelError for rotary parameters that do not fit heads with `rope_dim` rotated numbers, where
    the family could rotate `width`. All else is checked by transformers when the tables are made."""
    kind, parameters = rope_parameters(config)
    if rope_dim == width:
        expect(parameters, "partial_rotary_factor", 1)
        expect(config, "partial_rotary_factor", 1)
    for key in ("factor", "attention_factor", "beta_fast", "beta_slow"):
        optional(parameters, key, float)
    optional(parameters, "original_max_position_embeddings", int)
    for key in ("short_factor", "long_factor") if kind == "longrope" else ():
        factors = parameters.get(key)
        if not isinstance(factors, list) or len(factors) != rope_dim // 2 or not all(map(_positive, factors)):
            raise ModelError(f"config.json: RoPE of type {kind!r} needs {rope_dim // 2} numbers as {key}")


def text_config(config: Config) -> Config:
    """The decoder's part of a config.json that has several, with what it has for all of them."""
    text = config.get("text_config")
    if not isinstance(text, Mapping) or "hidden_size" in config:
        return config
    tied = "tie_word_embeddings"
    return {**text, tied: config[tied]} if tied in config else text


def layer_kinds(config: Config, first: str, other: str) -> list[str]:
    """`layer_types`: of each layer one of two kinds. Without it every fourth one is of the first, or another
    one by `full_attention_interval`."""
    count, kinds = bounded(config, "num_hidden_layers"), config.get("layer_types")
    if kinds is None:
        every = optional(config, "full_attention_interval", int, 4)
        return [other if (i + 1) % every else first for i in range(count)]
    if (
        not isinstance(kinds, list)
        or len(kinds) != count
        or not all(kind in (first, other) for kind in kinds)
    ):
        raise ModelError(f"config.json: layer_types must name {count} layers, each {first} or {other}")
    return kinds


def sparse_layers(config: Config) -> tuple[int, ...]:
    """The layers with experts: every `decoder_sparse_step`-th, except `mlp_only_layers`."""
    step = optional(config, "decoder_sparse_step", int, 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise ModelError(f"config.json: mlp_only_layers must be a list of layers, it is {shown(dense)}")
    layers, without = range(bounded(config, "num_hidden_layers")), set(dense)
    return tuple(i for i in layers if i not in without and (i + 1) % step == 0)


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
