"""Settings that all endpoints with an answer read of a body: how long it is, how tokens are chosen, where
it ends, which tools it may call, and the grammar by which it has to call one or to be JSON."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from pipeline.errors import RequestError
from pipeline.gateway.bodies import (
    MOST_SEED,
    Common,
    Format,
    FreeTool,
    Function,
    FunctionTool,
    Object,
    TextTool,
    fitting,
    note_once,
)
from pipeline.gateway.errors import bad
from pipeline.text.chat_format import FORMS, TemplateKind
from pipeline.text.detokenizer import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from pipeline.text.generation_defaults import check_size
from protocol.messages import ChatMessage, Sampling, Shaping, TokenBias, Welcome

# Of JSON, for llguidance: at most one space, behind a comma or a colon, where models have tokens with it. One
# that is not sure may otherwise write white space only.
COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
UNENFORCED = "beside tools this model is told the form of its answer, which it may not follow"
TOLD = """\
When you answer without calling a tool, the answer is JSON and nothing else, and follows this schema:
"""
ANY_CALL = """\
start: form | {1} REST
form: {0}
REST: /(.|\\n)*/"""
TOOL_KINDS = ("function", "custom")  # that can be called by name
LEAST_TOP_P = 1e-9  # leaves the most probable token alone
DEFAULT_PART = 4  # of the context, for an answer without a limit
PLACELESS = "this model's chat template has no place for tools: they are written into the system message"


@dataclass(frozen=True)
class Grammar:
    """Grammar that an answer follows; false where it follows none. `field`: of the request that asks for
    it. `told`: what the model is told instead, where nothing can be enforced."""

    text: str = ""
    field: str | None = None
    told: str = ""

    def __bool__(self) -> bool:
        return bool(self.text)


class Named(Struct):
    name: str | None = None  # of a tool that can be called


class AllowedTools(Struct):
    mode: Literal["auto", "required"]
    tools: list[Object]


@dataclass(frozen=True)
class Tools:
    """`given`: as the chat template reads them; `schemas`: of the parameters of all that can be called, by
    name. `wanted`: the names that the answer has to call one of; empty where it may do without. `calls`: how
    the model writes them, of FORMS. `free`: the names of those in `schemas` whose input is a text to the
    client."""

    given: tuple[Object, ...] = ()
    schemas: dict[str, Object] = field(default_factory=dict)
    wanted: tuple[str, ...] = ()
    parallel: bool = True
    calls: str = ""
    free: frozenset[str] = frozenset()

    def grammar(self, schema: Object | None = None, param: str = "tools") -> Grammar:
        """Returns that of an answer that calls a wanted tool; with a schema, of one that is JSON of it or
        calls any tools, which are enforced only where they are JSON. `param`: the field that asks for it."""
        calls, rules, form = [], [], FORMS[self.calls]
        if self.calls != "json":
            return _made("lark", ANY_CALL.format(_json_rule(schema or {}), json.dumps(form.open)), param)
        for place, name in enumerate(self.wanted or self.schemas):
            rules.append(f"arguments{place}: {_json_rule(self.schemas[name] or {'type': 'object'})}")
            head = json.dumps(f'{form.open}\n{{"name": {json.dumps(name)}, "arguments": ')
            calls.append(f"{head} arguments{place} " + json.dumps(f"}}\n{form.close}"))
        rules.append(f"call: {' | '.join(calls)}")
        start = "call"
        if schema is not None:
            rules.append(f"form: {_json_rule(schema)}")
            start = 'form | call ("\\n" call)*' if self.parallel else "form | call"
        return _made("lark", "\n".join([f"start: {start}", *rules]), param)


def openai_tools(
    given: list[Object] | None, choice: str | Object | None, parallel: bool | None, kind: TemplateKind
) -> Tools:
    """Returns those of a chat. The template reads functions as they were given. Raises ApiError."""
    shown: list[Object] = []
    schemas: dict[str, Object] = {}
    free: set[str] = set()
    for tool, value in zip(
        fitting(given or [], list[FunctionTool | TextTool], "tools"), given or [], strict=True
    ):
        if isinstance(tool, TextTool):
            (value,), schema = flat_tools([free_function(tool.custom)])
            schemas |= schema
            free.add(tool.custom.name)
        else:
            schemas[tool.function.name] = tool.function.parameters or {}
        shown.append(value)
    chosen = chosen_tools(shown, schemas, choice, kind, parallel is not False)
    return dataclasses.replace(chosen, free=frozenset(free))


def flat_tools(given: Iterable[Function]) -> tuple[list[Object], dict[str, Object]]:
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
    """`choice`: none, auto, required, or an object that names a function, or the functions that are allowed
    now. Raises ApiError."""
    names: tuple[str, ...] = ()
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, schemas = _allowed(choice, schemas)  # the prompt has all of them: it stays as it was
    if isinstance(choice, dict):
        inner = _inner(choice)
        wanted = inner.get("name") if isinstance(inner, dict) else None
        known = isinstance(wanted, str) and wanted in schemas
        if choice.get("type", "function") not in TOOL_KINDS or not known:
            raise bad("tool_choice", "must name one of the tools")
        names = (str(wanted),)
    elif choice == "required":
        names = tuple(schemas)
        if not schemas:
            raise bad("tool_choice", "there are no tools to call")
    elif choice not in (None, "auto", "none"):
        raise bad("tool_choice", "must be none, auto, required, or an object that names a function")
    if not schemas:
        return Tools(parallel=parallel)
    if not kind.tools:
        note_once(PLACELESS, logging.WARNING)
    if choice == "none":  # the prompt has them all the same: it is the beginning of the next one
        return Tools(tuple(tools), parallel=parallel)
    if names and kind.calls != "json":
        raise bad("tool_choice", "calls of this model's form cannot be enforced; use auto")
    return Tools(tuple(tools), schemas, names, parallel, kind.calls)


def _inner(named: Object) -> Any:
    """Returns the object with a tool's name, which chats have in a field of their own."""
    return next((named[kind] for kind in TOOL_KINDS if kind in named), named)


