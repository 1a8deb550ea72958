"""The input line of the REPL: its keys, Tab completion, and the typed lines of earlier sessions, in
$XDG_STATE_HOME/tandem/history: one JSON string a line, oldest first.

prompt_toolkit's FileHistory creates its file with the umask's permissions, follows links, grows without
limit, and raises when the file cannot be used or a line holds half a surrogate pair."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.data_structures import Size
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import History
from prompt_toolkit.input.vt100 import Vt100Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.styles import Style

from launch.chat.commands import COMMANDS
from launch.chat.settings import KEYS
from launch.chat.tables import describe
from launch.errors import WrongUsage
from pipeline.policies.options import Choice
from pipeline.policies.presets import PRESETS
from protocol.user_folders import user_folder

MAX_LINES = 2000  # a history of more than twice as many is cut to these when it is loaded
MAX_BYTES = 8 << 20  # read from the end of the history
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


class CommandCompleter(Completer):
    """Completes lines that begin with a single "/", up to the cursor."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        if not completes(text := document.text_before_cursor):
            return
        name, space, argument = text[1:].partition(" ")
        if space and name in ("save", "load"):
            typed = argument.lstrip(" ")
            yield from self._paths.get_completions(Document(typed, len(typed)), complete_event)
            return
        *before, word = [f"/{name}"] if not space else [name, *argument.split(" ")]
        for choice, help in _choices([part for part in before if part], word):
            if choice.startswith(word):
                yield Completion(choice, -len(word), display_meta=help)


def completes(text: str) -> bool:
    """Returns whether a line with this text before the cursor is a command."""
    return text.startswith("/") and not text.startswith("//") and "\n" not in text


def _choices(before: list[str], word: str) -> Iterator[tuple[str, str]]:
    """Yields what may stand for `word` after the words `before`, with its meaning."""
    match before:
        case []:
            for command in COMMANDS.values():
                yield f"/{command.name}" + " " * bool(command.arguments), command.help
        case ["help"]:
            yield from (("policy ", "what /policy can set"), ("set", "what /set can set"))
        case ["policy"] | ["help", "policy"]:
            yield from ((preset.name, describe(preset)) for preset in PRESETS.values())
        case ["policy", name, *_] if name in PRESETS:
            for option in PRESETS[name].options:
                if "=" not in word:
                    yield f"{option.name}=", option.help
                elif isinstance(option, Choice):
                    yield from ((f"{option.name}={choice}", "") for choice in option.choices)
        case ["set", *_]:
            yield from ((f"{key}=", help) for key, (_, help) in KEYS.items() if "=" not in word)
            yield from ((f"ignore_eos={value}", "") for value in ("on", "off") if "=" in word)


def history_file() -> Path:
    return user_folder("STATE") / "history"


class PrivateFileHistory(History):
    """Lines in memory and in a file with mode 0600; in memory alone after a `warn` that it is unusable."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        super().__init__()
        self._path = path
        self._warn = warn
        self._usable = True

    def load_history_strings(self) -> Iterable[str]:
        """The lines of the file, newest first; damaged ones are left out."""
        lines: list[str] = []
        try:
            self._path.parent.parent.mkdir(parents=True, exist_ok=True)
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            with os.fdopen(self._open(os.O_RDWR), "r+b") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - MAX_BYTES))
                content = file.read().decode("utf-8", "replace").splitlines()
                if len(content) > 2 * MAX_LINES:
                    content = content[-MAX_LINES:]
                    file.seek(0)
                    file.write("".join(line + "\n" for line in content).encode())
                    file.truncate()
            lines = [text for line in content if (text := _text(line)) is not None]
        except OSError as e:
            self._disable(e)
        return reversed(lines)

    def store_string(self, string: str) -> None:
        if not self._usable:
            return
        try:
            with os.fdopen(self._open(os.O_WRONLY | os.O_APPEND), "ab") as file:
                file.write(json.dumps(string).encode() + b"\n")
        except OSError as e:
            self._disable(e)

    def _open(self, flags: int) -> int:
        fd = os.open(self._path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.fchmod(fd, 0o600)
        except OSError:
            os.close(fd)
            raise
        return fd

    def _disable(self, error: OSError) -> None:
        if self._usable:
            self._usable = False
            self._warn(f"the history is not saved: {self._path}: {error.strerror}")


def _text(line: str) -> str | None:
    """The text of a line of the file, or None where it is damaged."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


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
