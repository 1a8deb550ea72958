"""Shapes of well-known models, for `--model shape:NAME[/LAYERS]`: a config.json without weights, so that a
model's speed can be measured before it is downloaded (`pipeline/checkpoint/random_model.py`). To add one, add
its config to `pipeline/assets/shapes.json`, with the keys that its family reads. That of phi-3.5-moe lacks
the factors of its rotary embedding, which do not change its speed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pipeline import assets
from pipeline.errors import ModelError
from pipeline.models.config_keys import Config

PREFIX = "shape:"
LAYERS = "num_hidden_layers"
SHAPES: dict[str, dict[str, Any]] = json.loads((Path(assets.__file__).parent / "shapes.json").read_text())


def is_shape(model: str | Path) -> bool:
    """Returns whether `--model` names a shape instead of a folder."""
    return str(model).startswith(PREFIX)


def short_name(model: str | Path) -> str:
    """A model's name in lists: of a folder its last component, of a shape the whole name, and of a folder in
    the Hugging Face cache (models--ORG--NAME/snapshots/COMMIT) ORG/NAME."""
    if is_shape(model):
        return str(model)
    path = Path(model)
    kind, *name = path.parent.parent.name.split("--")
    if kind == "models" and name and path.parent.name == "snapshots":
        return "/".join(name)
    return path.name


def shape_config(model: str) -> tuple[str, Config]:
    """Name and config, from shape:NAME or shape:NAME/N (its first N layers). Raises ModelError, one line."""
    name, slash, layers = model.removeprefix(PREFIX).partition("/")
    if name not in SHAPES:
        raise ModelError(f"{model}: unknown shape {name!r} (supported: {', '.join(SHAPES)})")
    config = SHAPES[name]
    if not slash:
        return name, config
    most = config[LAYERS]
    if not re.fullmatch("[1-9][0-9]{0,8}", layers) or int(layers) > most:
        raise ModelError(f"{model}: write it as {PREFIX}{name}/N, with N layers from 1 to {most}")
    return name, config | {LAYERS: int(layers)}
