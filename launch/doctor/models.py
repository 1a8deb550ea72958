"""Bytes of experts that a token reads, for the embedded model and for a large one as an example."""

from __future__ import annotations

import json
from dataclasses import dataclass

from launch.doctor import cpu
from pipeline.assets import model_dir
from pipeline.memory.plan import AUTOMATIC
from pipeline.models.config_keys import Config
from pipeline.models.registry import expert_shape, model_spec
from pipeline.models.shapes import SHAPES
from shm.layout import StoreLayout, format_named


@dataclass(frozen=True)
class Reads:
    """Bytes of a model's experts in the default format: all of them, and those that one token reads."""

    name: str
    store: int
    token: int
    layers: int


def embedded() -> Reads:
    """Raises OSError, ValueError, PipelineError where its files are damaged."""
    config = json.loads((model_dir() / "config.json").read_text("utf-8"))
    return _reads("the embedded model", config)


def example() -> Reads:
    """A well-known model of the supported architecture."""
    return _reads(f"Mixtral-8x7B ({AUTOMATIC[0]})", SHAPES["mixtral-8x7b"])


def _reads(name: str, config: Config) -> Reads:
    tile_format = format_named(AUTOMATIC[0])
    shape = expert_shape(config, None, tile_format)
    layout = StoreLayout(shape, tile_format)
    active = shape.layers * model_spec(config).top_k
    layers = model_spec(config).layers
    return Reads(name, layout.total_bytes, active * layout.expert_bytes, layers)


def last_cache() -> int | None:
    """Bytes of the last level of cache, all instances together; None where unknown."""
    return max((cache.total for cache in cpu.caches().values()), default=None)
