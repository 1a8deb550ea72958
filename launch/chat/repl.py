"""The REPL on a terminal: a prompt, and for each line an answer or a command, until Ctrl-D or /quit. Answers
are shown as their tokens arrive, and messages never land within the input line or within an answer."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import termios
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input.vt100 import Vt100Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.vt100 import Vt100_Output
from rich.console import RenderableType
from rich.text import Text

from launch.chat.conversation import KEYS, Conversation, View
from launch.chat.session import Output, Session, banner, policy_change
from launch.chat.why import COMMANDS, describe, meaning
from launch.connect import ANSWERS, WAITING
from launch.errors import OutputFailed, WrongUsage
from launch.terminal.interrupts import Interrupts
from launch.terminal.log import CLEAR
from launch.terminal.tables import VisibleConsole
from pipeline.policies.options import Choice
from pipeline.policies.presets import PARTS, PRESETS
from protocol.client import Client
from protocol.errors import RequestFailed
from protocol.messages import PolicyChanged
from protocol.program import user_folder, visible

# ----------------------------------------------------------------------------------------------------------
# The input line of the REPL: its keys, Tab completion, and the typed lines of earlier sessions, in
# $XDG_STATE_HOME/tandem/history.


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
            [("ansigreen bold", "> ")],
            multiline=True,
            key_bindings=_keys(hint),
            completer=CommandCompleter(),
            complete_while_typing=Condition(self._is_command),
            history=history,
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
                parts = PARTS.get(option.name, {})
                for value in option.choices if isinstance(option, Choice) else ("",):
                    yield f"{option.name}={value}", parts[value].help if parts else option.help
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


# --- the chat -----------------------------------------------------------------------------------------------

HOW_TO_QUIT = "Ctrl-D or /quit ends the chat"


class Repl:
    def __init__(self, client: Client, conversation: Conversation, interrupts: Interrupts) -> None:
        self._client = client
        self._conversation = conversation
        self._interrupts = interrupts
        self._screen = Screen(lambda: self._input.active)
        self._input = InputLine(open_history(self._screen.announce), self._hint)
        self._session = Session(client, conversation, interrupts, self._screen)

    async def run(self) -> int:
        """Returns 0 at the session's end. Raises EngineGone; AnswerLost where it shuts down during an
        answer."""
        screen = self._screen
        self._client.on_policy = self._on_policy
        self._client.on_pause = lambda lost: screen.interrupt(WAITING)
        self._client.on_reconnect = lambda: screen.interrupt(ANSWERS)
        try:
            with quiet_terminal(), LogLines(screen).installed(), self._interrupts.handled_by(self._hint):
                self._welcome()
                while (line := await self._next_line()) is not None:
                    if not await self._handle(line):
                        break
        finally:
            self._client.on_policy = self._client.on_pause = self._client.on_reconnect = None
            self._input.close()
        return 0

    async def _next_line(self) -> str | None:
        """Returns the next line, or None after the last. Raises EngineGone."""
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
        if not line.strip():
            return True
        try:
            if not await self._session.handle(line):
                return False
        except (WrongUsage, OutputFailed, RequestFailed) as e:
            self._screen.note(str(e), "red")
        self._screen.show()
        return True

    def _on_policy(self, changed: PolicyChanged) -> None:
        self._screen.announce(f"another client changed the {policy_change(changed)}", "yellow")

    def _hint(self) -> None:
        self._screen.announce(HOW_TO_QUIT)

    def _welcome(self) -> None:
        self._screen.show()
        for line in banner(self._client.welcome, self._conversation.system):
            self._screen.note(line)
        self._screen.note(f"/help lists the commands; {HOW_TO_QUIT}")
        self._screen.show()


class Screen(Output):
    """Prints for the REPL, from the event loop alone. `announce` is for messages that come at any time."""

    def __init__(self, prompting: Callable[[], bool]) -> None:
        """`prompting`: whether a line is being typed."""
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # characters that this terminal's encoding lacks
        self.console = VisibleConsole(file=sys.stdout)
        self._prompting = prompting
        self._view: AnswerView | None = None  # while an answer is written
        self._deferred: list[Text] = []  # announcements meanwhile
        self._printing: set[asyncio.Future[None]] = set()

    def show(self, what: RenderableType = "") -> None:
        self.console.show(what)

    def note(self, text: str, style: str = "dim") -> None:
        self.show(Text(text, style=style))

    def announce(self, text: str, style: str = "dim") -> None:
        """Show a message that no command caused: above the prompt, or after the present answer."""
        line = Text(text, style=style)
        if self._view is not None:
            self._deferred.append(line)
        elif self._prompting():
            printing = asyncio.ensure_future(run_in_terminal(lambda: self.show(line)))
            self._printing.add(printing)
            printing.add_done_callback(self._printing.discard)
        else:
            self.show(line)

    def interrupt(self, text: str) -> None:
        """Show a message at once, also within an answer."""
        if self._view is None:
            self.announce(text)
        else:
            self._view.notice(text)

    @contextmanager
    def answer(self) -> Iterator[View]:
        self._view = AnswerView(self)
        try:
            yield self._view
        finally:
            self._view.ended()
            self._view = None
            while self._deferred:
                self.show(self._deferred.pop(0))


class AnswerView(View):
    """Writes one answer; a status is shown while nothing of it has come."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._status_shown = False  # the cursor's line is a status, which the next output erases
        self._at_line_start = True
        self._empty = True
        self._show_status("reading the prompt ...")

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

    def reason(self, text: str) -> None:
        if text:
            self._clear_status()
            self._write(self._dim(text))
            self._at_line_start = text.endswith("\n")
            self._empty = False

    def reasoned(self) -> None:
        self.ended()
        self._write("\n")

    def notice(self, text: str) -> None:
        self.ended()
        self._screen.note(text)

    def ended(self) -> None:
        self._clear_status()
        if not self._at_line_start:
            self._at_line_start = True
            self._write("\n")

    def _show_status(self, text: str) -> None:
        self._status_shown = True
        self._write(CLEAR + self._dim(text[: self._screen.console.width - 1]))

    def _dim(self, text: str) -> str:
        with self._screen.console.capture() as capture:
            self._screen.console.print(Text(text, style="dim"), end="", soft_wrap=True)
        return capture.get()

    def _clear_status(self) -> None:
        if self._status_shown:
            self._status_shown = False
            self._write(CLEAR)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class LogLines(logging.Handler):
    """Shows log lines as announcements."""

    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno >= logging.WARNING else "dim"
        with suppress(RuntimeError):  # the loop is closed: the command has ended
            self._loop.call_soon_threadsafe(self._screen.announce, self.format(record), style)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within the block, replaces the root logger's handlers."""
        root = logging.getLogger()
        before = root.handlers[:]
        if before:
            self.setFormatter(before[0].formatter)
        root.handlers[:] = [self]
        try:
            yield
        finally:
            root.handlers[:] = before


@contextmanager
def quiet_terminal() -> Iterator[None]:
    """Switch echo off: the next prompt reads the keys; and Ctrl-Z: it would stop the engine with this
    process."""
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
