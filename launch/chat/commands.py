"""The commands of a chat, and the parser that tells a command from a question."""

from __future__ import annotations

import re
from dataclasses import dataclass

from launch.command_line.values import nearest
from launch.errors import WrongUsage


@dataclass(frozen=True)
class Command:
    name: str
    arguments: str  # as /help shows them; "" where it takes none
    help: str


@dataclass(frozen=True)
class Call:
    name: str
    argument: str


COMMANDS = {
    command.name: command
    for command in (
        Command("help", "[policy [NAME]|set]", "show this list, or what /policy and /set can set"),
        Command("reset", "", "clear the conversation; the system message stays"),
        Command("system", "[TEXT|off]", "show, set or remove the system message"),
        Command("stats", "", "show counters of the last answer and engine"),
        Command("why", "", "explain the speed of the last answer"),
        Command("policy", "[NAME [OPTION=VALUE]]", "list the policies, or switch to one"),
        Command("set", "[KEY=VALUE]", "show or change settings; KEY= for default"),
        Command("save", "FILE [--force]", "save the conversation as JSON"),
        Command("load", "FILE", "continue a saved conversation"),
        Command("retry", "", "ask the last question again"),
        Command("quit", "", "end the chat, like Ctrl-D; also /exit, /bye, exit"),
    )
}
QUIT = Call("quit", "")
LAST_WORDS = ("exit", "quit", "/exit", "/bye")  # as a whole line


def parse_line(text: str) -> Call | str | None:
    """A command, a question for the model, or None for a blank line. "//" begins a question with "/". Raises
    WrongUsage for an unknown command and for an argument to a command that takes none."""
    if not text.strip():
        return None
    if text.strip() in LAST_WORDS:
        return QUIT
    if text.startswith("//"):
        return text[1:]
    if not text.startswith("/"):
        return text
    name, argument = re.fullmatch(r"/(\S*)\s*(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    if f"/{name}" in LAST_WORDS:
        raise WrongUsage(f"/{name} takes no argument")
    if name not in COMMANDS:
        near = nearest(name, COMMANDS).replace("mean ", "mean /").replace(" or ", " or /")
        raise WrongUsage(
            f"unknown command /{name[:40]}{near or '; /help lists all'} (// begins a question with a /)"
        )
    if argument and not COMMANDS[name].arguments:
        raise WrongUsage(f"/{name} takes no argument")
    return Call(name, argument.strip())


def parse_policy(argument: str) -> tuple[str, dict[str, str]]:
    """The name and the options of /policy's argument. Raises WrongUsage for an option without "="."""
    name, *words = argument.split()
    options: dict[str, str] = {}
    for word in words:
        option, equals, value = word.partition("=")
        if not (option and equals):
            raise WrongUsage(f"{word[:40]!r}: write an option of the policy as OPTION=VALUE")
        options[option.removeprefix(f"{name}.")] = value  # --set's spelling, NAME.OPTION, works too
    return name, options
