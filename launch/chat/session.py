"""One chat: questions are answered, commands are executed. Where its output goes is its caller's choice: to
the REPL's screen (`repl.py`), or as plain lines to stdout and stderr."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, RenderableType

from launch.chat.conversation import Conversation, Reply, View, change, load, save
from launch.chat.why import COMMANDS, engine_table, help_text, policy_list, settings_table, summary, why_text
from launch.errors import WrongUsage
from launch.terminal.format import count, model_name
from launch.terminal.interrupts import Interrupts
from launch.terminal.tables import PLAIN_WIDTH, VisibleConsole
from pipeline.assets import model_dir
from pipeline.policies.options import did_you_mean
from protocol.client import Client
from protocol.errors import RequestFailed
from protocol.messages import PolicyChanged, Welcome

ADVISED = re.compile(r"--set ([\w-]+)\.[^\s);,]+(?: --set \1\.[^\s);,]+)*")  # of one policy
LAST_WORDS = ("exit", "quit")  # as a whole line
QUESTIONS = (  # that the embedded model answers well, also without a repetition penalty
    "What is the global interpreter lock?",
    "What is a generator?",
    "What is a virtual machine?",
)


class Output:
    """Shows a session's answers on stdout, its messages and tables as plain text on stderr."""

    def __init__(self) -> None:
        stderr = Console(file=sys.stderr)
        width = stderr.width if stderr.is_terminal else PLAIN_WIDTH
        self.console = VisibleConsole(width=width, color_system=None)

    def show(self, what: RenderableType = "") -> None:
        with self.console.capture() as captured:
            self.console.show(what)
        for line in captured.get().splitlines():
            print(line.rstrip(), file=sys.stderr)

    def note(self, text: str, style: str = "dim") -> None:
        """Print a message; `style`: for outputs with colours."""
        self.show(text)

    @contextmanager
    def answer(self) -> Iterator[View]:
        """Returns the view of one answer."""
        yield View()


def parse_line(text: str) -> tuple[str, str]:
    """Returns a command's name and argument, or "ask" and a question; "//" begins a question with "/". Raises
    WrongUsage for an unknown command and for an argument to a command that takes none."""
    if text.strip() in LAST_WORDS:
        return "quit", ""
    if not text.startswith("/") or text.startswith("//"):
        return "ask", text.replace("//", "/", 1) if text.startswith("//") else text
    name, *arguments = text[1:].split(maxsplit=1) or [""]
    if name not in COMMANDS:
        near = did_you_mean(name, COMMANDS).replace("mean ", "mean /").replace(" or ", " or /")
        raise WrongUsage(
            f"unknown command /{name[:40]}{near or '; /help lists all'} (// begins a question with a /)"
        )
    if arguments and not COMMANDS[name].arguments:
        raise WrongUsage(f"/{name} takes no argument")
    return name, "".join(arguments).strip()


def parse_policy(argument: str) -> tuple[str, dict[str, str]]:
    """Returns the name and the options of /policy's argument. Raises WrongUsage for an option without "="."""
    name, *words = argument.split()
    pairs = [word.partition("=") for word in words]
    for option, equals, _ in pairs:
        if not (option and equals):
            raise WrongUsage(f"{option[:40]!r}: write an option of the policy as OPTION=VALUE")
    return name, {option: value for option, _, value in pairs}


def as_typed(text: str) -> str:
    """Returns an engine's advice about a policy's options with a line of the chat in place of those of a
    start."""
    return ADVISED.sub(lambda found: f"/policy {found[1]} {found[0].replace(f'--set {found[1]}.', '')}", text)


