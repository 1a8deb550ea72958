"""The command line's meaning: arguments as `Options`, checked against the table. Starts nothing and reads no
file. Options that were not given are absent, so defaults come from the dataclasses alone."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path
from platform import python_version
from typing import Any, NoReturn

from msgspec import structs

from launch.command_line.table import COMMANDS, REPLAY, TABLE, Option
from launch.errors import WrongUsage
from pipeline.config import EngineConfig
from pipeline.policies.options import did_you_mean
from pipeline.policies.view import PolicyRequest
from protocol.messages import Sampling
from protocol.program import PROGRAM, installed

OPTIONS = [option for group in TABLE.values() for option in group]
CONFIG_FIELDS = {f.name for f in fields(EngineConfig)}
SAMPLING_FIELDS = set(Sampling.__struct_fields__)
RANDOM_OPTIONS = {"top_k", "top_p", "min_p"}  # without effect at temperature 0
COMPARING = {"bench", "evaluate", "advise"}  # commands that take several policies
NEEDING = {"generate": "prompt", "score": "text", "calibrate": "text"}  # a command: what it cannot be without
PROMPTS = {"prompt", "system"}
MAX_VALUE = 4095  # bytes of any other text: of a path, the system takes no more
MAX_ERROR = 1000  # characters

# Settings that --sweep takes, and their options. The engine's comes first: each value starts another.
SETTINGS = {"cache": "expert_cache", "batch": "batch", "prompt": "prompt_len", "gen": "gen_len"}


@dataclass(frozen=True)
class Axis:
    """One --sweep. `name`: in SETTINGS, or a policy's option as `option` or `policy.option`."""

    name: str
    values: tuple[Any, ...]

    @property
    def is_setting(self) -> bool:
        return self.name in SETTINGS


def axes(written: dict[str, Any]) -> list[Axis]:
    """Returns the axes of --sweep: settings first, in the order of SETTINGS. Raises WrongUsage."""
    given = [_axis(text) for text in written.get("sweep", ())]
    names = [axis.name for axis in given]
    for axis in given:
        if names.count(axis.name) > 1:
            raise WrongUsage(f"--sweep {axis.name} is given twice; write all of its values in one list")
        if axis.is_setting:
            _check_setting(axis, written)
    order = list(SETTINGS)
    settings = sorted((axis for axis in given if axis.is_setting), key=lambda axis: order.index(axis.name))
    return settings + [axis for axis in given if not axis.is_setting]


def _axis(text: str) -> Axis:
    name, equals, listed = text.partition("=")
    words = [word.strip() for word in listed.split(",")]
    if not (name and equals and all(words)):
        raise WrongUsage(f"--sweep {text}: write it as NAME=V1,V2, such as batch=1,4,16 or dali.window=2,8")
    if name not in SETTINGS and "." not in name and (near := did_you_mean(name, SETTINGS)):
        raise WrongUsage(f"--sweep {text}: unknown {name!r}{near}")
    read: Any = next((option.value for option in OPTIONS if option.key == SETTINGS.get(name)), str)
    try:
        return Axis(name, tuple(map(read, words)))
    except argparse.ArgumentTypeError as e:
        raise WrongUsage(f"--sweep {text}: {e}") from None


def _check_setting(axis: Axis, written: dict[str, Any]) -> None:
    name, option = axis.name, SETTINGS[axis.name]
    for wrong, why in (
        (option in written, f"--{option.replace('_', '-')} is given as well; give one of them"),
        ("replay" in written and name != "cache", f"a trace has one {name}; record one for each value"),
        (name == "cache" and "connect" in written, "another size needs another engine; leave out --connect"),
        ("record" in written and len(axis.values) > 1, "a recording is of one setting; leave out --record"),
    ):
        if wrong:
            raise WrongUsage(f"--sweep {name}: {why}")


