"""Scripts of `launch.py stress`: one JSON object a line, a request or a conversation of several requests.

    {"name": "greeting", "prompt": "Good morning,", "max_tokens": 32}
    {"messages": [{"role": "user", "content": "What is a list?"}], "temperature": 0.8, "seed": 7}
    {"turns": ["What is a list?", "And a tuple?"], "cancel_after": 5, "delay": 0.5}

Exactly one of
  prompt        text to continue, without a chat template
  messages      a conversation so far, rendered by the chat template
  turns         a user's messages in one conversation; each answer becomes part of the next prompt
and optionally
  max_tokens    longest answer, in tokens (64)
  temperature   0: greedy, and only greedy answers are compared (0)
  seed          of the sampling
  cancel_after  tokens after which each answer is cancelled; 0: at once
  delay         seconds to wait before the first request
  name          a label for reports ("line N")

The file is UTF-8; blank lines are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from launch.command_line.checks import WrongLine, read_lines
from launch.command_line.values import nearest
from protocol.codec import encode
from protocol.errors import MalformedMessage
from protocol.messages import ChatMessage, Generate, Sampling

PROMPTS = ("prompt", "messages", "turns")
LONGEST_DELAY = 600.0  # seconds
HIGHEST_TEMPERATURE = 1000.0
SHOWN = 40  # characters of a wrong value in an error message


@dataclass(frozen=True)
class Entry:
    """One line of a script; exactly one of `prompt`, `messages`, `turns` is not None."""

    name: str
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    turns: tuple[str, ...] | None = None
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int | None = None
    cancel_after: int | None = None
    delay: float = 0.0

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, seed=self.seed)

    @property
    def requests(self) -> int:
        return 1 if self.turns is None else len(self.turns)


def read_script(path: Path) -> list[Entry]:
    """Raises WrongUsage, one line with the file and the line's number, for an invalid script."""
    return read_lines(path, _entry, "request")


def _entry(line: str, number: int) -> Entry:
    given = _object(line)
    known = [f.name for f in fields(Entry)]
    for key in given:
        if key not in known:
            raise WrongLine(
                f"unknown field {key!r}{nearest(key, known) or '; known are ' + ', '.join(known)}"
            )
    prompts = [key for key in PROMPTS if key in given]
    if len(prompts) != 1:
        has = f"not {' and '.join(prompts)}" if prompts else "it has none"
        raise WrongLine(f"give exactly one of {', '.join(PROMPTS)}; {has}")
    values: dict[str, Any] = {"name": f"line {number}"}
    for key, value in given.items():
        try:
            values[key] = CHECKS[key](value)
        except WrongLine as e:
            raise WrongLine(f"{key} must be {e}") from None
    entry = Entry(**values)
    try:
        encode(Generate(0, entry.prompt, messages=entry.messages, sampling=entry.sampling))
        for text in (entry.name, *(entry.turns or ())):
            encode(Generate(0, text))
    except MalformedMessage as e:
        raise WrongLine(f"this cannot be sent to the engine: {e}") from None
    return entry


def _object(line: str) -> dict[str, Any]:
    def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for i, (key, _) in enumerate(pairs):
            if any(key == later for later, _ in pairs[i + 1 :]):
                raise WrongLine(f"{key!r} appears twice")
        return dict(pairs)

    try:
        value = json.loads(line, object_pairs_hook=without_repetition)
    except json.JSONDecodeError as e:
        raise WrongLine(f"this is not JSON: {e.msg} at character {e.colno}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits; brackets without end
        raise WrongLine("this is not JSON that can be read") from None
    if not isinstance(value, dict):
        raise WrongLine(f"this is {_shown(value)}; each line holds a JSON object")
    return value


def _check(expected: str, good: Callable[[Any], bool], made: type | None = None) -> Callable[[Any], Any]:
    """Accepts good values, as they are or converted."""

    def check(value: Any) -> Any:
        if not good(value):
            _wrong(expected, value)
        return value if made is None else made(value)

    return check


def _integer(smallest: int) -> Callable[[Any], Any]:
    expected = f"an integer from {smallest} to 2**63 - 1"
    return _check(expected, lambda value: type(value) is int and smallest <= value < 1 << 63)


def _number(largest: float) -> Callable[[Any], Any]:
    expected = f"a number from 0 to {largest:g}"
    return _check(expected, lambda value: type(value) in (int, float) and 0 <= value <= largest, float)


def _messages(value: Any) -> tuple[ChatMessage, ...]:
    expected = 'a list of {"role": "user", "content": "..."}'
    if not isinstance(value, list) or not value:
        _wrong(expected, value)
    for message in value:
        if not isinstance(message, dict) or sorted(message) != ["content", "role"]:
            _wrong(expected, message)
        if not all(isinstance(text, str) for text in message.values()):
            _wrong(expected, message)
    return tuple(ChatMessage(**message) for message in value)


def _turns(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        _wrong("a list of strings", value)
    for turn in value:
        if not isinstance(turn, str):
            _wrong("a list of texts", turn)
    return tuple(value)


CHECKS: dict[str, Callable[[Any], Any]] = {
    "name": _check(
        "a string of one line", lambda v: isinstance(v, str) and v.isprintable() and bool(v.strip())
    ),
    "prompt": _check("a string", lambda value: isinstance(value, str)),
    "messages": _messages,
    "turns": _turns,
    "max_tokens": _integer(1),
    "temperature": _number(HIGHEST_TEMPERATURE),
    "seed": _integer(0),
    "cancel_after": _integer(0),
    "delay": _number(LONGEST_DELAY),
}


def _wrong(expected: str, value: Any) -> NoReturn:
    raise WrongLine(f"{expected}, not {_shown(value)}")


def _shown(value: Any) -> str:
    """A value as JSON on one line, cut to SHOWN characters."""
    text = json.dumps(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
