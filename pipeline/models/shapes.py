"""Shapes of well-known models: what `--model shape:NAME[/LAYERS]` can name.

A shape is a model's config.json and nothing else. `shape_model.py` draws its weights, so that a model's
speed can be tried before it is downloaded. Adding one is adding its entry to SHAPES; what a key means is its
architecture's.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pipeline.errors import ModelError
from pipeline.models.spec import Config

PREFIX = "shape:"
LAYERS = "num_hidden_layers"

SHAPES: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        LAYERS: 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
    "mixtral-8x22b": {
        "model_type": "mixtral",
        "hidden_act": "silu",
        "hidden_size": 6144,
        "intermediate_size": 16384,
        LAYERS: 56,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
}


def is_shape(model: str | Path) -> bool:
    """Whether `--model` names a shape and not a folder."""
    return str(model).startswith(PREFIX)


def short_name(model: str | Path) -> str:
    """What a list of engines calls a model: a folder's own name, a shape's whole one."""
    return str(model) if is_shape(model) else Path(model).name


def shape_config(model: str) -> tuple[str, Config]:
    """The name and the config of shape:NAME, or of shape:NAME/N: its first N layers. Raises ModelError, one
    line, where there is no such shape."""
    name, slash, layers = model.removeprefix(PREFIX).partition("/")
    if name not in SHAPES:
        raise ModelError(f"{model}: there is no shape {name!r}; there are {', '.join(SHAPES)}")
    config = SHAPES[name]
    if not slash:
        return name, config
    most = config[LAYERS]
    if not re.fullmatch("[1-9][0-9]{0,8}", layers) or int(layers) > most:
        raise ModelError(f"{model}: write it as {PREFIX}{name}/N, with N layers from 1 to {most}")
    return name, config | {LAYERS: int(layers)}
