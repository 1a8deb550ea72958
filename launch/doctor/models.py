"""How many bytes of experts a token reads: of the embedded model, and of one that people run."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pipeline.assets import model_dir
from pipeline.config import EngineConfig
from pipeline.models.registry import expert_shape, model_spec
from shm.layout import ExpertShape, StoreLayout, format_named

MIXTRAL_8X7B = ExpertShape(layers=32, experts=8, hidden=4096, intermediate=14336, tile=896)


@dataclass(frozen=True)
class Reads:
    """Bytes of a model's experts in the default format: all of them, and those a token is routed to."""

    name: str
    store: int
    token: int


def embedded() -> Reads:
    """Raises OSError, ValueError, PipelineError where its files are damaged."""
    config = json.loads((model_dir() / "config.json").read_text("utf-8"))
    return _reads("the embedded model", expert_shape(config, None), model_spec(config).top_k)


def example() -> Reads:
    """A well-known model of the supported architecture."""
    return _reads(f"Mixtral-8x7B ({EngineConfig().format})", MIXTRAL_8X7B, top_k=2)


def _reads(name: str, shape: ExpertShape, top_k: int) -> Reads:
    layout = StoreLayout(shape, format_named(EngineConfig().format))
    return Reads(name, layout.total_bytes, shape.layers * top_k * shape.tiles * layout.tile_bytes)
