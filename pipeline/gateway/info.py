"""What the gateway says of the engine: whether it answers, which model it has, what its tokens are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.errors import ModelError
from pipeline.gateway.asgi import send_json
from pipeline.gateway.bodies import DetokenizeBody, TokenizeBody
from pipeline.gateway.call import Call, check_model
from pipeline.gateway.chat import chat_turns, template_variables
from pipeline.gateway.chat_run import check_chats
from pipeline.gateway.engine_links import model_name
from pipeline.gateway.errors import ApiError, bad
from pipeline.gateway.tools import openai_tools
from pipeline.text.tokenizer import eos_ids
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


def _check_reads(welcome: Welcome) -> None:
    if not welcome.has_tokenizer:
        raise ApiError(400, "this model has no tokenizer")


async def tokenize(call: Call) -> None:
    """Answers with the ids of `prompt`, or of `messages` with the template's variables."""
    client = await call.client()
    body = await call.body(TokenizeBody)
    check_model(body.model, client.welcome)
    _check_reads(client.welcome)
    if body.add_special_tokens is False:
        raise bad("add_special_tokens", "must be true: prompts are read so")
    if body.messages is None:
        if body.prompt is None:
            raise bad("prompt", "is required")
        found = await client.tokenize(text=body.prompt)
    else:
        check_chats(client.welcome)
        kind = call.service.template
        read = template_variables(body, kind)
        tools = openai_tools(body.tools, body.tool_choice, body.parallel_tool_calls, kind)
        if tools.given:
            read["tools"] = list(tools.given)
        template = json.dumps(read) if read else ""
        found = await client.tokenize(messages=chat_turns(body.messages), template=template)
    ids = found.ids.tolist()
    answer = {"count": len(ids), "max_model_len": client.welcome.context, "tokens": ids}
    if body.return_token_strs:
        strings = (await client.tokenize(token_ids=ids)).pieces
        answer["token_strs"] = [piece.decode(errors="replace") for piece in strings]
    await send_json(call.send, answer)


async def detokenize(call: Call) -> None:
    client = await call.client()
    body = await call.body(DetokenizeBody)
    check_model(body.model, client.welcome)
    _check_reads(client.welcome)
    ids = body.tokens
    if ids and not 0 <= min(ids) <= max(ids) < client.welcome.vocabulary:
        raise bad("tokens", f"must be ids below {client.welcome.vocabulary}")
    text = (await client.tokenize(token_ids=ids)).text if ids else ""
    await send_json(call.send, {"prompt": text})


async def tokenizer_info(call: Call) -> None:
    client = await call.client()
    _check_reads(client.welcome)
    try:
        ends = sorted(eos_ids(Path(client.welcome.model)))
    except (ModelError, OSError):
        ends = []
    names = (await client.tokenize(token_ids=ends)).pieces if ends else ()
    text = names[0].decode(errors="replace") if names else None
    await send_json(
        call.send,
        {"eos_token": text, "eos_token_ids": ends, "vocab_size": client.welcome.vocabulary},
    )