@dataclass(frozen=True)
class Options:
    """A parsed command line: the given options, by argparse destination."""

    command: str | None  # None: chat
    written: dict[str, Any]
    words: tuple[str, ...] = ()  # of `cluster`: what to do, and with which head

    @property
    def connect(self) -> bool:
        return "connect" in self.written or self.command == "chat"

    @property
    def connect_name(self) -> str | None:
        return self.written.get("connect") or None

    @property
    def log_level(self) -> str:
        return str(self.written.get("log_level", "notice")).upper()

    def sampling(self, otherwise: Sampling) -> Sampling:
        """Returns the given settings; those of `otherwise` for the rest."""
        return structs.replace(otherwise, **{k: v for k, v in self.written.items() if k in SAMPLING_FIELDS})

    def config(self) -> EngineConfig:
        given = {k: v for k, v in self.written.items() if k in CONFIG_FIELDS}
        if policies := self.policies():
            given |= {"policy": policies[0].name, "policy_options": policies[0].options}
        return EngineConfig(**given)

    def policies(self) -> list[PolicyRequest]:
        """Returns those of --policy, --set and --sweep, in order. A --set without a name is for each;
        `NAME:OPTION=V` in the list of `bench` is a policy with options of its own. Raises WrongUsage."""
        policy = self.written.get("policy")
        words = [] if policy is None else policy.split(",") if self.command in COMPARING else [policy]
        requests = [_with_options(word) for word in words]
        names = list(dict.fromkeys(request.name for request in requests))
        given: dict[str, dict[str, str]] = {name: {} for name in names}
        for setting in self.written.get("set", ()):
            of, option, value = _setting("--set", setting, names)
            for name in of:
                given[name][option] = value
        requests = [replace(request, options=given[request.name] | request.options) for request in requests]
        for axis in axes(self.written):
            if not axis.is_setting:
                requests = _swept(requests, axis, names)
        return requests


def _with_options(word: str) -> PolicyRequest:
    """Returns the policy with the options of `NAME:OPTION=VALUE:...`."""
    name, *settings = word.split(":")
    pairs = [setting.partition("=") for setting in settings]
    if not all(option and equals for option, equals, _ in pairs):
        raise WrongUsage(f"--policy {word}: write its options as {name}:option=value")
    return PolicyRequest(name, {option: value for option, _, value in pairs})


def _setting(argument: str, setting: str, names: list[str]) -> tuple[list[str], str, str]:
    """Returns the policies, option and value of `POLICY.OPTION=VALUE` or, for all, `OPTION=VALUE`."""
    if not names:
        raise WrongUsage(f"{argument} {setting}: name the policy with --policy as well")
    match = re.fullmatch(r"(?:([^.=]+)\.)?([^.=]+)=(.*)", setting)
    if match is None:
        raise WrongUsage(f"{argument} {setting}: write it as {names[0]}.option=value or option=value")
    if match[1] is None:
        return names, match[2], match[3]
    if match[1] not in names:
        raise WrongUsage(f"{argument} {setting}: the policy is {' or '.join(names)}, not {match[1]}")
    return [match[1]], match[2], match[3]


def _swept(requests: list[PolicyRequest], axis: Axis, names: list[str]) -> list[PolicyRequest]:
    """Returns each request that --sweep is about, once for each of its values."""
    of, option, _ = _setting("--sweep", f"{axis.name}=", names)
    swept = []
    for request in requests:
        if request.name not in of:
            swept.append(request)
        elif option in request.options:
            raise WrongUsage(f"--sweep {axis.name}: {request.name}.{option} is given as well; give one")
        else:
            swept += [replace(request, options=request.options | {option: v}) for v in axis.values]
    return swept


def parse(arguments: list[str]) -> Options:
    """Returns the command and its options. Raises WrongUsage, one line with the nearest known words, for
    anything that the table does not have or that does not go together. Prints --help and --version, and
    exits."""
    for argument in arguments:
        if argument.encode(errors="replace").decode() != argument:
            raise WrongUsage(f"{argument!a} is not UTF-8 text")
    command = None if not arguments or arguments[0].startswith("-") else arguments[0]
    if command is not None and command not in COMMANDS:
        hint = f"; a prompt follows a command: {PROGRAM} generate PROMPT" if " " in command else ""
        known = f"(supported: {', '.join(COMMANDS)})"
        raise WrongUsage(f"unknown command {command[:80]!r}{did_you_mean(command, COMMANDS)}{hint} {known}")
    taken = {option.key: option for option in OPTIONS if option.is_of(command or "chat")}
    namespace, unknown = _parser(command).parse_known_intermixed_args(arguments[command is not None :])
    written = vars(namespace)
    words: list[str] = written.pop("words", [])
    if command == "generate" and words and "prompt" not in written:
        written["prompt"] = words.pop(0)
    action = tuple(words) if command == "cluster" else ()
    words = [] if action else words
    for word in (*unknown, *words):
        if word.startswith("-") or word in words:
            raise WrongUsage(_unknown(word, command))
    _check(command, [taken[key] for key in written], written)
    return Options(command, written, action)


def _unknown(word: str, command: str | None) -> str:
    """Returns an error text about a word that the command does not take."""
    spelled = word.partition("=")[0]
    if takers := [name for name in COMMANDS if any(o.spelled == spelled and o.is_of(name) for o in OPTIONS)]:
        return f"{spelled} does not belong to {command or 'a chat'}, but to {', '.join(takers)}"
    if word in COMMANDS:
        return f"{word}: write the command first, then its options"
    near = did_you_mean(spelled.replace("_", "-"), {option.spelled for option in OPTIONS})
    return f"unknown argument {word[:80]!r}{near or f'; `{_program(command)} --help` lists the options'}"


