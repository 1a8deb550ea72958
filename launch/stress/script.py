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

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from launch.command_line.checks import WrongLine, parse_line, read_lines
from protocol.codec import encode
from protocol.errors import MalformedMessage
from protocol.messages import ChatMessage, Generate, Sampling

PROMPTS = ("prompt", "messages", "turns")
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Entry(Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a script; exactly one of `prompt`, `messages`, `turns` is not None."""

    name: str = ""
    prompt: str | None = None
    messages: Annotated[tuple[ChatMessage, ...], Meta(min_length=1)] | None = None
    turns: Annotated[tuple[str, ...], Meta(min_length=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)] = 64
    temperature: Annotated[float, Meta(ge=0, le=1000)] = 0.0
    seed: Count | None = None
    cancel_after: Count | None = None
    delay: Annotated[float, Meta(ge=0, le=600)] = 0.0  # seconds

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
    """Raises WrongLine with the reason."""
    entry = parse_line(line, Entry)
    if sum(getattr(entry, kind) is not None for kind in PROMPTS) != 1:
        raise WrongLine(f"give exactly one of {', '.join(PROMPTS)}")
    entry = msgspec.structs.replace(entry, name=entry.name or f"line {number}")
    if not entry.name.isprintable() or not entry.name.strip():
        raise WrongLine("name must be a string of one line")
    try:
        encode(Generate(0, entry.prompt, messages=entry.messages, sampling=entry.sampling))
        for text in (entry.name, *(entry.turns or ())):
            encode(Generate(0, text))
    except MalformedMessage as e:
        raise WrongLine(f"this cannot be sent to the engine: {e}") from None
    return entry