def _allowed(choice: Object, schemas: dict[str, Object]) -> tuple[str, dict[str, Object]]:
    """Returns the choice among the tools that are allowed, and their schemas. Raises ApiError."""
    inner = fitting(choice.get("allowed_tools", choice), AllowedTools, "tool_choice")  # a chat's is nested
    named = (fitting(_inner(tool), Named, "tool_choice.tools").name for tool in inner.tools)
    allowed = {name: schemas[name] for name in named if name in schemas}
    if not allowed:
        raise bad("tool_choice", "must allow one of the tools")
    return inner.mode, allowed


def grammar_of(wanted: Format | None, name: str, tools: Tools = Tools()) -> Grammar:
    """Returns the grammar of a request. `name`: of the field with the wanted form; `tools`: those that the
    answer may call instead, or has to. Raises ApiError, also where an answer has to do both."""
    schema = None if wanted is None else _schema(wanted, name)
    if schema is None:
        return tools.grammar() if tools.wanted else Grammar()
    if tools.wanted:
        raise bad("tool_choice", "an answer follows a form or calls a tool; give one of them")
    if not tools.schemas:
        return json_schema(schema, name)
    form = FORMS.get(tools.calls)
    if form is None or form.marks:  # what is a special token is no text of a grammar
        note_once(UNENFORCED, logging.WARNING)
        return Grammar(told=TOLD + json.dumps(schema, ensure_ascii=False))
    return tools.grammar(schema, name)


def told(turns: tuple[ChatMessage, ...], grammar: Grammar) -> tuple[ChatMessage, ...]:
    """Returns a conversation with what the model is told of its answer's form, in the system message."""
    if not grammar.told:
        return turns
    if turns and turns[0].role == "system":
        return (replace(turns[0], content=f"{turns[0].content}\n\n{grammar.told}"), *turns[1:])
    return (ChatMessage("system", grammar.told), *turns)


