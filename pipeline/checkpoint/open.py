"""From what `--model` says to the model."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoint.model_source import ModelSource
from pipeline.checkpoint.random_model import ShapeModel
from pipeline.checkpoint.source import Checkpoint
from pipeline.models.shapes import is_shape


def open_model(model: Path) -> ModelSource:
    """The checkpoint in this folder, or the shape of this name. Reads no weights. Raises ModelError, one
    line, where there is none or it cannot be used."""
    return ShapeModel(str(model)) if is_shape(model) else Checkpoint(model)
