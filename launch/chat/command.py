"""`launch.py` without a command, and `launch.py chat`: a conversation. On a terminal the REPL runs
(`repl.py`). Where stdin or stdout is a pipe or a file, or TERM names a dumb terminal, each line of stdin is a
turn, stdout holds the answers alone, and the chat ends with its input."""

from __future__ import annotations

import logging
import os
import sys

from launch.chat.conversation import Conversation
from launch.chat.settings import AnswerSettings
from launch.command_line.options import Options
from launch.connect.reconnect import reconnecting_client
from launch.generate import answer_settings
from launch.terminal.interrupts import Interrupts
from launch.terminal.lines import Lines
from launch.terminal.log import notice
from launch.terminal.output import show
from protocol.client import Client
from protocol.errors import RequestFailed

log = logging.getLogger("tandem")

LONGEST_ANSWER = 512  # tokens, without --max-tokens; at most half the context
DUMB_TERMINALS = ("", "dumb", "unknown")


async def chat(options: Options, interrupts: Interrupts) -> int:
    """0 at the end of the input, 1 where a piped request failed. Raises as `reconnecting_client`."""
    async with reconnecting_client(options, interrupts) as client:
        settings = _settings(options, client)
        conversation = Conversation(client, settings, options.written.get("system"))
        if sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "") not in DUMB_TERMINALS:
            from launch.chat.repl import Repl  # not for a pipe: the terminal libraries take time to import

            return await Repl(client, conversation, interrupts).run()
        return await _line_by_line(client, conversation, interrupts)


def _settings(options: Options, client: Client) -> AnswerSettings:
    most = {"max_tokens": min(LONGEST_ANSWER, max(1, client.welcome.context // 2))}
    asked = answer_settings(options, client.welcome.sampling)
    return AnswerSettings(**most | asked | {"stop": tuple(asked.get("stop", ()))})


async def _line_by_line(client: Client, conversation: Conversation, interrupts: Interrupts) -> int:
    terminal = sys.stdin.isatty()
    failed = False
    if terminal:
        notice(f"chat with {client.welcome.model}: Ctrl-C cancels an answer, Ctrl-D ends the chat")
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
            await conversation.ask(line, view, interrupts)
        except RequestFailed as e:
            print(f"launch.py: {e}", file=sys.stderr)
            failed = not terminal
    if terminal:
        show("\n")
    return 1 if failed else 0


class PlainView:
    """Answers on stdout, messages on stderr."""

    def queued(self, position: int) -> None:
        notice(f"queued, position {position}")

    def append(self, text: str) -> None:
        show(text)

    def notice(self, text: str) -> None:
        log.warning(text)

    def cancelling(self) -> None:
        """Shows nothing: the answer ends at once."""

    def ended(self) -> None:
        show("\n")