def _schema(wanted: Format, name: str) -> Object | None:
    """Returns the schema of a form, None for any text. Raises ApiError."""
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    schema = wanted.schema if wanted.json_schema is None else wanted.json_schema.schema
    if schema is None:
        raise bad(f"{name}.schema", "is required")
    return schema


def _json_rule(schema: Object) -> str:
    return "%json " + json.dumps(schema | {"x-guidance": COMPACT})


def _made(kind: str, value: str, param: str, **options: Any) -> Grammar:
    if find_spec("llguidance") is None:
        raise bad(param, "grammars need the Python package llguidance: pip install '.[serve]'")
    from llguidance import LLMatcher

    try:
        check_size(value)
        made: str = getattr(LLMatcher, f"grammar_from_{kind}")(value, **options)
    except (ValueError, RequestError) as e:
        raise bad(param, f"cannot be used: {' '.join(str(e).split())[:300]}") from None
    return Grammar(made, param)


def json_schema(schema: Object, param: str) -> Grammar:
    """Returns the grammar of JSON that has this schema. Raises ApiError."""
    return _made("json_schema", json.dumps(schema), param, defaults=COMPACT)


@dataclass(frozen=True)
class Settings:
    """`sampling`, `stop`, ...: as of `Client.generate`."""

    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    ignore_eos: bool
    choices: int
    stream: bool
    include_usage: bool
    shaping: Shaping = Shaping()  # noqa: RUF009 - frozen
    logprobs: int = -1
    grammar_field: str | None = None  # of the request, from which the shaping's grammar is

    def of_choice(self, index: int) -> dict[str, Any]:
        """Arguments of `Client.generate` for one of the choices: each has a seed of its own."""
        sampling, seed = self.sampling, self.sampling.seed
        if seed is not None and index:
            sampling = replace(sampling, seed=(seed + index) & MOST_SEED)
        return {
            "max_tokens": self.max_tokens,
            "sampling": sampling,
            "stop": self.stop,
            "ignore_eos": self.ignore_eos,
            "shaping": self.shaping,
            "logprobs": self.logprobs,
        }


def settings_of(
    body: Common,
    welcome: Welcome,
    max_tokens: float | None,
    *,
    stop: str | list[str] | None,
    stop_field: str = "stop",
    choices: float | None = None,
    default: Sampling | None = None,
    grammar: Grammar = Grammar(),
    logprobs: float | None = None,
) -> Settings:
    """`max_tokens`: None for a quarter of the context, after which a model that finds no end is stopped.
    `default`: sampling that is not given; without it as the model's makers recommend. Raises ApiError."""
    options, stream = body.stream_options, bool(body.stream)
    if max_tokens is None:
        max_tokens = max(welcome.context // DEFAULT_PART, 1)
        limit = f"{max_tokens:.0f} tokens, 1/{DEFAULT_PART} of the context"
        note_once(f"answers to requests without max_tokens have at most {limit}", logging.WARNING)
    if options is not None and not stream:
        raise bad("stream_options", "belongs to stream: true")
    return Settings(
        max_tokens=int(max_tokens),
        sampling=_sampling(body, default or welcome.sampling),
        stop=_stop(stop, stop_field),
        ignore_eos=bool(body.ignore_eos),
        choices=int(choices or 1),
        stream=stream,
        include_usage=options is not None and bool(options.include_usage),
        shaping=Shaping(
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            bias=_biases(body.logit_bias or {}, welcome.vocabulary),
            grammar=grammar.text,
        ),
        logprobs=-1 if logprobs is None else int(logprobs),
        grammar_field=grammar.field,
    )


def _stop(given: str | list[str] | None, name: str) -> tuple[str, ...]:
    stop = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stop) > MAX_STOP_STRINGS or not all(0 < len(text) <= MAX_STOP_CHARACTERS for text in stop):
        raise bad(name, f"takes up to {MAX_STOP_STRINGS} texts of 1 to {MAX_STOP_CHARACTERS} characters")
    return stop


