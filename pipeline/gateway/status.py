"""Whether the engine answers, and which model it has."""

from __future__ import annotations

from typing import Any

from pipeline.gateway.call import Call
from pipeline.gateway.errors import ApiError
from pipeline.gateway.responses import send_json
from pipeline.gateway.served_model import check_model, model_name
from protocol.messages import Welcome


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
