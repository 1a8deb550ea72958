"""Multiple-choice items, one JSON object a line:

    {"context": "The capital of France is", "choices": [" Paris", " Rome", " Bonn"], "answer": 0}

context   text before the choice
choices   two or more continuations of it, all different; a choice begins with the space before its word
answer    the index of the right one, from 0
kind      a group for the report; optional

The file is UTF-8; blank lines are skipped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.command_line.checks import WrongLine, read_lines
from protocol.codec import encode
from protocol.errors import MalformedMessage
from protocol.messages import Score

FIELDS = ("context", "choices", "answer", "kind")


@dataclass(frozen=True)
class Item:
    """One question. `line`: its number in the file."""

    line: int
    context: str
    choices: tuple[str, ...]
    answer: int
    kind: str


def read_items(path: Path) -> list[Item]:
    """Raises WrongUsage, one line with the file and the line's number, for invalid items."""
    return read_lines(path, _item, "item")


def _item(line: str, number: int) -> Item:
    """Raises WrongLine with the reason."""
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        raise WrongLine("this is no JSON object") from None
    if not isinstance(given, dict):
        raise WrongLine("this is no JSON object")
    if unknown := [key for key in given if key not in FIELDS]:
        raise WrongLine(f"unknown field {unknown[0][:40]!r}; known are {', '.join(FIELDS)}")
    context, choices, answer = (_needed(given, name) for name in ("context", "choices", "answer"))
    kind = given.get("kind", "")
    if not (isinstance(context, str) and context):
        raise WrongLine("context must be text")
    if not isinstance(choices, list) or not all(isinstance(each, str) and each for each in choices):
        raise WrongLine("choices must be a list of texts")
    if len(choices) < 2 or len(set(choices)) < len(choices):
        raise WrongLine("choices must be two or more different texts")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise WrongLine(f"answer must be an index of the choices, 0 to {len(choices) - 1}")
    if not isinstance(kind, str):
        raise WrongLine("kind must be text")
    try:
        for text in (kind, *(context + choice for choice in choices)):
            encode(Score(0, text=text))
    except MalformedMessage as e:
        raise WrongLine(f"this cannot be sent to the engine: {e}") from None
    return Item(number, context, tuple(choices), answer, kind)


def _needed(given: dict[str, Any], name: str) -> Any:
    if name not in given:
        raise WrongLine(f"the field {name} is missing")
    return given[name]
