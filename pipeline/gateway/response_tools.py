"""Tools of OpenAI's responses, of several types, as functions that a model can call, and what they are to the
client, whose names its answers have."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

from pipeline.gateway.bodies import FreeTool, Function, Object, fitting, note_once
from pipeline.gateway.errors import bad

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
