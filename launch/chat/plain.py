"""A chat line by line, for a pipe, a file or a dumb terminal: each line of stdin is a question or a command.
Stdout holds the answers alone; messages and the tables of commands go to stderr, as plain text."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType

from launch.chat.banner import banner
from launch.chat.conversation import Conversation
from launch.chat.session import Session
from launch.errors import OutputFailed, WrongUsage
from launch.terminal.interrupts import Interrupts
from launch.terminal.lines import Lines
from launch.terminal.log import complain, notice
from launch.terminal.output import show
from launch.terminal.tables import PLAIN_WIDTH, VisibleConsole
from protocol.client import Client
from protocol.errors import RequestFailed

log = logging.getLogger("tandem")


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
        self.width = console.width if console.is_terminal else PLAIN_WIDTH
        self._console = VisibleConsole(width=self.width, color_system=None)

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
