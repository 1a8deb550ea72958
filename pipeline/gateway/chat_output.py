"""A chat model's text, taken apart as it arrives: reasoning, content and calls of tools; and what its chat
template can do, by the template's text: the gateway renders none.

The regions are found by transformers' streaming parser. A call is parsed here once it is complete: a model
may write anything, and what is no call of a given tool stays text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import ModelError
from pipeline.text.tokenizer import chat_templates

OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*)?", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True)
class TemplateKind:
    """`thinks`: answers may begin with reasoning between <think> and </think>. `tools`: it renders tools.
    `calls`: how the model writes a call between <tool_call> and </tool_call>: "json", "xml", or "" where
    it has another form, which is not parsed."""

    thinks: bool = False
    tools: bool = False
    calls: str = ""

    @classmethod
    def of_text(cls, text: str) -> TemplateKind:
        """Returns what a template of this text can do."""
        calls = ""
        if "<tool_call>" in text:
            calls = "xml" if "<function=" in text else "json"
        return cls("</think>" in text, "tools" in text, calls)


def read_template(model: Path) -> TemplateKind:
    """Returns what the templates in a model's directory can do; nothing where none can be read."""
    try:
        return TemplateKind.of_text("\n".join(chat_templates(model).values()))
    except (ModelError, OSError):
        return TemplateKind()


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


class ChatOutput:
    """Takes one answer's text apart."""

    def __init__(self, kind: TemplateKind, tools: Mapping[str, dict[str, Any]], *, thinking: bool) -> None:
        """`tools`: the schemas of their parameters, by name; empty where no calls are wanted. `thinking`: the
        prompt has opened the reasoning already."""
        self._kind = kind
        self._tools = tools
        self._call = ""
        self.calls = 0
        fields: dict[str, Any] = {"content": {}}
        if kind.thinks or thinking:
            fields["reasoning"] = {"open": "<think>", "close": "</think>", "repeats": True}
        if kind.calls and tools:
            fields["call"] = {"open": OPEN_CALL, "close": CLOSE_CALL, "repeats": True}
        self._parser: Any = None
        if len(fields) > 1:
            from transformers.utils.chat_parsing import ResponseParser

            spec = {"start_anchor_pattern": r"\A", "fields": fields}
            self._parser = ResponseParser(spec, prefix="<think>" if thinking else "")
        self._reasoned = False
        self._space = False  # white space after the reasoning is no content

    def feed(self, text: str) -> Iterator[Part]:
        """Yields the parts that more text makes certain."""
        if self._parser is None:
            if text:
                yield Part("content", text)
            return
        yield from self._parts(self._parser.feed(text))

    def finish(self) -> Iterator[Part]:
        """Yields the rest."""
        if self._parser is not None:
            yield from self._parts(self._parser.finalize()[1])

    def _parts(self, events: list[dict[str, Any]]) -> Iterator[Part]:
        for event in events:
            field, kind = event["field"], event["type"]
            if field == "call":
                if kind == "region_chunk":
                    self._call += event["text"]
                elif kind == "region_close":
                    written, self._call = self._call, ""
                    call = self._parsed(written)
                    self.calls += call is not None
                    yield (
                        Part("content", OPEN_CALL + written + CLOSE_CALL)
                        if call is None
                        else Part("call", call=call)
                    )
            elif field == "reasoning":
                if kind == "region_chunk":
                    yield from self._text("reasoning", event["text"])
                self._space = True
            elif kind == "region_chunk":
                yield from self._text("content", event["text"])

    def _text(self, kind: Literal["reasoning", "content"], text: str) -> Iterator[Part]:
        if (kind == "content" and self._space) or (kind == "reasoning" and not self._reasoned):
            text = text.lstrip()
        elif kind == "content" and (self.calls and not text.strip()):
            text = ""  # between calls
        if text:
            if kind == "content":
                self._space = False
            else:
                self._reasoned = True
            yield Part(kind, text)

    def _parsed(self, written: str) -> ToolCall | None:
        name, arguments = (self._of_xml if self._kind.calls == "xml" else _of_json)(written)
        if name not in self._tools or not isinstance(arguments, dict):
            return None
        return ToolCall(f"call_{secrets.token_hex(12)}", name, json.dumps(arguments, ensure_ascii=False))

    def _of_xml(self, written: str) -> tuple[str, Any]:
        match = _FUNCTION.fullmatch(written)
        if match is None:
            return _of_json(written)
        schema = self._tools.get(match[1].strip(), {}).get("properties")
        properties = schema if isinstance(schema, dict) else {}
        return match[1].strip(), {
            name.strip(): _value(text, properties.get(name.strip()))
            for name, text in _PARAMETER.findall(match[2])
        }


def _of_json(written: str) -> tuple[str, Any]:
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        return "", None
    if not isinstance(value, dict):
        return "", None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return "", None
    return str(value.get("name", "")), arguments


def _value(text: str, schema: Any) -> Any:
    """Returns a parameter's value by its schema: what is no text is written as JSON."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
