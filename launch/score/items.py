"""Multiple-choice items, one JSON object a line:

    {"context": "The capital of France is", "choices": [" Paris", " Rome", " Bonn"], "answer": 0}

context   text before the choice
choices   two or more continuations of it, all different; a choice begins with the space before its word
answer    the index of the right one, from 0
kind      a group for the report; optional

The file is UTF-8; blank lines are skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from launch.command_line.checks import WrongLine, parse_line, read_lines
from protocol.codec import encode
from protocol.errors import MalformedMessage
from protocol.messages import Score

Text = Annotated[str, Meta(min_length=1)]


class Item(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One question. `line`: its number in the file."""

    context: Text
    choices: Annotated[tuple[Text, ...], Meta(min_length=2)]
    answer: Annotated[int, Meta(ge=0)]
    kind: str = ""
    line: int = 0


def read_items(path: Path) -> list[Item]:
    """Raises WrongUsage, one line with the file and the line's number, for invalid items."""
    return read_lines(path, _item, "item")


def _item(line: str, number: int) -> Item:
    """Raises WrongLine with the reason."""
    item = parse_line(line, Item)
    if len(set(item.choices)) < len(item.choices):
        raise WrongLine("choices must be different texts")
    if item.answer >= len(item.choices):
        raise WrongLine(f"answer must be an index of the choices, 0 to {len(item.choices) - 1}")
    try:
        for text in (item.kind, *(item.context + choice for choice in item.choices)):
            encode(Score(0, text=text))
    except MalformedMessage as e:
        raise WrongLine(f"this cannot be sent to the engine: {e}") from None
    return msgspec.structs.replace(item, line=number)
