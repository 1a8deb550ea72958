"""The REPL: a prompt, and for each line an answer or a command, until Ctrl-D or /quit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from launch.chat.answer import AnswerView, in_lines, summary
from launch.chat.commands import Call, parse_line, parse_policy
from launch.chat.conversation import Conversation, Reply
from launch.chat.history import PrivateFileHistory, history_file
from launch.chat.input import InputLine
from launch.chat.screen import LogLines, Screen
from launch.chat.settings import KEYS, change, value_text
from launch.chat.tables import counters_table, engine_table, help_text, policy_table, settings_table
from launch.chat.transcript import Transcript, load, save
from launch.chat.why import why_text
from launch.connect.reconnect import ANSWERS, WAITING
from launch.errors import OutputFailed, WrongUsage
from launch.terminal.format import model_name
from launch.terminal.interrupts import Interrupts
from protocol.client import Client
from protocol.errors import RequestFailed
from protocol.messages import PolicyChanged

FORCE = "--force"
HOW_TO_QUIT = "Ctrl-D or /quit ends the chat"


class Repl:
    def __init__(self, client: Client, conversation: Conversation, interrupts: Interrupts) -> None:
        self._client = client
        self._conversation = conversation
        self._interrupts = interrupts
        self._screen = Screen(lambda: self._input.active)
        history = PrivateFileHistory(history_file(), self._screen.announce)
        self._input = InputLine(history, self._hint)
        self._defaults = conversation.settings
        self._last: Reply | None = None
        self._view: AnswerView | None = None  # while an answer is written
        self._hinted = False  # since the last line
        self._files: set[Path] = set()  # saved or loaded in this session: /save may overwrite them
        self._commands: dict[str, Callable[[str], Awaitable[None]]] = {
            "help": self._help,
            "reset": self._reset,
            "system": self._system,
            "stats": self._stats,
            "why": self._why,
            "policy": self._policy,
            "set": self._set,
            "save": self._save,
            "load": self._load,
            "retry": self._retry,
        }

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
        try:
            parsed = parse_line(line)
            if parsed is None:
                return True
            if isinstance(parsed, str):
                await self._answer(lambda view: self._conversation.ask(parsed, view, self._interrupts))
            elif parsed.name == "quit":
                return False
            else:
                await self._execute(parsed)
        except (WrongUsage, OutputFailed, RequestFailed) as e:
            self._screen.note(str(e), "red")
        self._screen.show()
        return True

    async def _execute(self, call: Call) -> None:
        """Execute a command; Ctrl-C stops waiting for it."""
        work = self._commands[call.name](call.argument)
        if call.name == "retry":  # an answer handles Ctrl-C itself
            return await work
        task = asyncio.ensure_future(work)
        cancelled = False

        def cancel() -> None:
            nonlocal cancelled
            cancelled = task.cancel()

        with self._interrupts.handled_by(cancel):
            try:
                await task
            except asyncio.CancelledError:
                if not cancelled or self._interrupts.received:
                    raise
                self._screen.note(f"/{call.name} was cancelled")

    async def _answer(self, ask: Callable[[AnswerView], Coroutine[Any, Any, Reply]]) -> None:
        with AnswerView(self._screen, self._interrupts) as self._view:
            try:
                self._last = reply = await ask(self._view)
            finally:
                self._view = None
            most = self._conversation.settings.max_tokens
            parts = summary(reply, self._client.welcome.emulation, most)
            self._screen.note(in_lines(parts, self._screen.width))

    # --- commands ----------------------------------------------------------------------------------------

    async def _help(self, argument: str) -> None:
        self._screen.show(help_text())

    async def _reset(self, argument: str) -> None:
        self._conversation.restore(())
        self._last = None
        self._screen.note("the conversation is cleared")

    async def _system(self, argument: str) -> None:
        if argument:
            self._conversation.system = None if argument == "off" else argument
        system = self._conversation.system
        self._screen.note("no system message" if system is None else f"system message: {system}")

    async def _stats(self, argument: str) -> None:
        stats = await self._client.stats()
        self._screen.show(engine_table(stats, self._client.welcome))
        self._screen.show()
        self._screen.show(counters_table(self._last, stats))

    async def _why(self, argument: str) -> None:
        self._screen.show(why_text(self._last, await self._client.stats(), self._client.welcome))

    async def _policy(self, argument: str) -> None:
        if not argument:
            current = (await self._client.stats()).get("policy", self._client.welcome.policy)
            self._screen.show(policy_table(current))
            return
        name, options = parse_policy(argument)
        self._screen.note(_announcement(await self._client.set_policy(name, options)))

    def _on_policy(self, changed: PolicyChanged) -> None:
        self._screen.announce(f"another client changed the {_announcement(changed)}", "yellow")

    def _on_connection(self, text: str) -> None:
        """Show that the connection is lost or restored, also while an answer is written."""
        if self._view is None:
            self._screen.announce(text)
        else:
            self._view.notice(text)

    async def _set(self, argument: str) -> None:
        conversation = self._conversation
        before = conversation.settings
        conversation.settings = after = change(before, argument, self._defaults)
        if argument:
            changed = [f"{key} {value_text(after, key)}" for key in KEYS if after.get(key) != before.get(key)]
            self._screen.note(in_lines(changed or ["nothing has changed"], self._screen.width))
        else:
            self._screen.show(settings_table(after))
        for line in after.without_effect():
            self._screen.note(line)

    async def _save(self, argument: str) -> None:
        force = argument == FORCE or argument.endswith(f" {FORCE}")
        path = _path(argument.removesuffix(FORCE).strip() if force else argument, "/save")
        turns = self._conversation.turns
        if not turns:
            raise WrongUsage("there is nothing to save yet")
        if path not in self._files and not force and _exists(path):
            raise WrongUsage(f"{path} exists; /save {path} {FORCE} overwrites it")
        save(Transcript(self._client.welcome.model, self._conversation.system, turns), path)
        self._files.add(path)
        self._screen.note(f"saved {_questions(len(turns) // 2)} to {path}")

    async def _load(self, argument: str) -> None:
        path = _path(argument, "/load")
        transcript = load(path)
        self._conversation.restore(transcript.messages)
        self._conversation.system = transcript.system
        self._last = None
        self._files.add(path)
        self._screen.note(f"loaded {_questions(len(transcript.messages) // 2)} from {path}")
        if transcript.system is not None:
            self._screen.note(f"system message: {transcript.system}")
        if transcript.model not in ("", self._client.welcome.model):
            self._screen.note(f"it was saved with another model: {transcript.model}")

    async def _retry(self, argument: str) -> None:
        before = self._conversation.turns
        await self._answer(lambda view: self._conversation.ask_again(view, self._interrupts))
        same = bool(before) and before == self._conversation.turns
        if same and self._conversation.settings.sampling.temperature == 0:
            self._screen.note("the same answer: decoding is greedy; /set temperature=0.8 makes it vary")

    def _hint(self) -> None:
        if not self._hinted:
            self._hinted = True
            self._screen.announce(HOW_TO_QUIT)

    def _welcome(self) -> None:
        welcome = self._client.welcome
        self._screen.show()
        self._screen.note(f"{model_name(welcome.model)} on {welcome.device}, policy {welcome.policy}")
        if welcome.emulation:
            self._screen.note(f"emulated: {welcome.emulation}")
        if self._conversation.system is not None:
            self._screen.note(f"system message: {self._conversation.system}")
        self._screen.note(f"/help lists the commands; {HOW_TO_QUIT}")
        self._screen.show()


def _announcement(changed: PolicyChanged) -> str:
    lines = [f"policy: {changed.policy}" + ("" if changed.exact else " (approximate)"), *changed.notes]
    return "\n  ".join(lines)


def _path(text: str, command: str) -> Path:
    if not text:
        raise WrongUsage(f"{command} needs the name of a file")
    try:
        return Path(text).expanduser().absolute()
    except (RuntimeError, OSError) as e:  # ~ of an unknown user; a working directory that was removed
        raise WrongUsage(f"{text}: {e}") from e


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as e:
        raise WrongUsage(f"{path}: {e.strerror}") from e


def _questions(count: int) -> str:
    return f"{count} question{'' if count == 1 else 's'}"
