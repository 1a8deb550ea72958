"""A chat model's text, taken apart as it arrives: reasoning, content and calls of tools.

The regions are found by transformers' streaming parser. A call is parsed here once it is complete: a model
may write anything, and what is no call of a given tool stays text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from pipeline.text.chat_format import THINK, TemplateKind

PARSER = "transformers.utils.chat_parsing"  # takes a second to import
CALL_KEYS = {"name", "arguments", "parameters", "id", "type"}  # of a call that is one object
VERBATIM = {"content_args": {"strip": False}, "repeats": True}

# Harmony's messages: a head, which says the channel and may name a recipient and a type, and a text.
START = "<|start|>assistant"  # which ends the prompt
_TO = r"\s*to=[^\s<]+"
_TYPE = r"\s*(?:<\|constrain\|>\s*)?[\w/.-]*\s*<\|message\|>"
_CALL = rf"(?P<head>(?:{_TO}\s*<\|channel\|>\w+|<\|channel\|>\w+{_TO}){_TYPE})"
_ENDS = VERBATIM | {"close": ["<|end|>", "<|call|>", "<|return|>"]}
HARMONY = {
    "reasoning": _ENDS | {"open_pattern": rf"{re.escape(START)}<\|channel\|>analysis{_TYPE}"},
    "final": _ENDS | {"open_pattern": rf"{re.escape(START)}<\|channel\|>(?:final|commentary){_TYPE}"},
    "call": _ENDS
    | {"open_pattern": re.escape(START) + _CALL, "transform": {"head": "{head}", "text": "{content}"}},
}

Kind = Literal["reasoning", "content"]


@dataclass(frozen=True)
class ToolCall:
    """`arguments`: a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Part:
    """A piece of the answer."""

    kind: Literal["reasoning", "content", "call"]
    text: str = ""
    call: ToolCall | None = None


def opens_reasoning(ending: str) -> bool:
    """Returns whether a prompt that ends so has opened the reasoning of its answer."""
    _, opened, rest = ending.rpartition(THINK[0])
    return bool(opened) and THINK[1] not in rest


