"""`launch.py` without a command, and `launch.py chat`: a conversation.

In a terminal it is the REPL (`repl.py`). Where stdin or stdout is a pipe or a file, or the terminal is a dumb
one, it goes line by line: every line is a turn, stdout holds the answers alone, and the end of the input is
the end of the chat. When the conversation no longer fits the context, its oldest turns go.
"""

from __future__ import annotations

import logging
import os
import sys

from launch.chat.conversation import Conversation
from launch.chat.lines import Lines
from launch.chat.settings import AnswerSettings
from launch.command_line.options import RANDOM_OPTIONS, Options
from launch.connect.reconnect import reconnecting_client
from launch.generate import answer_settings
from launch.terminal.interrupts import Interrupts
from launch.terminal.output import show
from protocol.client import Client
from protocol.errors import RequestFailed

log = logging.getLogger("tandem")

LONGEST_ANSWER = 512  # tokens, unless --max-tokens says otherwise; at most half the context
DUMB_TERMINALS = ("", "dumb", "unknown")


async def chat(options: Options, interrupts: Interrupts) -> int:
    """0 at the end of the input; 1 where an answer of piped input failed. Raises what
    `reconnecting_client` raises, and EngineGone."""
    async with reconnecting_client(options, interrupts) as client:
        settings = _settings(options, client)
        conversation = Conversation(client, settings, options.written.get("system"))
        if sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "") not in DUMB_TERMINALS:
            from launch.chat.repl import (
                Repl,  # here, so that a pipe does not wait for the terminal's libraries
            )

            return await Repl(client, conversation, interrupts).run()
        return await _line_by_line(client, conversation, interrupts)


def _settings(options: Options, client: Client) -> AnswerSettings:
    most = {"max_tokens": min(LONGEST_ANSWER, max(1, client.welcome.context // 2))}
    asked = answer_settings(options, client.welcome.sampling)
    settings = AnswerSettings(**most | asked | {"stop": tuple(asked.get("stop", ()))})
    if settings.sampling.temperature == 0 and RANDOM_OPTIONS & options.written.keys():
        log.warning("note: this model's answers are greedy without a --temperature; only that has effect")
    return settings


async def _line_by_line(client: Client, conversation: Conversation, interrupts: Interrupts) -> int:
    terminal = sys.stdin.isatty()
    failed = False
    if terminal:
        log.info(f"chat with {client.welcome.model}: Ctrl-C gives up an answer, Ctrl-D ends")
    lines = Lines(sys.stdin.fileno())
    view = PlainView()
    while True:
        if terminal:
            show("> ")
        line = await lines.next()
        if line is None:
            break
        if not line.strip():
            continue
        try:
            await conversation.say(line, view, interrupts)
        except RequestFailed as e:
            print(f"launch.py: {e}", file=sys.stderr)
            failed = not terminal
    if terminal:
        show("\n")
    return 1 if failed else 0


class PlainView:
    """Answers on stdout, everything else on stderr."""

    def waiting(self, position: int) -> None:
        log.info(f"waiting for room, position {position}")

    def piece(self, text: str) -> None:
        show(text)

    def forgot(self, turns: int, why: str) -> None:
        which = "oldest turn was" if turns == 1 else f"{turns} oldest turns were"
        log.warning(f"the {which} dropped: {why}")

    def cancelling(self) -> None:
        """The end of the answer says it."""

    def ended(self) -> None:
        show("\n")
