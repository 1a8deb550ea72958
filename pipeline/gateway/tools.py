"""Tools of a chat request, and the grammars by which an answer has to call one or to be JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from pipeline.gateway.body import Fields, kind_of
from pipeline.gateway.chat_output import CLOSE_CALL, OPEN_CALL
from pipeline.gateway.errors import bad
from pipeline.gateway.template import TemplateKind

MOST_TOOLS = 512
MOST_CHOICES = 256
WHITESPACE = r" |\n {0,32}"  # of JSON: a model that is not sure may otherwise write nothing else


@dataclass(frozen=True)
class Tools:
    """`given`: as the chat template reads them; `schemas`: of their parameters, by name. `wanted`: the names
    that the answer has to call one of; empty where it may do without."""

    given: tuple[dict[str, Any], ...] = ()
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict)
    wanted: tuple[str, ...] = ()
    parallel: bool = True

    def grammar(self, kind: TemplateKind) -> str:
        """Of an answer that calls a wanted tool; "" where none has to be called."""
        if not self.wanted:
            return ""
        calls, rules = [], []
        for place, name in enumerate(self.wanted):
            compact = {"x-guidance": {"whitespace_flexible": False}}
            schema = json.dumps((self.schemas[name] or {"type": "object"}) | compact)
            rules.append(f"arguments{place}: %json {schema}")
            head = json.dumps(f'{OPEN_CALL}\n{{"name": {json.dumps(name)}, "arguments": ')
            calls.append(f"{head} arguments{place} " + json.dumps(f"}}\n{CLOSE_CALL}"))
        return lark("\n".join([f"start: {' | '.join(calls)}", *rules]))


def take_tools(fields: Fields, kind: TemplateKind) -> Tools:
    """OpenAI's `tools`, `tool_choice`, `parallel_tool_calls`. Raises ApiError."""
    given = fields.array("tools", None) or []
    parallel = fields.flag("parallel_tool_calls", True)
    choice = fields.any("tool_choice")
    if len(given) > MOST_TOOLS:
        fields.refuse("tools", f"has {len(given)} tools; {MOST_TOOLS} is the most")
    tools = [_tool(value, f"tools[{place}]") for place, value in enumerate(given)]
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    return chosen(fields, "tool_choice", tools, schemas, choice, kind, parallel)


def chosen(
    fields: Fields,
    name: str,
    tools: Sequence[dict[str, Any]],
    schemas: dict[str, dict[str, Any]],
    choice: Any,
    kind: TemplateKind,
    parallel: bool,
) -> Tools:
    """`choice`: none, auto, required, or an object that names a function."""
    if isinstance(choice, dict):
        inner = choice.get("function", choice)
        wanted = inner.get("name") if isinstance(inner, dict) else None
        if choice.get("type", "function") != "function" or wanted not in schemas:
            fields.refuse(name, "must name one of the tools")
        names: tuple[str, ...] = (str(wanted),)
    elif choice in (None, "auto", "none", "required"):
        names = tuple(schemas) if choice == "required" else ()
        if choice == "required" and not tools:
            fields.refuse(name, "there are no tools to call")
    else:
        fields.refuse(name, "must be none, auto, required, or an object that names a function")
    if not tools or choice == "none":
        return Tools(parallel=parallel)
    if not kind.tools:
        fields.refuse("tools", "this model's chat template has no place for tools")
    if names and (not kind.calls or kind.calls == "xml"):
        fields.refuse(name, "calls of this model's form cannot be enforced; use auto")
    return Tools(tuple(tools), schemas, names, parallel)


def _tool(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad(where, f"must be an object, not {kind_of(value)}")
    fields = Fields(value, where)
    fields.choice("type", ("function",))
    function = fields.within("function")
    if function is None:
        fields.refuse("function", "is required: an object")
    function.text("name")
    function.text("description", None)
    function.object("parameters", None)
    return value


def take_format(fields: Fields, field_name: str = "response_format") -> str:
    """The grammar of `response_format`, `guided_*` or `structured_outputs`; "" without. Raises ApiError."""
    grammars = []
    wanted = fields.within(field_name)
    if wanted is not None:
        kind = wanted.choice("type", ("text", "json_object", "json_schema", "grammar", "regex"))
        if kind == "json_object":
            grammars.append(json_schema({"type": "object"}))
        elif kind == "json_schema":
            inner = wanted.within("json_schema") or wanted
            grammars.append(json_schema(inner.object("schema")))
        elif kind == "grammar":
            grammars.append(lark(wanted.text("grammar")))
        elif kind == "regex":
            grammars.append(regex(wanted.text("regex")))
    guided = fields.within("structured_outputs")
    for prefix, source in (("guided_", fields), ("", guided)):
        if source is None:
            continue
        if (schema := source.any(f"{prefix}json")) is not None:
            grammars.append(json_schema(_schema(source, f"{prefix}json", schema)))
        if (pattern := source.text(f"{prefix}regex", None)) is not None:
            grammars.append(regex(pattern))
        if (rules := source.text(f"{prefix}grammar", None)) is not None:
            grammars.append(lark(rules))
        if choices := source.strings(f"{prefix}choice"):
            if len(choices) > MOST_CHOICES or "" in choices:
                source.refuse(f"{prefix}choice", f"takes up to {MOST_CHOICES} texts, none of them empty")
            grammars.append(lark("start: " + " | ".join(map(json.dumps, choices))))
    if len(grammars) > 1:
        fields.refuse(field_name, "an answer follows one grammar only; give one")
    return grammars[0] if grammars else ""


def _schema(fields: Fields, name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        fields.refuse(name, "must be a JSON schema")
    return value


def _made(kind: str, value: str, param: str, **options: Any) -> str:
    if find_spec("llguidance") is None:
        raise bad(param, "grammars need the Python package llguidance: pip install '.[serve]'")
    from llguidance import LLMatcher

    try:
        made: str = getattr(LLMatcher, f"grammar_from_{kind}")(value, **options)
    except ValueError as e:
        raise bad(param, f"cannot be used: {' '.join(str(e).split())[:300]}") from None
    return made


def json_schema(schema: dict[str, Any]) -> str:
    options = {"whitespace_pattern": WHITESPACE}
    return _made("json_schema", json.dumps(schema), "response_format", defaults=options)


def regex(pattern: str) -> str:
    return _made("regex", pattern, "response_format")


def lark(rules: str) -> str:
    return _made("lark", rules, "response_format")
