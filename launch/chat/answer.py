"""An answer in the terminal, written as its tokens arrive."""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack

from rich.text import Text

from launch.chat.screen import Screen
from launch.chat.word_wrap import WordWrap
from launch.terminal.interrupts import Interrupts
from protocol.visible import visible

STATUS_DELAY = 0.7  # seconds without a token until "reading the prompt" is shown
ERASE_LINE = "\r\x1b[2K"


class AnswerView:
    """Writes one answer within a `with` block; implements conversation.View."""

    def __init__(self, screen: Screen, interrupts: Interrupts) -> None:
        self._screen = screen
        self._interrupts = interrupts
        self._stack = ExitStack()
        self._status_shown = False  # the cursor's line is a status, which the next output erases
        self._at_line_start = True
        self._wrap = WordWrap(lambda: screen.width)
        self._empty = True
        self._status_timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> AnswerView:
        self._stack.enter_context(self._screen.deferring())
        self._status_timer = asyncio.get_running_loop().call_later(
            STATUS_DELAY, self._show_status, "reading the prompt ..."
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.ended()
        self._stack.close()

    def queued(self, position: int) -> None:
        if self._empty:
            self._clear_status()
            self._show_status(f"queued, position {position}")

    def append(self, text: str) -> None:
        if text:
            self._clear_status()
            self._write(self._wrap.push(visible(text)))
            self._at_line_start = text.endswith("\n")
            self._empty = False

    def notice(self, text: str) -> None:
        self.ended()
        self._wrap = WordWrap(lambda: self._screen.width)
        self._screen.note(text)

    def cancelling(self) -> None:
        # The session must not end by an accidental second Ctrl-C; a third one ends it.
        self._stack.enter_context(self._interrupts.handled_by(lambda: None))

    def ended(self) -> None:
        self._clear_status()
        if not self._at_line_start:
            self._at_line_start = True
            self._write("\n")

    def _show_status(self, text: str) -> None:
        self._status_shown = True
        with self._screen.console.capture() as capture:
            self._screen.console.print(Text(text[: self._screen.width - 1], style="dim"), end="")
        self._write(ERASE_LINE + capture.get())

    def _clear_status(self) -> None:
        if self._status_timer is not None:
            self._status_timer.cancel()
            self._status_timer = None
        if self._status_shown:
            self._status_shown = False
            self._write(ERASE_LINE)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
