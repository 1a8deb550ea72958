"""The input line of the REPL: its keys, Tab completion, and the typed lines of earlier sessions, in
$XDG_STATE_HOME/tandem/history."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input.vt100 import Vt100Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.styles import Style

from launch.chat.conversation import KEYS
from launch.chat.tables import COMMANDS, describe, meaning
from launch.errors import WrongUsage
from pipeline.policies.options import Choice
from pipeline.policies.presets import PRESETS
from protocol.program import user_folder

MENU_LINES = 12  # of the screen, for the prompt and the menu of completions
PROMPT = "> "
STYLE = Style.from_dict({"prompt": "ansigreen bold", "continuation": "ansibrightblack"})


class InputLine:
    """Reads a text of one or more lines: Enter sends it, Alt-Enter begins a new line."""

    def __init__(self, history: History, hint: Callable[[], None]) -> None:
        """`hint`: called for Ctrl-C on an empty line. Raises WrongUsage if the terminal cannot be opened."""
        self._terminal = _open_terminal()
        output = Vt100_Output.from_pty(sys.stdout, term=os.environ.get("TERM"))
        # No cursor position requests: the terminal's answer could be read as typed text, and a terminal that
        # does not answer costs a second.
        output.enable_cpr = False
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
            input=Vt100Input(self._terminal),
            output=output,
        )

    @property
    def active(self) -> bool:
        return self._session.app.is_running

    async def read(self) -> str:
        """Returns the next text. Raises EOFError for Ctrl-D on an empty line, and when the terminal is
        closed."""
        return _whole(await self._session.prompt_async(set_exception_handler=False, handle_sigint=False))

    def close(self) -> None:
        self._terminal.close()

    def _is_command(self) -> bool:
        return completes(self._session.default_buffer.document.text_before_cursor)


class CommandCompleter(Completer):
    """Completes lines that begin with a single "/", up to the cursor."""

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        if not completes(text := document.text_before_cursor):
            return
        *before, word = text.split(" ")
        for choice, help in _choices([part for part in before if part]):
            if choice.startswith(word):
                yield Completion(choice, -len(word), display_meta=help)


def completes(text: str) -> bool:
    """Returns whether a line with this text before the cursor is a command."""
    return text.startswith("/") and not text.startswith("//") and "\n" not in text


def _choices(before: list[str]) -> Iterator[tuple[str, str]]:
    """Yields what may stand after the words `before`, with its meaning."""
    match before:
        case []:
            for name, command in COMMANDS.items():
                yield f"/{name}" + " " * bool(command.arguments), command.help
        case ["/policy"]:
            yield from ((preset.name, describe(preset)) for preset in PRESETS.values())
        case ["/policy", name, *_] if name in PRESETS:
            for option in PRESETS[name].options:
                values = option.choices if isinstance(option, Choice) else ("",)
                yield from ((f"{option.name}={value}", option.help) for value in values)
        case ["/set", *_]:
            yield from ((f"{key}=", meaning(key)) for key in KEYS)


def history_file() -> Path:
    return user_folder("STATE") / "history"


def open_history(warn: Callable[[str], None]) -> History:
    """Returns the typed lines of earlier sessions; those of this one alone after a `warn` that the file is
    unusable."""
    path = history_file()
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd):
            os.fchmod(fd, 0o600)
    except OSError as e:
        warn(f"the history is not saved: {path}: {e.strerror}")
        return InMemoryHistory()
    return _PrivateHistory(path)


class _PrivateHistory(FileHistory):
    def store_string(self, string: str) -> None:
        with suppress(OSError):  # a full disk: the line stays in memory
            super().store_string(_whole(string))


def _whole(text: str) -> str:
    """Replaces what was typed and is not UTF-8: it arrives as half a surrogate pair."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def _open_terminal() -> TextIO:
    """Returns the terminal of stdin, opened again. The event loop makes its input non-blocking, which would
    also apply to stdout and to the shell, because they share stdin's file description."""
    for path in (f"/proc/self/fd/{sys.stdin.fileno()}", "/dev/tty"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as e:
            reason = e.strerror
        else:
            return open(fd, encoding=sys.stdin.encoding)
    raise WrongUsage(f"cannot open this terminal for reading: {reason}; send the questions through a pipe")


def _continuation(width: int, number: int, wrapped: int) -> StyleAndTextTuples:
    """Returns the prefix of a continuation line: a dot, or spaces where a long line was wrapped."""
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
