"""The messages of a chat request as the engine reads them, and the name under which its KV is kept."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from pipeline.gateway.body import Fields, kind_of, parse_json, valid_text
from pipeline.gateway.errors import bad
from protocol.messages import ChatMessage

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MOST_MESSAGES = 4096
# Coding agents put a token into the system prompt that changes with every request.
CHANGING = re.compile(r"\bcch=[0-9a-zA-Z]+;?[ \t]*")


def take_messages(fields: Fields) -> tuple[ChatMessage, ...]:
    """OpenAI's `messages`. Raises ApiError."""
    given = fields.array("messages")
    if not 1 <= len(given) <= MOST_MESSAGES:
        fields.refuse("messages", f"must have 1 to {MOST_MESSAGES} messages, not {len(given)}")
    return tuple(_message(value, f"messages[{place}]") for place, value in enumerate(given))


def _message(value: Any, where: str) -> ChatMessage:
    if not isinstance(value, dict):
        raise bad(where, f"must be an object, not {kind_of(value)}")
    fields = Fields(value, where)
    role = fields.choice("role", ROLES)
    content = text_of(fields.any("content"), fields.name("content"))
    if role in ("system", "developer"):
        role, content = "system", CHANGING.sub("", content)
    extra: dict[str, Any] = {}
    if calls := fields.array("tool_calls", None):
        extra["tool_calls"] = [
            tool_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)
        ]
    reasoning = fields.text("reasoning_content", None)
    if (reasoning := fields.text("reasoning", None) or reasoning) is not None:
        extra["reasoning_content"] = reasoning
    for name in ("tool_call_id", "name"):
        if (text := fields.text(name, None)) is not None:
            extra[name] = text
    return message_of(role, content, extra)


def message_of(role: str, content: str, extra: dict[str, Any]) -> ChatMessage:
    return ChatMessage(role, content, json.dumps(extra, ensure_ascii=False) if extra else "")


def tool_call(value: Any, where: str) -> dict[str, Any]:
    """As chat templates read it: the arguments are an object. Raises ApiError."""
    if not isinstance(value, dict):
        raise bad(where, f"must be an object, not {kind_of(value)}")
    fields = Fields(value, where)
    fields.choice("type", ("function",), "function")
    function = fields.within("function")
    if function is None:
        fields.refuse("function", "is required: an object")
    arguments = function.any("arguments")
    if isinstance(arguments, str):
        arguments = parse_json(arguments or "{}", function.name("arguments"))
    if not isinstance(arguments, dict):
        function.refuse("arguments", "must be a JSON object as a string")
    call = {"name": function.text("name"), "arguments": arguments}
    return {"id": fields.text("id", ""), "type": "function", "function": call}


def text_of(content: Any, name: str) -> str:
    """A message's content: a string, parts of text, or nothing. Raises ApiError."""
    if content is None:
        return ""
    if isinstance(content, str):
        return valid_text(content, name)
    if not isinstance(content, list):
        raise bad(name, f"must be a string or an array of parts, not {kind_of(content)}")
    texts = []
    for place, part in enumerate(content):
        where = f"{name}[{place}]"
        if not isinstance(part, dict):
            raise bad(where, f"must be an object, not {kind_of(part)}")
        fields = Fields(part, where)
        fields.choice("type", ("text", "input_text", "output_text", "refusal"))
        texts.append(fields.text("refusal" if part["type"] == "refusal" else "text"))
    return "".join(texts)


def cache_name(messages: Sequence[ChatMessage], *others: Any) -> str:
    """Of a conversation: the same for each of its turns, which share all up to the first user's message.
    `others`: whatever else stands before that in the rendered text."""
    opening = []
    for message in messages:
        opening.append((message.role, message.content, message.extra))
        if message.role == "user":
            break
    return hashed([opening, *others])


def hashed(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
