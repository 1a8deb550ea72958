"""GET /version, /props, /slots: the engine's description in llama-server's form, of which clients read the
length of a context, the model, and how many requests run. What has no meaning here is left out."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from pipeline.gateway.call import Call
from pipeline.gateway.errors import ApiError
from pipeline.text.tokenizer import chat_templates
from protocol.messages import Welcome
from protocol.program import installed


@cache
def _template(model: Path) -> str:
    """Returns the text of a model's chat template. Raises ModelError."""
    return chat_templates(model).get("default", "")


async def release(call: Call) -> None:
    """Send the version of this program."""
    await call.send_json({"version": installed("tandem")})


async def properties(call: Call) -> None:
    """Send what stays as it is while the engine runs."""
    client = await call.client()
    welcome, slots = client.welcome, (await client.stats())["scheduler"]["max_running"]
    kind = call.service.template
    found: dict[str, Any] = {
        "default_generation_settings": {"n_ctx": welcome.context, "params": _defaults(welcome)},
        "total_slots": slots,
        "model_alias": call.service.model_name(welcome),
        "model_path": welcome.model,
        "modalities": {"vision": False, "audio": False},
        "build_info": f"tandem {installed('tandem')}",
        "is_sleeping": False,
    }
    if welcome.has_chat_template:
        found["chat_template"] = await asyncio.to_thread(_template, Path(welcome.model))
        found["chat_template_caps"] = {
            "supports_tools": kind.tools,
            "supports_tool_calls": bool(kind.calls),
        }
    await call.send_json(found)


def _defaults(welcome: Welcome) -> dict[str, Any]:
    """Returns how a chat is sampled where it does not say so."""
    sampling = welcome.sampling
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "ignore_eos": False,
        "stream": False,
    }


async def slots(call: Call) -> None:
    """Send an entry for each sequence that can be decoded with others, of which the first ones are in use.
    With `fail_on_no_slot` in the query it is a 503 that all are."""
    client = await call.client()
    scheduler = (await client.stats())["scheduler"]
    running, most = scheduler["running"], scheduler["max_running"]
    if running >= most and parse_qs(call.scope["query_string"].decode("latin-1")).get("fail_on_no_slot"):
        raise ApiError(503, f"all {most} slots are in use")
    context = client.welcome.context
    await call.send_json(
        [
            {"id": place, "n_ctx": context, "speculative": False, "is_processing": place < running}
            for place in range(max(most, running))  # a client that has none may have one more
        ]
    )
