"""Tools of a chat request, and the grammars by which an answer has to call one or to be JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from pipeline.gateway.bodies import Common, FlatTool, Format, Function, Object, Structured, Tool
from pipeline.gateway.body import fitting, parse_json
from pipeline.gateway.chat_output import CLOSE_CALL, OPEN_CALL, TemplateKind
from pipeline.gateway.errors import bad

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

    given: tuple[Object, ...] = ()
    schemas: dict[str, Object] = field(default_factory=dict)
    wanted: tuple[str, ...] = ()
    parallel: bool = True

    def grammar(self, kind: TemplateKind) -> Grammar:
        """Returns that of an answer that calls a wanted tool; none where no tool has to be called."""
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


def openai_tools(
    given: list[Object] | None, choice: str | Object | None, parallel: bool | None, kind: TemplateKind
) -> Tools:
    """Returns those of a chat, which the template reads as they were given. Raises ApiError."""
    tools = fitting(given or [], list[Tool], "tools")
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
    return chosen_tools(given or [], schemas, choice, kind, parallel is not False)


def flat_tools(given: Iterable[FlatTool | Function]) -> tuple[list[Object], dict[str, Object]]:
    """Returns tools as templates read them, and their schemas, of dialects that write them in one level."""
    tools, schemas = [], {}
    for tool in given:
        schema = schemas[tool.name] = tool.parameters or {}
        function = {"name": tool.name, "description": tool.description or "", "parameters": schema}
        tools.append({"type": "function", "function": function})
    return tools, schemas


def chosen_tools(
    tools: list[Object],
    schemas: dict[str, Object],
    choice: str | Object | None,
    kind: TemplateKind,
    parallel: bool,
) -> Tools:
    """`choice`: none, auto, required, or an object that names a function. Raises ApiError."""
    names: tuple[str, ...] = ()
    if isinstance(choice, dict):
        inner = choice.get("function", choice)
        wanted = inner.get("name") if isinstance(inner, dict) else None
        known = isinstance(wanted, str) and wanted in schemas
        if choice.get("type", "function") != "function" or not known:
            raise bad("tool_choice", "must name one of the tools")
        names = (str(wanted),)
    elif choice == "required":
        names = tuple(schemas)
        if not tools:
            raise bad("tool_choice", "there are no tools to call")
    elif choice not in (None, "auto", "none"):
        raise bad("tool_choice", "must be none, auto, required, or an object that names a function")
    if not tools or choice == "none":
        return Tools(parallel=parallel)
    if not kind.tools:
        raise bad("tools", "this model's chat template has no place for tools")
    if names and (not kind.calls or kind.calls == "xml"):
        raise bad("tool_choice", "calls of this model's form cannot be enforced; use auto")
    return Tools(tuple(tools), schemas, names, parallel)


def grammar_of(body: Common, formats: dict[str, Format | None], forced: Grammar = Grammar()) -> Grammar:
    """Returns the one grammar of a request. `formats`: the dialect's own fields for it, by name; `forced`:
    that of a call that has to be. Raises ApiError, also where there are several."""
    grammars = [_of_format(given, name) for name, given in formats.items() if given is not None]
    guided = Structured(body.guided_json, body.guided_regex, body.guided_grammar, body.guided_choice)
    grammars += _structured(guided, "guided_")
    if body.structured_outputs is not None:
        grammars += _structured(body.structured_outputs, "structured_outputs.")
    grammars = [grammar for grammar in (forced, *grammars) if grammar]
    if forced and len(grammars) > 1:
        raise bad("tool_choice", "an answer follows a form or calls a tool; give one of them")
    if len(grammars) > 1:
        raise bad(grammars[-1].field or "", "an answer follows one grammar only; give one")
    return grammars[0] if grammars else Grammar()


def _of_format(wanted: Format, name: str) -> Grammar:
    def required(value: Any, inner: str) -> Any:
        if value is None:
            raise bad(f"{name}.{inner}", "is required")
        return value

    match wanted.type:
        case "json_object":
            return json_schema({"type": "object"}, name)
        case "json_schema":
            inner = wanted.json_schema
            return json_schema(required(wanted.schema if inner is None else inner.schema, "schema"), name)
        case "grammar":
            return lark(required(wanted.grammar, "grammar"), name)
        case "regex":
            return _made("regex", required(wanted.regex, "regex"), name)
    return Grammar()


def _structured(given: Structured, of: str) -> list[Grammar]:
    """Returns the grammars of vLLM's fields, whose names begin with `of`."""
    grammars = []
    if (schema := given.json) is not None:
        whole = parse_json(schema, f"{of}json") if isinstance(schema, str) else schema
        grammars.append(json_schema(whole, f"{of}json"))
    if given.regex is not None:
        grammars.append(_made("regex", given.regex, f"{of}regex"))
    if given.grammar is not None:
        grammars.append(lark(given.grammar, f"{of}grammar"))
    if given.choice is not None:
        choices = [given.choice] if isinstance(given.choice, str) else given.choice
        if not 1 <= len(choices) <= MOST_CHOICES or "" in choices:
            raise bad(f"{of}choice", f"takes 1 to {MOST_CHOICES} texts, none of them empty")
        grammars.append(lark("start: " + " | ".join(map(json.dumps, choices)), f"{of}choice"))
    return grammars


def _made(kind: str, value: str, param: str, **options: Any) -> Grammar:
    if find_spec("llguidance") is None:
        raise bad(param, "grammars need the Python package llguidance: pip install '.[serve]'")
    from llguidance import LLMatcher

    try:
        made: str = getattr(LLMatcher, f"grammar_from_{kind}")(value, **options)
    except ValueError as e:
        raise bad(param, f"cannot be used: {' '.join(str(e).split())[:300]}") from None
    return Grammar(made, param)


def json_schema(schema: Object, param: str) -> Grammar:
    return _made("json_schema", json.dumps(schema), param, defaults={"whitespace_pattern": WHITESPACE})


def lark(rules: str, param: str) -> Grammar:
    return _made("lark", rules, param)
