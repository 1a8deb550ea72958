"""Tab completion of commands and their arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from launch.chat.commands import COMMANDS
from launch.chat.policy_tables import describe
from launch.chat.settings import KEYS
from pipeline.policies.options import Choice
from pipeline.policies.presets import PRESETS


class CommandCompleter(Completer):
    """Completes lines that begin with a single "/", up to the cursor."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not completes(text):
            return
        name, space, argument = text[1:].partition(" ")
        argument = argument.lstrip(" ")
        word = argument.split(" ")[-1]
        if not space:
            for command in COMMANDS.values():
                if command.name.startswith(name):
                    text = command.name + (" " if command.arguments else "")
                    yield Completion(text, -len(name), display=f"/{command.name}", display_meta=command.help)
        elif name == "help":
            yield from _help(argument.split(" ")[:-1], word)
        elif name == "policy":
            yield from _policy(argument.split(" ")[:-1], word)
        elif name == "set" and "=" not in word:
            yield from _offer(word, ((f"{key}=", help) for key, (_, help) in KEYS.items()))
        elif name == "set" and word.startswith("ignore_eos="):
            yield from _offer(word.partition("=")[2], (("on", ""), ("off", "")))
        elif name in ("save", "load"):
            yield from self._paths.get_completions(Document(argument, len(argument)), complete_event)


def completes(text: str) -> bool:
    """Whether a line with this text before the cursor is a command."""
    return text.startswith("/") and not text.startswith("//") and "\n" not in text


def _help(before: list[str], word: str) -> Iterator[Completion]:
    if not before:
        yield from _offer(word, (("policy ", "what /policy can set"), ("set", "what /set can set")))
    elif before == ["policy"]:
        yield from _policy([], word)


def _policy(before: list[str], word: str) -> Iterator[Completion]:
    if not before:
        yield from _offer(word, ((preset.name, describe(preset)) for preset in PRESETS.values()))
        return
    preset = PRESETS.get(before[0])
    if preset is None:
        return
    option, equals, value = word.partition("=")
    if not equals:
        yield from _offer(option, ((f"{o.name}=", o.help) for o in preset.options))
        return
    for declared in preset.options:
        if declared.name == option and isinstance(declared, Choice):
            yield from _offer(value, ((choice, "") for choice in declared.choices))


def _offer(typed: str, choices: Iterable[tuple[str, str]]) -> Iterator[Completion]:
    for choice, help in choices:
        if choice.startswith(typed):
            yield Completion(choice, -len(typed), display_meta=help)
