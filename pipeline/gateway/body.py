"""The body of a request: read within limits, and decoded into the struct of its endpoint (`bodies.py`)."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any, TypeVar

import msgspec

from pipeline.gateway.asgi import Receive, Scope, header_of
from pipeline.gateway.errors import ApiError, bad
from protocol.files import is_nested

log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_BYTES = 8 << 20  # a message to the engine has half of that
BODY_SECONDS = 60.0  # for the whole body; a slow network sends 8 MB in less
MOST_NESTING = 200  # values in each other; schemas need some dozens
_PLACE = re.compile(r"^(.*?)(?: - at (?:`key` in )?`\$(.*)`)?$", re.DOTALL)
_FIELD = re.compile(r"(required|unknown) field `(.{1,80})")

# Fields of OpenAI's, Anthropic's and other servers' that would change the answer, and the values that do not.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("functions", "function_call", "audio", "web_search_options", "mcp_servers"), ([],)),
    **dict.fromkeys(("stop_token_ids", "bad_words", "allowed_token_ids", "prompt_logprobs"), ([], 0)),
    **dict.fromkeys(("truncate_prompt_tokens", "documents", "chat_template"), ([],)),
    **dict.fromkeys(("use_beam_search", "include_stop_str_in_output", "return_token_ids"), (False,)),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "truncation": ("disabled",),
    "length_penalty": (1, 1.0),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "typical_p": (1, 1.0),
    "mirostat": (0,),
}
WITHOUT_EFFECT = {"user", "store", "metadata"}  # known, and not worth a line in the log


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """Returns the JSON of a request. Raises ApiError, and ConnectionError where the client has gone."""
    kind = header_of(scope, b"content-type").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A page of another site can send any other type without asking (CORS).
        raise ApiError(415, f"the body must be application/json, not {kind[:80] or 'without a Content-Type'}")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return bytes(await _read(scope, receive))
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:.0f} s") from None


async def _read(scope: Scope, receive: Receive) -> bytearray:
    if header_of(scope, b"content-length").isdecimal():
        _check_size(int(header_of(scope, b"content-length")[:20]))
    raw = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError
        raw += message.get("body", b"")
        _check_size(len(raw))
        more = message.get("more_body", False)
    return raw


def _check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise ApiError(413, f"the body has more than {MOST_BYTES >> 20} MB")


def decoded(raw: bytes, kind: type[T], endpoint: str) -> T:
    """Returns the struct of a body. Fields of other servers are accepted, as clients send them by habit, but
    not those that change answers. Raises ApiError, which names the field."""
    given = parse_json(raw)
    body = fitting(given, kind, "")
    fields = set(kind.__struct_fields__)  # type: ignore[attr-defined]  # all kinds are structs
    unknown = []
    for name, value in given.items():
        if value is None:
            continue
        if name in UNSUPPORTED and value not in UNSUPPORTED[name]:
            raise bad(name, "is not supported here")
        if name not in fields and name not in WITHOUT_EFFECT and name not in UNSUPPORTED:
            unknown.append(name[:40])
    if unknown:
        log.info("%s: fields without a meaning here: %s", endpoint, ", ".join(unknown[:8]))
    return body


def parse_json(text: str | bytes, name: str = "") -> dict[str, Any]:
    """Returns the object of a JSON text: a body, or a field of this name. Raises ApiError, also for what the
    engine's libraries cannot write: values nested too deeply."""
    raw = text.encode("utf-8", "replace") if isinstance(text, str) else text
    try:
        value: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, Any])
        if raw.count(b"[") + raw.count(b"{") > MOST_NESTING and is_nested(value, MOST_NESTING):
            raise RecursionError
        return value
    except msgspec.ValidationError as e:
        raise misfit(e, name) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as e:
        reason = "nested too deeply" if isinstance(e, RecursionError) else str(e)[:200]
        error = f"is no valid JSON: {reason}"
        raise bad(name, error) if name else ApiError(400, f"the body {error}") from None


def fitting(value: object, kind: type[T], name: str) -> T:
    """Returns a field's value as this type. Raises ApiError, which names the place in it."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as e:
        raise misfit(e, name) from None


def misfit(error: msgspec.ValidationError, name: str) -> ApiError:
    """Returns what a client is told of a value of another type or outside its limits, with the field's place
    in the body. `name`: of the field that was decoded; "" for the whole body."""
    match = _PLACE.match(str(error))
    assert match is not None
    text, place = match[1], name + (match[2] or "").replace("[...]", "")
    if field := _FIELD.search(text):
        place = f"{place}.{field[2].rstrip('`')}"
        text = "is required" if field[1] == "required" else "is not supported here"
    place = place.lstrip(".")[:200]
    text = text[:1].lower() + text[1:300]
    return bad(place, text) if place else ApiError(400, f"the body: {text}")
