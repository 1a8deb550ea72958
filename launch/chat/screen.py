"""The terminal of the REPL: what is printed when, so that nothing lands in a line that is being typed or in
an answer that is being written."""

from __future__ import annotations

import asyncio
import logging
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from types import TracebackType
from typing import Any

from prompt_toolkit.application import run_in_terminal
from rich.console import Console, RenderableType
from rich.text import Text

# What a model or another program wrote must not steer the terminal: no control characters but these.
_KEPT = {ord("\n"): "\n", ord("\t"): "\t"}
_VISIBLE = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160))} | _KEPT


def visible(text: str) -> str:
    """The text with U+FFFD for every control character but newline and tab."""
    return text.translate(_VISIBLE)


class Screen:
    """Prints for the REPL, from the event loop alone. `announce` is for what comes by itself."""

    def __init__(self, prompting: Callable[[], bool]) -> None:
        """`prompting`: whether a line is being typed."""
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # what this terminal's encoding does not have
        self.console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        self._prompting = prompting
        self._held: list[Text] | None = None  # while an answer is written: what to say after it
        self._printing: set[asyncio.Future[None]] = set()

    @property
    def width(self) -> int:
        return self.console.width

    def show(self, what: RenderableType = "") -> None:
        self.console.print(what)

    def note(self, text: str) -> None:
        """Something by the way."""
        self.show(Text(visible(text), style="dim"))

    def complain(self, text: str) -> None:
        """What was wrong with a line."""
        self.show(Text(visible(text), style="red"))

    def announce(self, text: str, style: str = "dim") -> None:
        """A line that nobody asked for: above the prompt, or after the answer that is being written."""
        line = Text(visible(text), style=style)
        if self._held is not None:
            self._held.append(line)
        elif self._prompting():
            printing = asyncio.ensure_future(run_in_terminal(lambda: self.show(line)))
            self._printing.add(printing)
            printing.add_done_callback(self._printing.discard)
        else:
            self.show(line)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Announcements within the block come after it."""
        self._held = held = list[Text]()
        try:
            yield
        finally:
            self._held = None
            for line in held:
                self.show(line)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """What is typed within the block is neither echoed nor lost: the next prompt reads it. Ctrl-Z would
        stop the engine along with this process, so it does nothing."""
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
            with suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(fd, termios.TCSANOW, before)


class LogLines(logging.Handler):
    """In a `with` block: log lines go to the screen's announcements instead of to where they went."""

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        logging.getLogger().handlers[:] = self._before
