"""The line that is typed: its keys, its completion, its history."""

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

MENU_LINES = 12  # kept free for the prompt and the completions of a command
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
    """Reads one line, or several: Enter sends, Alt-Enter begins a new one."""

    def __init__(self, history: History, hint: Callable[[], None]) -> None:
        """`hint` is called for a Ctrl-C where there is nothing to be cleared. Raises WrongUsage where the
        terminal cannot be opened."""
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
            # Without asking the terminal where the cursor is: the answer would come as typed text to whoever
            # reads next, and a terminal that does not know the question would cost a second.
            input=Vt100Input(self._terminal),
            output=Vt100_Output(sys.stdout, _size, term=os.environ.get("TERM"), enable_cpr=False),
        )

    @property
    def active(self) -> bool:
        return self._session.app.is_running

    async def read(self) -> str:
        """The next line. Raises EOFError for Ctrl-D in an empty one, and when the terminal is gone."""
        text = await self._session.prompt_async(set_exception_handler=False, handle_sigint=False)
        # what was no UTF-8 came as half a surrogate pair
        return text.encode(errors="surrogateescape").decode(errors="replace")

    def close(self) -> None:
        self._terminal.close()

    def _is_command(self) -> bool:
        return completes(self._session.default_buffer.document.text_before_cursor)


def _open_terminal() -> TextIO:
    """The terminal of stdin, opened anew. The event loop makes what it reads from non-blocking, and stdin is
    shared with stdout and with the shell, which would then fail."""
    for path in (f"/proc/self/fd/{sys.stdin.fileno()}", "/dev/tty"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as e:
            reason = e.strerror
        else:
            return open(fd, encoding=sys.stdin.encoding)
    raise WrongUsage(f"cannot open this terminal for reading: {reason}; give the questions through a pipe")


def _size() -> Size:
    columns, rows = os.get_terminal_size(sys.stdout.fileno())
    return Size(rows=rows or 24, columns=columns or 80)  # some terminals do not know


def _continuation(width: int, number: int, wrapped: int) -> StyleAndTextTuples:
    """The prompt's place in the further lines; a line that is only too long for the screen has none."""
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
