"""The REPL: a prompt, and for each line an answer or a command, until Ctrl-D or /quit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from launch.chat.conversation import Conversation
from launch.chat.input import InputLine, PrivateFileHistory, history_file
from launch.chat.screen import AnswerView, LogLines, Screen
from launch.chat.session import Session, banner, policy_change
from launch.connect import ANSWERS, WAITING
from launch.errors import OutputFailed, WrongUsage
from launch.terminal.interrupts import Interrupts
from protocol.client import Client
from protocol.errors import RequestFailed
from protocol.messages import PolicyChanged

HOW_TO_QUIT = "Ctrl-D or /quit ends the chat"


class Repl:
    def __init__(self, client: Client, conversation: Conversation, interrupts: Interrupts) -> None:
        self._client = client
        self._conversation = conversation
        self._interrupts = interrupts
        self._screen = Screen(lambda: self._input.active)
        history = PrivateFileHistory(history_file(), self._screen.announce)
        self._input = InputLine(history, self._hint)
        self._session = Session(
            client, conversation, interrupts, self._screen, self._new_view, summaries=True
        )
        self._view: AnswerView | None = None  # while an answer is written
        self._hinted = False  # since the last line

    async def run(self) -> int:
        """0 at the session's end. Raises EngineGone; AnswerLost where it shuts down during an answer."""
        screen = self._screen
        self._client.on_policy = self._on_policy
        self._client.on_pause = lambda lost: self._on_connection(WAITING)
        self._client.on_reconnect = lambda: self._on_connection(ANSWERS)
        try:
            with screen.quiet(), LogLines(screen), self._interrupts.otherwise(self._hint):
                self._welcome()
                while (line := await self._next_line()) is not None:
                    if not await self._handle(line):
                        break
        finally:
            self._client.on_policy = self._client.on_pause = self._client.on_reconnect = None
            self._input.close()
        return 0

    async def _next_line(self) -> str | None:
        """The next line, or None after the last. Raises EngineGone."""
        line = asyncio.ensure_future(self._input.read())
        lost = asyncio.ensure_future(self._client.lost())
        try:
            await asyncio.wait((line, lost), return_when=asyncio.FIRST_COMPLETED)
            if not line.done():
                raise lost.result()
            return line.result()
        except EOFError:
            return None
        finally:
            line.cancel()
            lost.cancel()
            # The terminal's mode is restored only when the prompt has ended.
            await asyncio.gather(line, lost, return_exceptions=True)

    async def _handle(self, line: str) -> bool:
        """Execute a command or ask a question; errors are shown. False for /quit."""
        self._hinted = False
        if not line.strip():
            return True
        try:
            if not await self._session.handle(line):
                return False
        except (WrongUsage, OutputFailed, RequestFailed) as e:
            self._screen.note(str(e), "red")
        self._screen.show()
        return True

    @contextmanager
    def _new_view(self) -> Iterator[AnswerView]:
        with AnswerView(self._screen, self._interrupts) as self._view:
            try:
                yield self._view
            finally:
                self._view = None

    def _on_policy(self, changed: PolicyChanged) -> None:
        self._screen.announce(f"another client changed the {policy_change(changed)}", "yellow")

    def _on_connection(self, text: str) -> None:
        """Show that the connection is lost or restored, also while an answer is written."""
        if self._view is None:
            self._screen.announce(text)
        else:
            self._view.notice(text)

    def _hint(self) -> None:
        if not self._hinted:
            self._hinted = True
            self._screen.announce(HOW_TO_QUIT)

    def _welcome(self) -> None:
        self._screen.show()
        for line in banner(self._client.welcome, self._conversation.system):
            self._screen.note(line)
        self._screen.note(f"/help lists the commands; {HOW_TO_QUIT}")
        self._screen.show()