class Parser(argparse.ArgumentParser):
    """A parser that raises WrongUsage for errors, instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        message = " ".join(message.split()).removeprefix("argument ")
        raise WrongUsage(message if len(message) <= MAX_ERROR else f"{message[:MAX_ERROR]}...")


def _program(command: str | None) -> str:
    return PROGRAM if command is None else f"{PROGRAM} {command}"


def _parser(command: str | None) -> Parser:
    """Returns the grammar of one command, and of the words between its options."""
    text = COMMANDS[command] if command else "Mixture-of-experts models on one workstation.\n\ncommands:\n"
    if command is None:
        text += "".join(f"  {name:10} {text}\n" for name, text in COMMANDS.items())
        text += f"\n`{PROGRAM} COMMAND --help` lists its options. Without a command: chat in this terminal."
    parser = Parser(
        prog=_program(command),
        usage=f"{_program(command or '[command]')} [options]",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=_versions())
    prompt = "the same as --prompt" if command == "generate" else argparse.SUPPRESS
    parser.add_argument("words", nargs="*", metavar="PROMPT", help=prompt)
    for heading, options in TABLE.items():
        taken = [option for option in options if option.is_of(command or "chat")]
        group = parser if heading == "options" or not taken else parser.add_argument_group(heading)
        for option in taken:
            option.add_to(group)
    return parser


def _versions() -> str:
    return f"tandem {installed('tandem')}, Python {python_version()}, torch {installed('torch')}"


def _check(command: str | None, given: list[Option], written: dict[str, Any]) -> None:
    """Raises WrongUsage for options that do not go together."""
    mode = command or "chat"
    if "replay" in written:
        mode = REPLAY
    for option in given:
        _check_place(option, mode, written)
        _check_length(option, written[option.key])
        if option.not_with and option.not_with in written:
            raise WrongUsage(f"{option.spelled} does not go with --{option.not_with}")
    _check_one(mode, given, written)
    axes(written)
    if "prune" in written and not written.keys() & {"older_than", "to"}:
        raise WrongUsage("--prune: give --older-than DAYS, --to SIZE, or both")
    if Options(command, written).connect:
        without = "leave out --connect" if "connect" in written else "leave out the word chat"
        for option in given:
            if option.of_engine and not _goes(option.asked, mode, written):
                why = f"does not change a running engine; to start one with it, {without}"
                raise WrongUsage(f"{option.spelled} {why}")


def _needs(places: str, mode: str) -> list[list[str]]:
    """Returns what each of these places needs beside a command's mode; empty where none is of that mode."""
    return [
        place.split()[len(mode.split()) :]
        for place in places.split(", ")
        if f"{place} ".startswith(f"{mode} ")
    ]


def _goes(places: str, mode: str, written: Collection[str]) -> bool:
    return any(all(need.lstrip("-") in written for need in needs) for needs in _needs(places, mode))


def _check_place(option: Option, mode: str, written: Collection[str]) -> None:
    if _goes(option.takes, mode, written):
        return
    needs = _needs(option.takes, mode)
    if needs:
        need = " ".join(needs[0])
        raise WrongUsage(f"{option.spelled} belongs to {need} ({mode} {need}); give both or neither")
    raise WrongUsage(f"{option.spelled} does not belong to {mode}, which starts no engine")


def _check_one(mode: str, given: list[Option], written: dict[str, Any]) -> None:
    """Raises WrongUsage where two options give the same, or a command's prompt or text is missing."""
    for kind in ("prompt", "text"):
        several = [option.spelled for option in given if option.one_of == kind]
        if len(several) > 1:
            raise WrongUsage(f"{several[1]} gives a second {kind}, beside {several[0]}; give one")
        if not several and NEEDING.get(mode) == kind:
            ways = " or ".join(o.spelled for o in OPTIONS if o.one_of == kind and o.is_of(mode))
            name = written.get("connect")
            taken = f" ({name[:40]!r} is taken as the engine's name, after --connect)" if name else ""
            raise WrongUsage(f"{mode} needs a {kind}: give {ways}{taken}")


def _check_length(option: Option, value: Any) -> None:
    """Raises WrongUsage for a longer text than a child's configuration has room for, and a file system takes
    no longer ones."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str | Path) and len(os.fsencode(text)) > MAX_VALUE and option.key not in PROMPTS:
            raise WrongUsage(f"{option.spelled}: {str(text)[:40]!r}... is longer than {MAX_VALUE} bytes")
