"""What the engine must know of a model, read from its config.json once and checked there.

A key is read as required or with its default, so that a variant nobody has implemented fails at the
start with one line that names it instead of giving wrong text.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import ModelError

Config = Mapping[str, Any]


@dataclass(frozen=True)
class ModelSpec:
    """A decoder of pre-normalised attention and mixture-of-experts blocks."""

    layers: int
    hidden: int  # H
    intermediate: int  # I of one routed expert
    experts: int  # E a layer
    top_k: int  # k
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    sliding_window: int | None
    tied_embeddings: bool

    @property
    def kv_numbers_per_token(self) -> int:
        """Numbers that one token adds to the KV cache, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class LayerNames:
    """Checkpoint names of one layer's backbone tensors."""

    attention_norm: str
    query: str
    key: str
    value: str
    output: str
    moe_norm: str
    router: str


@dataclass(frozen=True)
class BackboneNames:
    """Checkpoint names of the tensors outside the layers; `head` is None where it is the embedding."""

    embedding: str
    final_norm: str
    head: str | None


class Architecture(ABC):
    """One model family: how its config reads and what its tensors are called."""

    model_type: str

    @abstractmethod
    def spec(self, config: Config) -> ModelSpec:
        """Raises ModelError for a variant that is not supported."""

    @abstractmethod
    def backbone_names(self, spec: ModelSpec) -> BackboneNames: ...

    @abstractmethod
    def layer_names(self, layer: int) -> LayerNames: ...

    @abstractmethod
    def expert_names(self, layer: int, expert: int) -> tuple[str, str, str]:
        """Names of gate [I, H], up [I, H] and down [H, I]."""


def required(config: Config, key: str, kind: type[int] | type[float]) -> Any:
    """A number the config must have; an int is accepted for a float."""
    value = config.get(key)
    right_kind = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not right_kind or value is None or not 0 < value < math.inf:  # JSON may hold NaN and Infinity
        raise ModelError(f"config.json: {key} must be a positive {kind.__name__}, it is {value!r}")
    return value


def optional(config: Config, key: str, kind: type[int] | type[float]) -> Any:
    """A number that may be missing or null, which is None here; otherwise as `required`."""
    return None if config.get(key) is None else required(config, key, kind)


def expect(config: Config, key: str, allowed: tuple[object, ...]) -> None:
    """Refuse a variant: `key`, where present, must have one of these values."""
    if key in config and config[key] not in allowed:
        raise ModelError(
            f"config.json: {key} = {config[key]!r} is not supported (only {', '.join(map(repr, allowed))})"
        )


def rope_theta(config: Config, default: float) -> float:
    """The rotary base, from either place that transformers has kept it; only plain RoPE is supported."""
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    parameters = config.get(name) or {}
    if not isinstance(parameters, Mapping):
        raise ModelError(f"config.json: {name} must be a mapping, it is {parameters!r}")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ModelError(f"config.json: RoPE of type {kind!r} is not supported yet")
    theta = optional(parameters, "rope_theta", float) or optional(config, "rope_theta", float) or default
    return float(theta)
