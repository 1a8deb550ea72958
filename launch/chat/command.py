"""`launch.py` without a command, and `launch.py chat`: a conversation. On a terminal the REPL runs
(`repl.py`). Where stdin or stdout is a pipe or a file, or TERM names a dumb terminal, each line of stdin is a
question or a command: stdout then holds the answers alone, and messages and tables go to stderr."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType

from launch.chat.conversation import Conversation
from launch.chat.session import Session, banner
from launch.chat.settings import AnswerSettings
from launch.command_line.checks import check_can_chat
from launch.command_line.options import Options
from launch.connect import reconnecting_client
from launch.errors import OutputFailed, WrongUsage
from launch.generate import answer_settings
from launch.terminal.interrupts import Interrupts
from launch.terminal.lines import Lines
from launch.terminal.log import complain, notice
from launch.terminal.output import show
from launch.terminal.tables import PLAIN_WIDTH, VisibleConsole
from pipeline.assets import model_dir
from protocol.client import Client
from protocol.errors import RequestFailed

log = logging.getLogger("tandem")

LONGEST_ANSWER = 512  # tokens, without --max-tokens; at most half the context
DUMB_TERMINALS = ("", "dumb", "unknown")


async def chat(options: Options, interrupts: Interrupts) -> int:
    """0 at the end of the input, 1 where a piped question or command failed. Raises WrongUsage for a model
    that cannot chat, before anything is loaded, and as `reconnecting_client`."""
    if not options.connect:
        check_can_chat(options.config().model or model_dir())
    async with reconnecting_client(options, interrupts) as client:
        settings = _settings(options, client)
        conversation = Conversation(client, settings, options.written.get("system"))
        if sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "") not in DUMB_TERMINALS:
            from launch.chat.repl import Repl  # not for a pipe: the terminal libraries take time to import

            return await Repl(client, conversation, interrupts).run()
        return await line_by_line(client, conversation, interrupts)


def _settings(options: Options, client: Client) -> AnswerSettings:
    most = {"max_tokens": min(LONGEST_ANSWER, max(1, client.welcome.context // 2))}
    asked = answer_settings(options, client.welcome.sampling)
    return AnswerSettings(**most | asked | {"stop": tuple(asked.get("stop", ()))})


async def line_by_line(client: Client, conversation: Conversation, interrupts: Interrupts) -> int:
    """0 at the end of the input, 1 where a piped question or command failed; those after it are done all the
    same. Raises EngineGone; AnswerLost where it shuts down during an answer."""
    terminal = sys.stdin.isatty()
    output = PlainOutput()
    session = Session(client, conversation, interrupts, output, _new_view, summaries=terminal)
    lines = Lines(sys.stdin.fileno())
    if terminal:
        for text in banner(client.welcome, conversation.system):
            output.note(text)
        output.note("/help lists the commands; Ctrl-C cancels an answer, Ctrl-D or /quit ends the chat")
    failed = ended = False
    while not ended:
        if terminal:
            show("> ")
        line = await lines.next()
        try:
            ended = line is None or not await session.handle(line)
        except (WrongUsage, OutputFailed, RequestFailed) as e:
            complain(e)
            failed = True
    if terminal and line is None:
        show("\n")
    return 1 if failed and not terminal else 0


class PlainOutput:
    """Plain text on stderr."""

    def __init__(self) -> None:
        console = Console(file=sys.stderr)
        width = console.width if console.is_terminal else PLAIN_WIDTH
        self._console = VisibleConsole(width=width, color_system=None)

    def show(self, what: RenderableType = "") -> None:
        with self._console.capture() as captured:
            self._console.print(what)
        for line in captured.get().splitlines():
            print(line.rstrip(), file=sys.stderr)

    def note(self, text: str) -> None:
        self.show(text)


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


@contextmanager
def _new_view() -> Iterator[PlainView]:
    yield PlainView()
