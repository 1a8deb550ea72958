"""Opens the model that `--model` names."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoint.hf_checkpoint import Checkpoint
from pipeline.checkpoint.model_source import ModelSource
from pipeline.checkpoint.random_model import RandomModel
from pipeline.models.shapes import is_shape


def open_model(model: Path) -> ModelSource:
    """The checkpoint in this folder, or random weights for a shape:NAME. Reads no weights. Raises ModelError,
    one line, where the model does not exist or cannot be used."""
    return RandomModel(str(model)) if is_shape(model) else Checkpoint(model)
