"""What the gateway says of the engine and its model: whether it answers, the model's name, its tokens."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from pipeline.assets import model_dir
from pipeline.gateway.asgi import send_json
from pipeline.gateway.call import Call
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


async def health(call: Call) -> None:
    if call.service.draining:
        raise ApiError(503, "the server is shutting down")
    if not call.service.links.ready:
        raise ApiError(503, "the engine is not ready: it is being started or restarted")
    await send_json(call.send, {"status": "ok"})


async def models(call: Call) -> None:
    client = await call.client()
    await send_json(call.send, {"object": "list", "data": [_entry(call, client.welcome)]})


async def model(call: Call) -> None:
    client = await call.client()
    check_model(call.scope["path_params"]["name"], client.welcome)
    await send_json(call.send, _entry(call, client.welcome))


def _entry(call: Call, welcome: Welcome) -> dict[str, Any]:
    return {
        "id": model_name(welcome),
        "object": "model",
        "created": int(call.service.started),
        "owned_by": "tandem",
        "max_model_len": welcome.context,
        "context_length": welcome.context,
    }
