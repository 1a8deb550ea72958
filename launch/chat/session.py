"""One chat: questions are answered, commands are executed. Where its output goes is the caller's choice: the
REPL's screen, or lines on stdout and stderr."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from rich.console import RenderableType

from launch.chat.commands import Call, parse_line, parse_policy
from launch.chat.conversation import Conversation, Reply, Transcript, View
from launch.chat.settings import change, echo
from launch.chat.tables import (
    counters_table,
    cut,
    engine_table,
    help_text,
    parts_help,
    policy_list,
    policy_options,
    settings_help,
    settings_table,
    summary,
)
from launch.chat.why import why_text
from launch.errors import WrongUsage
from launch.terminal.format import count, model_name
from launch.terminal.interrupts import Interrupts
from pipeline.assets import model_dir
from protocol.client import Client
from protocol.messages import PolicyChanged, Welcome

FORCE = "--force"
QUESTIONS = (  # that the embedded model answers well, also without a repetition penalty
    "What is the global interpreter lock?",
    "What is a generator?",
    "What is a virtual machine?",
)


class Output(Protocol):
    """Shows a session's messages and tables."""

    def show(self, what: RenderableType = "") -> None:
        """Print a table or a text."""

    def note(self, text: str) -> None:
        """Print a message."""


class Session:
    def __init__(
        self,
        client: Client,
        conversation: Conversation,
        interrupts: Interrupts,
        output: Output,
        new_view: Callable[[], AbstractContextManager[View]],
        *,
        summaries: bool,
    ) -> None:
        """`new_view` is called for each answer. `summaries`: print a line of figures below each."""
        self._client = client
        self._conversation = conversation
        self._interrupts = interrupts
        self._output = output
        self._new_view = new_view
        self._summaries = summaries
        self._defaults = conversation.settings
        self._last: Reply | None = None
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

    async def handle(self, line: str) -> bool:
        """Execute a command or ask a question. False for /quit. Raises WrongUsage, OutputFailed,
        RequestFailed, and EngineGone or AnswerLost where the engine has ended."""
        parsed = parse_line(line)
        if isinstance(parsed, str):
            await self._answer(lambda view: self._conversation.ask(parsed, view, self._interrupts))
        elif parsed is not None:
            if parsed.name == "quit":
                return False
            await self._execute(parsed)
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
                self._output.note(f"/{call.name} was cancelled")

    async def _answer(self, ask: Callable[[View], Coroutine[Any, Any, Reply]]) -> None:
        with self._new_view() as view:
            self._last = reply = await ask(view)
            most = self._conversation.settings.max_tokens
            if self._summaries:
                self._output.note(" · ".join(summary(reply, self._client.welcome.emulation, most)))
            elif where := cut(reply, most):
                self._output.note(f"the answer was {where}, after {count(reply.tokens, 'token')}")

    async def _help(self, argument: str) -> None:
        topic, _, name = argument.partition(" ")
        if topic not in ("", "policy", "set") or (topic == "set" and name):
            topics = "/help, /help policy, /help policy NAME, /help set"
            raise WrongUsage(f"no further help on {argument[:40]!r}: {topics}")
        if topic == "set":
            self._output.show(settings_help(self._conversation.settings, self._defaults))
        elif name:
            self._output.show(policy_options(name.strip(), {}))
        else:
            self._output.show(parts_help() if topic else help_text())

    async def _reset(self, argument: str) -> None:
        self._conversation.restore(())
        self._last = None
        self._output.note("the conversation is cleared")

    async def _system(self, argument: str) -> None:
        if argument:
            self._conversation.system = None if argument == "off" else argument
        system = self._conversation.system
        self._output.note("no system message" if system is None else f"system message: {system}")

    async def _stats(self, argument: str) -> None:
        stats = await self._client.stats()
        self._output.show(engine_table(stats, self._client.welcome))
        self._output.show()
        self._output.show(counters_table(self._last, stats))

    async def _why(self, argument: str) -> None:
        self._output.show(why_text(self._last, await self._client.stats(), self._client.welcome))

    async def _policy(self, argument: str) -> None:
        if not argument:
            stats = await self._client.stats()
            current = stats.get("policy", self._client.welcome.policy)
            self._output.show(policy_list(current, stats.get("policy_options", {})))
            return
        name, options = parse_policy(argument)
        changed = await self._client.set_policy(name, options)
        given = "".join(f" {option}={value}" for option, value in options.items())
        self._output.note(policy_change(changed, f"{given}; /help policy {name} lists its options"))

    async def _set(self, argument: str) -> None:
        conversation = self._conversation
        before = conversation.settings
        conversation.settings = after = change(before, argument, self._defaults)
        if argument:
            self._output.note(" · ".join(echo(before, after, argument)))
        else:
            self._output.show(settings_table(after))
        for line in after.without_effect():
            self._output.note(line)
        context = self._client.welcome.context
        if argument and after.max_tokens != before.max_tokens and after.max_tokens >= context:
            self._output.note(
                f"an answer and its prompt have {context} tokens together: the engine's context"
            )

    async def _save(self, argument: str) -> None:
        force = argument == FORCE or argument.endswith(f" {FORCE}")
        path = _path(argument.removesuffix(FORCE).strip() if force else argument, "/save")
        turns = self._conversation.turns
        if not turns:
            raise WrongUsage("nothing to save yet")
        if path not in self._files and not force and _exists(path):
            raise WrongUsage(f"{path} exists; /save {path} {FORCE} overwrites it")
        Transcript.of(self._client.welcome.model, self._conversation.system, turns).save(path)
        self._files.add(path)
        self._output.note(f"saved {count(len(turns) // 2, 'question')} to {path}")

    async def _load(self, argument: str) -> None:
        path = _path(argument, "/load")
        transcript = Transcript.load(path)
        self._conversation.restore(transcript.turns)
        self._conversation.system = transcript.system
        self._last = None
        self._files.add(path)
        self._output.note(f"loaded {count(len(transcript.messages) // 2, 'question')} from {path}")
        if transcript.system is not None:
            self._output.note(f"system message: {transcript.system}")
        if transcript.model not in ("", self._client.welcome.model):
            self._output.note(f"it was saved with another model: {transcript.model}")

    async def _retry(self, argument: str) -> None:
        before = self._conversation.turns
        await self._answer(lambda view: self._conversation.ask_again(view, self._interrupts))
        same = bool(before) and before == self._conversation.turns
        if same and self._conversation.settings.sampling.temperature == 0:
            self._output.note("the same answer: decoding is greedy; /set temperature=0.8 makes it vary")


def banner(welcome: Welcome, system: str | None) -> list[str]:
    """Returns what a chat says before the first question."""
    lines = [f"{model_name(welcome.model)} on {welcome.device}, policy {welcome.policy}"]
    if not welcome.exact:
        lines[0] += " (approximate)"
    if welcome.model == str(model_dir()):
        lines.append("It is for trying the engine, and knows little. Three questions that it answers well:")
        lines += [f"  {question}" for question in QUESTIONS]
    if welcome.emulation:
        lines.append(f"emulated: {welcome.emulation}")
    if system is not None:
        lines.append(f"system message: {system}")
    return lines


def policy_change(changed: PolicyChanged, more: str = "") -> str:
    """A message about the policy that an engine has switched to; `more` ends its first line."""
    first = f"policy: {changed.policy}" + ("" if changed.exact else " (approximate)") + more
    return "\n  ".join((first, *changed.notes))


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
