"""Output of the REPL: answers as their tokens arrive, and messages, which never land within the input line or
within an answer."""

from __future__ import annotations

import asyncio
import logging
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import TextIOWrapper
from typing import Any

from prompt_toolkit.application import run_in_terminal
from rich.console import RenderableType
from rich.text import Text

from launch.terminal.interrupts import Interrupts
from launch.terminal.tables import VisibleConsole
from protocol.visible import visible

STATUS_DELAY = 0.7  # seconds without a token until "reading the prompt" is shown
ERASE_LINE = "\r\x1b[2K"


class Screen:
    """Prints for the REPL, from the event loop alone. `announce` is for messages that come at any time."""

    def __init__(self, prompting: Callable[[], bool]) -> None:
        """`prompting`: whether a line is being typed."""
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # characters that this terminal's encoding lacks
        self.console = VisibleConsole(file=sys.stdout)
        self._prompting = prompting
        self._deferred: list[Text] | None = None  # announcements during an answer
        self._printing: set[asyncio.Future[None]] = set()

    @property
    def width(self) -> int:
        return self.console.width

    def show(self, what: RenderableType = "") -> None:
        self.console.print(what)

    def note(self, text: str, style: str = "dim") -> None:
        self.show(Text(text, style=style))

    def announce(self, text: str, style: str = "dim") -> None:
        """A message that no command of the user caused: above the prompt, or after the present answer."""
        line = Text(text, style=style)
        if self._deferred is not None:
            self._deferred.append(line)
        elif self._prompting():
            printing = asyncio.ensure_future(run_in_terminal(lambda: self.show(line)))
            self._printing.add(printing)
            printing.add_done_callback(self._printing.discard)
        else:
            self.show(line)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Announcements within the block are printed after it."""
        self._deferred = deferred = list[Text]()
        try:
            yield
        finally:
            self._deferred = None
            for line in deferred:
                self.show(line)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """No echo: the next prompt reads the keys. No Ctrl-Z: it would stop the engine with this process."""
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
        after = termios.tcgetattr(fd)
        after[0] &= ~termios.ICRNL
        after[3] &= ~(termios.ECHO | termios.ICANON)
        control = list(after[6])
        control[termios.VSUSP] = b"\0"
        after[6] = control
        termios.tcsetattr(fd, termios.TCSANOW, after)
        try:
            yield
        finally:
            with suppress(termios.error):  # the terminal is closed
                termios.tcsetattr(fd, termios.TCSANOW, before)


class AnswerView:
    """Writes one answer within a `with` block; implements conversation.View."""

    def __init__(self, screen: Screen, interrupts: Interrupts) -> None:
        self._screen = screen
        self._interrupts = interrupts
        self._stack = ExitStack()
        self._status_shown = False  # the cursor's line is a status, which the next output erases
        self._at_line_start = True
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
            self._write(visible(text))
            self._at_line_start = text.endswith("\n")
            self._empty = False

    def notice(self, text: str) -> None:
        self.ended()
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


class LogLines(logging.Handler):
    """Within a `with` block, replaces the root logger's handlers: log lines become announcements."""

    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen
        self._loop = asyncio.get_running_loop()
        self._before: list[logging.Handler] = []

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno >= logging.WARNING else "dim"
        text = self.format(record)
        try:
            self._loop.call_soon_threadsafe(self._screen.announce, text, style)
        except RuntimeError:  # the loop is closed: the command has ended
            self.handleError(record)

    def __enter__(self) -> LogLines:
        root = logging.getLogger()
        self._before = root.handlers[:]
        if self._before:
            self.setFormatter(self._before[0].formatter)
        root.handlers[:] = [self]
        return self

    def __exit__(self, *_: object) -> Any:
        logging.getLogger().handlers[:] = self._before
