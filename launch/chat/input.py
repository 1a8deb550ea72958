"""The input line of the REPL: its keys, completion and history."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.data_structures import Size
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import History
from prompt_toolkit.input.vt100 import Vt100Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.styles import Style

from launch.chat.completion import CommandCompleter, completes
from launch.errors import WrongUsage

MENU_LINES = 12  # of the screen, for the prompt and the menu of completions
PROMPT = "> "
STYLE = Style.from_dict(
    {
        "prompt": "ansigreen bold",
        "continuation": "ansibrightblack",
        "completion-menu": "bg:default fg:default",
        "completion-menu.completion": "bg:default fg:default",
        "completion-menu.completion.current": "bg:default fg:default reverse",
        "completion-menu.meta.completion": "bg:default fg:ansibrightblack",
        "completion-menu.meta.completion.current": "bg:default fg:default",
        "scrollbar.background": "bg:default",
        "scrollbar.button": "bg:default",
    }
)


class InputLine:
    """Reads a text of one or more lines: Enter sends it, Alt-Enter begins a new line."""

    def __init__(self, history: History, hint: Callable[[], None]) -> None:
        """`hint`: called for Ctrl-C on an empty line. Raises WrongUsage if the terminal cannot be opened."""
        self._terminal = _open_terminal()
        self._session: PromptSession[str] = PromptSession(
            [("class:prompt", PROMPT)],
            multiline=True,
            prompt_continuation=_continuation,
            key_bindings=_keys(hint),
            completer=CommandCompleter(),
            complete_while_typing=Condition(self._is_command),
            reserve_space_for_menu=MENU_LINES,
            history=history,
            style=STYLE,
            include_default_pygments_style=False,
            # No cursor position requests: the terminal's answer could be read as typed text, and a terminal
            # that does not answer costs a second.
            input=Vt100Input(self._terminal),
            output=Vt100_Output(sys.stdout, _size, term=os.environ.get("TERM"), enable_cpr=False),
        )

    @property
    def active(self) -> bool:
        return self._session.app.is_running

    async def read(self) -> str:
        """The next text. Raises EOFError for Ctrl-D on an empty line, and when the terminal is closed."""
        text = await self._session.prompt_async(set_exception_handler=False, handle_sigint=False)
        # Bytes that are not UTF-8 arrive as half a surrogate pair.
        return text.encode(errors="surrogateescape").decode(errors="replace")

    def close(self) -> None:
        self._terminal.close()

    def _is_command(self) -> bool:
        return completes(self._session.default_buffer.document.text_before_cursor)


def _open_terminal() -> TextIO:
    """The terminal of stdin, opened again. The event loop makes its input non-blocking, which would also
    apply to stdout and to the shell, because they share stdin's file description."""
    for path in (f"/proc/self/fd/{sys.stdin.fileno()}", "/dev/tty"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as e:
            reason = e.strerror
        else:
            return open(fd, encoding=sys.stdin.encoding)
    raise WrongUsage(f"cannot open this terminal for reading: {reason}; send the questions through a pipe")


def _size() -> Size:
    columns, rows = os.get_terminal_size(sys.stdout.fileno())
    return Size(rows=rows or 24, columns=columns or 80)  # some terminals report 0


def _continuation(width: int, number: int, wrapped: int) -> StyleAndTextTuples:
    """The prefix of a continuation line: a dot, or spaces where a long line was wrapped."""
    return [("class:continuation", " " * width if wrapped else "· ".rjust(width))]


def _keys(hint: Callable[[], None]) -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _clear(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            hint()

    return keys
