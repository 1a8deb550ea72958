"""Keeps the beginning of a prompt as it was in the request before, so that its KV is found again: what
programs change in a system message every time is left out where it means nothing, else moved to the end."""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec.structs import replace

from protocol.messages import ChatMessage

# Bookkeeping of coding agents: a line of their own, and a token that changes with every request.
MEANINGLESS = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?|\bcch=[0-9a-zA-Z]+;?[ \t]*")
# Whole lines that say how much is left, or the time. Of several of a kind the last one is true.
CHANGING = (
    re.compile(r"^[ \t]*(<total_tokens>[^<\n]{0,80}</total_tokens>)[ \t]*(?:\n|\Z)", re.MULTILINE),
    re.compile(
        r"^[ \t]*((?:the )?current (?:date and )?time(?: is)?\b[^\n]{0,60}?\d?\d:\d\d[^\n]{0,40})(?:\n|\Z)",
        re.MULTILINE | re.IGNORECASE,
    ),
)


def without_bookkeeping(text: str) -> str:
    """Returns a system's text without what means nothing to a model."""
    return MEANINGLESS.sub("", text)


def steady(messages: Iterable[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Returns a conversation whose system message is free of counters and clocks: they are the last lines of
    the last message that the model answers."""
    turns = list(messages)
    sides = [place for place, message in enumerate(turns) if message.role in ("user", "tool")]
    if not sides or turns[0].role != "system":
        return tuple(turns)
    head, lines = turns[0].content, []
    for pattern in CHANGING:
        if found := pattern.findall(head):
            head = pattern.sub("", head).rstrip()
            lines.append(found[-1])
    if lines and head:
        last = turns[sides[-1]]
        turns[0] = replace(turns[0], content=head)
        turns[sides[-1]] = replace(last, content="\n\n".join((last.content, *lines)))
    return tuple(turns)
