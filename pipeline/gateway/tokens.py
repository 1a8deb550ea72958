"""Texts to token ids and back."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.errors import ModelError
from pipeline.gateway.call import Call
from pipeline.gateway.chat import check_chats, take_variables
from pipeline.gateway.conversation import take_messages
from pipeline.gateway.errors import ApiError
from pipeline.gateway.responses import send_json
from pipeline.gateway.served_model import check_model
from pipeline.gateway.settings import note_unknown
from pipeline.gateway.tools import take_tools
from pipeline.text.tokenizer import eos_ids
from protocol.messages import Welcome

MOST_IDS = 1 << 20


def _check_reads(welcome: Welcome) -> None:
    if not welcome.has_tokenizer:
        raise ApiError(400, "this model has no tokenizer")


async def tokenize(call: Call) -> None:
    """Of `prompt`, or of `messages` with the template's variables."""
    client = await call.client()
    fields = await call.fields()
    check_model(fields.text("model", None), client.welcome)
    _check_reads(client.welcome)
    if not fields.flag("add_special_tokens", True):
        fields.refuse("add_special_tokens", "must be true: prompts are read so")
    if fields.any("messages") is None:
        found = await client.tokenize(text=fields.text("prompt"))
    else:
        check_chats(client.welcome)
        variables = take_variables(fields, call.service.template)
        tools = take_tools(fields, call.service.template)
        found = await client.tokenize(
            messages=take_messages(fields), template=_template(variables, tools.given)
        )
    pieces = fields.flag("return_token_strs")
    note_unknown(fields, "/tokenize")
    ids = found.ids.tolist()
    body = {"count": len(ids), "max_model_len": client.welcome.context, "tokens": ids}
    if pieces:
        strings = (await client.tokenize(token_ids=ids)).pieces
        body["token_strs"] = [piece.decode(errors="replace") for piece in strings]
    await send_json(call.send, body)


def _template(variables: dict[str, object], tools: tuple[object, ...]) -> str:
    found = variables | ({"tools": list(tools)} if tools else {})
    return json.dumps(found) if found else ""


async def detokenize(call: Call) -> None:
    client = await call.client()
    fields = await call.fields()
    check_model(fields.text("model", None), client.welcome)
    _check_reads(client.welcome)
    ids = fields.array("tokens")
    if len(ids) > MOST_IDS or not all(type(i) is int and 0 <= i < client.welcome.vocabulary for i in ids):
        fields.refuse("tokens", f"must be up to {MOST_IDS} ids below {client.welcome.vocabulary}")
    note_unknown(fields, "/detokenize")
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