class ChatOutput:
    """Takes one answer's text apart."""

    def __init__(self, kind: TemplateKind, tools: Mapping[str, dict[str, Any]], *, thinking: bool) -> None:
        """`tools`: the schemas of their parameters, by name; empty where no calls are wanted. `thinking`: the
        prompt has opened the reasoning already."""
        self._form = kind.form
        self._tools = tools
        self.calls = 0
        self._prefix = ""  # that the parser is given, and may show
        prefix = THINK[0] if thinking else ""
        fields: dict[str, Any] = {"content": VERBATIM}
        if kind.calls == "harmony":
            prefix = self._prefix = START
            fields |= {name: HARMONY[name] for name in HARMONY if tools or name != "call"}
        else:
            if kind.thinks or thinking:
                fields["reasoning"] = VERBATIM | {"open": kind.think[0], "close": kind.think[1]}
            if self._form is not None and tools:
                fields["call"] = VERBATIM | {"open": self._form.open, "close": self._form.close}
        self._parser: Any = None
        if len(fields) > 1:
            from transformers.utils.chat_parsing import ResponseParser

            spec = {"start_anchor_pattern": r"\A", "fields": fields}
            self._parser = ResponseParser(spec, prefix=prefix)
        self._reasoned = False
        self._space = kind.thinks  # white space around reasoning and behind calls is no content

    def feed(self, text: str) -> Iterator[Part]:
        """Yields the parts that more text makes certain."""
        if self._parser is None:
            if text:
                yield Part("content", text)
            return
        yield from self._parts(self._parser.feed(text))

    def finish(self, *, cut: bool = False) -> Iterator[Part]:
        """Yields the rest. `cut`: the model had not ended its answer, so the last call may not be
        complete."""
        if self._parser is not None:
            yield from self._parts(self._parser.finalize()[1], closed=False, cut=cut)

    def _parts(
        self, events: list[dict[str, Any]], *, closed: bool = True, cut: bool = False
    ) -> Iterator[Part]:
        for event in events:
            field, chunk = event["field"], event.get("text", "")
            if field == "call":
                if event["type"] == "region_close":
                    value = event["value"]
                    written = value if isinstance(value, str) else value["head"] + value["text"]
                    yield from self._called(written, closed=closed, cut=cut)
            elif field == "reasoning":
                yield from self._text("reasoning", chunk)
                self._space = True
            else:
                yield from self._text("content", chunk.removeprefix(self._prefix))
            if field != "content" or chunk:
                self._prefix = ""

    def _text(self, kind: Kind, text: str) -> Iterator[Part]:
        if (kind == "content" and self._space) or (kind == "reasoning" and not self._reasoned):
            text = text.lstrip()
        if text:
            if kind == "content":
                self._space = False
            else:
                self._reasoned = True
            yield Part(kind, text)

    def _called(self, written: str, *, closed: bool, cut: bool) -> Iterator[Part]:
        """Yields the calls of a region, and what is none of them as text."""
        assert self._form is not None
        parts, place, calls = [], 0, 0
        while (match := self._form.call.match(written, place)) and match.end() > place:
            place = match.end()
            whole = closed or not cut
            if not whole and self._form.end:
                whole = match[0].rstrip().endswith(self._form.end)
            call = self._parsed(match) if whole else None
            calls += call is not None
            parts.append(Part("content", match[0]) if call is None else Part("call", call=call))
        if not calls:
            self._space = False
            yield Part("content", self._form.open + written + self._form.close * closed)
            return
        self.calls += calls
        self._space = True
        yield from parts
        yield from self._text("content", written[place:])

    def _parsed(self, match: re.Match[str]) -> ToolCall | None:
        groups = match.groupdict()
        try:
            if groups.get("json") is not None:
                name, arguments = _of_json(groups["json"])
            else:
                name = groups["name"].strip()
                arguments = self._arguments(name, groups["arguments"])
            if name not in self._tools or not isinstance(arguments, dict):
                return None
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            return None
        return ToolCall(groups.get("id") or f"call_{secrets.token_hex(12)}", name, text)

    def _arguments(self, name: str, written: str) -> Any:
        assert self._form is not None
        parameter = self._form.parameter
        if self._form.quote:
            from transformers.utils.chat_parsing.content_parsers import parse_content

            quotes = [[self._form.quote, self._form.quote]]
            return parse_content(written, "json", {"unquoted_keys": True, "string_delims": quotes})
        if parameter is None:
            return _loads(written.strip() or "{}")
        if parameter.sub("", written).strip():
            return None
        schema = self._tools.get(name, {}).get("properties")
        properties = schema if isinstance(schema, dict) else {}
        pairs = [(key.strip(), text) for key, text in parameter.findall(written)]
        values = {key: _value(text, properties.get(key)) for key, text in pairs}
        return values if len(values) == len(pairs) else None


def _loads(text: str) -> Any:
    """Returns the value of JSON. Raises ValueError."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as e:
        raise ValueError(str(e)) from None


def _of_json(written: str) -> tuple[str, Any]:
    """Returns the name and the arguments of an object of both. Raises ValueError."""
    value = _loads(written)
    if not isinstance(value, dict) or value.keys() - CALL_KEYS:
        return "", None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _loads(arguments or "{}")
    return str(value.get("name", "")), arguments


JSON_TYPES = {  # a schema's names of them
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    type(None): {"null"},
    dict: {"object"},
    list: {"array"},
}


def _value(text: str, schema: Any) -> Any:
    """Returns a parameter's value by its schema: what is no text is written as JSON."""
    types = _types(schema)
    try:
        value = text if types == {"string"} else _loads(text)
    except ValueError:
        return text
    return text if "string" in types and not types & JSON_TYPES.get(type(value), set()) else value


def _types(schema: Any) -> set[str]:
    """Returns the types that a schema allows, as far as it names them."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    types = {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
    for choices in (schema.get("anyOf"), schema.get("oneOf")):
        for choice in choices if isinstance(choices, list) else ():
            types |= _types(choice)
    return types
