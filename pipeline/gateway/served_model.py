"""The model's name, as clients see it and may ask for it."""

from __future__ import annotations

from pathlib import PurePath

from pipeline.assets import model_dir
from pipeline.gateway.errors import ApiError
from pipeline.models.shapes import short_name
from protocol.messages import Welcome

EMBEDDED = "tandem-embedded"


def model_name(welcome: Welcome) -> str:
    """The model as clients know it: a folder without those before it, of the Hub's cache ORG/NAME."""
    if PurePath(welcome.model) == model_dir():
        return EMBEDDED
    return short_name(welcome.model) or welcome.model


def check_model(name: str | None, welcome: Welcome) -> None:
    """Raises ApiError for a model that is not served. Without a name it is the one that is."""
    if name is not None and name not in (model_name(welcome), welcome.model, welcome.engine):
        raise ApiError(
            404,
            f"the model {name[:80]!r} is not served here; it is {model_name(welcome)!r}",
            "model",
            "model_not_found",
        )
