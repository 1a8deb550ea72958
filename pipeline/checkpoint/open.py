"""Opens the model that `--model` names."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoint.hf_checkpoint import Checkpoint
from pipeline.checkpoint.index import CONFIG_FILE, read_fields
from pipeline.checkpoint.model_source import ModelSource
from pipeline.checkpoint.random_model import RandomModel
from pipeline.models.shapes import is_shape, short_name


def open_model(model: Path) -> ModelSource:
    """The checkpoint in this folder, or random weights for a shape:NAME. Reads no weights. Raises ModelError,
    one line, where the model does not exist or cannot be used."""
    return RandomModel(str(model)) if is_shape(model) else Checkpoint(model)


def open_config(model: Path) -> ModelSource:
    """The model, or what its config says where its folder holds no weights, as for one of the Hub that is not
    downloaded. Raises ModelError."""
    config = model / CONFIG_FILE
    if is_shape(model) or not config.exists() or any(model.glob("*.safetensors*")):
        return open_model(model)
    return RandomModel.of_config(short_name(str(model)), read_fields(config))