def _sampling(body: Common, default: Sampling) -> Sampling:
    names = ("temperature", "top_p", "min_p", "repetition_penalty")
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    if body.top_k is not None:
        given["top_k"] = max(int(body.top_k), 0)  # -1: no limit, as other servers have it
    if "top_p" in given:
        given["top_p"] = max(given["top_p"], LEAST_TOP_P)
    return replace(default, **given, seed=None if body.seed is None else body.seed & MOST_SEED)


def _biases(given: dict[str, float], vocabulary: int) -> tuple[TokenBias, ...]:
    for token in given:
        if not (token.isascii() and token.isdecimal()) or len(token) > 10 or int(token) >= vocabulary:
            raise bad("logit_bias", f"{token[:40]!r} is no token id; they end at {vocabulary - 1}")
    return tuple(TokenBias(int(token), bias) for token, bias in given.items())


# ----------------------------------------------------------------------------------------------------------
# Tools of OpenAI's responses, of several types, as functions that a model can call, and what they are to
# the client, whose names its answers have.


MOST_NAMESPACE = 256  # characters: each of its tools has them in its name


class FlatTool(Struct):
    name: str
    description: str | None = None
    parameters: Object | None = None


class Namespace(Struct):
    name: Annotated[str, Meta(max_length=MOST_NAMESPACE)]
    tools: list[Object]
    description: str | None = None


@dataclass(frozen=True)
class Origin:
    """What a tool is to the client. `free`: its input is a text."""

    name: str
    namespace: str | None = None
    free: bool = False


FREE_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "all of the input, as it is"}},
    "required": ["input"],
    "additionalProperties": False,
}


Functions = dict[str, tuple[Function, Origin]]  # by the names that the model calls


def functions_of(tools: list[Object], where: str) -> Functions:
    """Returns tools as functions that a model can call. Those that only a provider runs are left
    out. Raises ApiError."""
    found: Functions = {}
    for function, origin in _functions(tools, where, None):
        found.setdefault(function.name, (function, origin))
    return found


def _functions(tools: list[Object], where: str, namespace: str | None) -> Iterator[tuple[Function, Origin]]:
    for place, value in enumerate(tools):
        at = f"{where}[{place}]"
        match value.get("type"):
            case "function":
                tool = fitting(value, FlatTool, at)
                function = Function(joined(namespace, tool.name), tool.description, tool.parameters)
                yield function, Origin(tool.name, namespace)
            case "custom":
                free = fitting(value, FreeTool, at)
                yield free_function(free, namespace), Origin(free.name, namespace, free=True)
            case "namespace" if namespace is None:
                group = fitting(value, Namespace, at)
                about = group.description
                for function, origin in _functions(group.tools, f"{at}.tools", group.name):
                    if about:  # is said once, with the first of them
                        function.description = f"{about}\n\n{function.description or ''}"
                    about = None
                    yield function, origin
            case str(kind):
                text = f"tools of the type {kind[:40]!r} cannot be called here: they are left out"
                note_once(text, logging.WARNING)
            case _:
                raise bad(f"{at}.type", "is required, a string")


def joined(namespace: str | None, name: str) -> str:
    """Returns the name by which a model calls a tool."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


def free_function(tool: FreeTool, namespace: str | None = None) -> Function:
    """Returns a tool whose input is a text as a function."""
    text = tool.description or ""
    grammar = tool.format and (tool.format.grammar or tool.format)
    if grammar and grammar.definition:
        text += f"\n\nThe input follows this grammar ({grammar.syntax}):\n{grammar.definition}"
    return Function(joined(namespace, tool.name), text, FREE_INPUT)


def free_input(arguments: str) -> str:
    """Returns the text of a call's arguments, which a model may have named otherwise."""
    given: Object = json.loads(arguments)
    text = given.get("input", next(iter(given.values()), "") if len(given) == 1 else None)
    return text if isinstance(text, str) else arguments
