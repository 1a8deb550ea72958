"""Tools of a chat request, and the grammars by which an answer has to call one or to be JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from pipeline.gateway.body import Fields, kind_of, parse_json
from pipeline.gateway.chat_output import CLOSE_CALL, OPEN_CALL
from pipeline.gateway.errors import bad
from pipeline.gateway.template import TemplateKind

MOST_TOOLS = 512
MOST_CHOICES = 256
WHITESPACE = r" |\n {0,32}"  # of JSON: a model that is not sure may otherwise write nothing else


@dataclass(frozen=True)
class Grammar:
    """What an answer follows; false where it follows none. `field`: of the request that asks for it."""

    text: str = ""
    field: str | None = None

    def __bool__(self) -> bool:
        return bool(self.text)


@dataclass(frozen=True)
class Tools:
    """`given`: as the chat template reads them; `schemas`: of their parameters, by name. `wanted`: the names
    that the answer has to call one of; empty where it may do without."""

    given: tuple[dict[str, Any], ...] = ()
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict)
    wanted: tuple[str, ...] = ()
    parallel: bool = True

    def grammar(self, kind: TemplateKind) -> Grammar:
        """Of an answer that calls a wanted tool; none where no tool has to be called."""
        if not self.wanted:
            return Grammar()
        calls, rules = [], []
        for place, name in enumerate(self.wanted):
            compact = {"x-guidance": {"whitespace_flexible": False}}
            schema = json.dumps((self.schemas[name] or {"type": "object"}) | compact)
            rules.append(f"arguments{place}: %json {schema}")
            head = json.dumps(f'{OPEN_CALL}\n{{"name": {json.dumps(name)}, "arguments": ')
            calls.append(f"{head} arguments{place} " + json.dumps(f"}}\n{CLOSE_CALL}"))
        return lark("\n".join([f"start: {' | '.join(calls)}", *rules]), "tools")


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
        if (
            choice.get("type", "function") != "function"
            or not isinstance(wanted, str)
            or wanted not in schemas
        ):
            fields.refuse(name, "must name one of the tools")
        names: tuple[str, ...] = (wanted,)
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


def take_format(fields: Fields, field_name: str = "response_format") -> Grammar:
    """The grammar of `response_format`, `guided_*` or `structured_outputs`. Raises ApiError."""
    grammars = []
    wanted, name = fields.within(field_name), fields.name(field_name)
    if wanted is not None:
        kind = wanted.choice("type", ("text", "json_object", "json_schema", "grammar", "regex"))
        if kind == "json_object":
            grammars.append(json_schema({"type": "object"}, name))
        elif kind == "json_schema":
            inner = wanted.within("json_schema") or wanted
            grammars.append(json_schema(inner.object("schema"), name))
        elif kind == "grammar":
            grammars.append(lark(wanted.text("grammar"), name))
        elif kind == "regex":
            grammars.append(regex(wanted.text("regex"), name))
    guided = fields.within("structured_outputs")
    for prefix, source in (("guided_", fields), ("", guided)):
        if source is None:
            continue
        if (schema := source.any(f"{prefix}json")) is not None:
            grammars.append(
                json_schema(_schema(source, f"{prefix}json", schema), source.name(f"{prefix}json"))
            )
        if (pattern := source.text(f"{prefix}regex", None)) is not None:
            grammars.append(regex(pattern, source.name(f"{prefix}regex")))
        if (rules := source.text(f"{prefix}grammar", None)) is not None:
            grammars.append(lark(rules, source.name(f"{prefix}grammar")))
        if source.any(f"{prefix}choice") is not None:
            choices = source.strings(f"{prefix}choice")
            if not 1 <= len(choices) <= MOST_CHOICES or "" in choices:
                source.refuse(f"{prefix}choice", f"takes 1 to {MOST_CHOICES} texts, none of them empty")
            rule = "start: " + " | ".join(map(json.dumps, choices))
            grammars.append(lark(rule, source.name(f"{prefix}choice")))
    if guided is not None and (unknown := guided.unknown):
        guided.refuse(unknown[0][:40], "is not supported here")
    if len(grammars) > 1:
        fields.refuse(field_name, "an answer follows one grammar only; give one")
    return grammars[0] if grammars else Grammar()


def _schema(fields: Fields, name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = parse_json(value, fields.name(name))
    if not isinstance(value, dict):
        fields.refuse(name, "must be a JSON schema")
    return value


def _made(kind: str, value: str, param: str, **options: Any) -> Grammar:
    if find_spec("llguidance") is None:
        raise bad(param, "grammars need the Python package llguidance: pip install '.[serve]'")
    from llguidance import LLMatcher

    try:
        made: str = getattr(LLMatcher, f"grammar_from_{kind}")(value, **options)
    except ValueError as e:
        raise bad(param, f"cannot be used: {' '.join(str(e).split())[:300]}") from None
    return Grammar(made, param)


def json_schema(schema: dict[str, Any], param: str) -> Grammar:
    options = {"whitespace_pattern": WHITESPACE}
    return _made("json_schema", json.dumps(schema), param, defaults=options)


def regex(pattern: str, param: str) -> Grammar:
    return _made("regex", pattern, param)


def lark(rules: str, param: str) -> Grammar:
    return _made("lark", rules, param)