class Session:
    def __init__(
        self, client: Client, conversation: Conversation, interrupts: Interrupts, output: Output
    ) -> None:
        self._client = client
        self._conversation = conversation
        self._interrupts = interrupts
        self._output = output
        self._defaults = conversation.settings
        self._last: Reply | None = None

    async def handle(self, line: str) -> bool:
        """Execute a command or ask a question. Returns False for /quit. Raises WrongUsage, OutputFailed,
        RequestFailed, and EngineGone or AnswerLost where the engine has ended."""
        if not line.strip():
            return True
        name, argument = parse_line(line)
        if name == "ask":
            await self._answer(argument)
        elif name == "retry":
            await self._answer(None)
        elif name != "quit":
            await self._execute(name, argument)
        return name != "quit"

    async def _execute(self, name: str, argument: str) -> None:
        """Execute a command; Ctrl-C stops waiting for it."""
        command: Callable[[str], Awaitable[None]] = getattr(self, f"_{name}")
        task = asyncio.ensure_future(command(argument))
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
                self._output.note(f"/{name} was cancelled")

    async def _answer(self, text: str | None) -> None:
        with self._output.answer() as view:
            self._last = reply = await self._conversation.ask(text, view)
            most = self._conversation.settings["max_tokens"]
            self._output.note(" · ".join(summary(reply, self._client.welcome.emulation, most)))

    async def _help(self, argument: str) -> None:
        self._output.show(help_text())

    async def _reset(self, argument: str) -> None:
        self._conversation.turns = ()
        self._last = None
        self._output.note("the conversation is cleared")

    async def _system(self, argument: str) -> None:
        if argument:
            self._conversation.system = None if argument == "off" else argument
        system = self._conversation.system
        self._output.note("no system message" if system is None else f"system message: {system}")

    async def _stats(self, argument: str) -> None:
        self._output.show(engine_table(await self._client.stats(), self._client.welcome))

    async def _why(self, argument: str) -> None:
        self._output.show(why_text(self._last, await self._client.stats(), self._client.welcome))

    async def _policy(self, argument: str) -> None:
        if not argument:
            stats = await self._client.stats()
            current = stats.get("policy", self._client.welcome.policy)
            self._output.show(policy_list(current, stats.get("policy_options", {})))
            return
        name, options = parse_policy(argument)
        try:
            changed = await self._client.set_policy(name, options)
        except RequestFailed as e:
            raise RequestFailed(as_typed(str(e)), usage=e.usage) from None
        given = "".join(f" {option}={value}" for option, value in options.items())
        self._output.note(as_typed(policy_change(changed, given)))

    async def _set(self, argument: str) -> None:
        before = self._conversation.settings
        self._conversation.settings = after = change(before, argument, self._defaults)
        if not argument:
            self._output.show(settings_table(after, self._defaults))
            return
        named = [word.partition("=")[0] for word in argument.split()]
        self._output.note(" · ".join(f"{key}={after[key]}" for key in named).replace("None", "none"))

    async def _save(self, argument: str) -> None:
        path = _path(argument, "/save")
        turns = self._conversation.turns
        if not turns:
            raise WrongUsage("nothing to save yet")
        save(path, self._conversation.system, turns)
        self._output.note(f"saved {count(len(turns) // 2, 'question')} to {path}")

    async def _load(self, argument: str) -> None:
        path = _path(argument, "/load")
        system, turns = load(path)
        self._conversation.system, self._conversation.turns = system, turns
        self._last = None
        self._output.note(f"loaded {count(len(turns) // 2, 'question')} from {path}")
        if system is not None:
            self._output.note(f"system message: {system}")


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
    """Returns a message about the policy that an engine has switched to; `more` ends its first line."""
    first = f"policy: {changed.policy}" + ("" if changed.exact else " (approximate)") + more
    return "\n  ".join((first, *changed.notes))


def _path(text: str, command: str) -> Path:
    if not text:
        raise WrongUsage(f"{command} needs the name of a file")
    try:
        return Path(text).expanduser().absolute()
    except (RuntimeError, OSError) as e:  # ~ of an unknown user; a working directory that was removed
        raise WrongUsage(f"{text}: {e}") from e
