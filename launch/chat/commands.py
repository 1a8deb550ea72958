"""What can be typed at the prompt: the table of commands, and whether a line is one of them or a question."""

from __future__ import annotations

import re
from dataclasses import dataclass

from launch.command_line.grammar import nearest
from launch.errors import WrongUsage


@dataclass(frozen=True)
class Command:
    name: str
    arguments: str  # as /help shows them; "" where it takes none
    help: str


COMMANDS = {
    command.name: command
    for command in (
        Command("help", "", "this list"),
        Command("reset", "", "forget the conversation, not the system message"),
        Command("system", "[TEXT|off]", "what the model is told first: show or change it"),
        Command("stats", "", "counters of the last answer and of the engine"),
        Command("why", "", "where the last answer's time went, and what to try"),
        Command("policy", "[NAME [OPTION=VALUE]]", "show the policies, or change to one"),
        Command("set", "[KEY=VALUE]", "show or change the settings; KEY= takes one back"),
        Command("save", "FILE [--force]", "write the conversation as JSON"),
        Command("load", "FILE", "go on from a conversation that was saved"),
        Command("retry", "", "ask the last question again"),
        Command("quit", "", "end, as Ctrl-D does"),
    )
}


@dataclass(frozen=True)
class Call:
    """A command with the text after it."""

    name: str
    argument: str


def read_line(text: str) -> Call | str | None:
    """A command, a question for the model, or None for nothing. A question may begin with "/" when that is
    written twice. Raises WrongUsage, one line with the nearest names, for an unknown command, and where a
    command that takes no argument has one."""
    if not text.strip():
        return None
    if text.startswith("//"):
        return text[1:]
    if not text.startswith("/"):
        return text
    name, argument = re.fullmatch(r"/(\S*)\s*(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    if name not in COMMANDS:
        near = nearest(name, COMMANDS).replace("mean ", "mean /").replace(" or ", " or /")
        raise WrongUsage(f"there is no command /{name[:40]}{near or '; /help lists them'}")
    if argument and not COMMANDS[name].arguments:
        raise WrongUsage(f"/{name} takes no argument")
    return Call(name, argument.strip())


def policy_words(argument: str) -> tuple[str, dict[str, str]]:
    """The name and the options of /policy's argument. Raises WrongUsage where an option is no NAME=VALUE."""
    name, *words = argument.split()
    options: dict[str, str] = {}
    for word in words:
        option, equals, value = word.partition("=")
        if not (option and equals):
            raise WrongUsage(f"{word[:40]!r}: write an option of the policy as OPTION=VALUE")
        options[option.removeprefix(f"{name}.")] = value  # also as --set has it
    return name, options
