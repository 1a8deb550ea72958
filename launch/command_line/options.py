"""The command line's meaning as dataclasses. Starts nothing, reads no file; `grammar.py` knows the words.
Options that were not given are absent, so defaults come from the dataclasses alone."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from launch.command_line import habits
from launch.command_line.grammar import Parser, grammar, nearest_option
from launch.command_line.sweep import axes
from launch.errors import WrongUsage
from pipeline.config import EngineConfig
from pipeline.policies.view import PolicyRequest
from protocol.messages import Sampling

CONFIG_FIELDS = {f.name for f in fields(EngineConfig)}
SAMPLING_FIELDS = {f.name for f in fields(Sampling)}
RANDOM_OPTIONS = {"top_k", "top_p", "min_p"}  # how to choose at random: without effect at temperature 0
# Options that decide how much memory an engine takes.
SIZES = {
    *("model", "policy", "set", "device", "format", "backbone_dtype", "expert_cache", "tile", "workers"),
    *("context", "kv_tokens", "chunk", "graphs"),
}
# Options of an engine that also apply to requests, by command.
REQUEST_OPTIONS: dict[str | None, set[str]] = {
    None: {"seed"},
    "chat": {"seed"},
    "generate": {"seed"},
    "bench": {"policy", "set"},
    "evaluate": {"policy", "set"},
}
COMPARING = {"bench", "evaluate", "advise"}  # commands that take several policies
# Commands that start no engine, and all of their options.
WITHOUT_ENGINE = {
    "keys": {"out", "add", "right", "list", "remove", "log_level"},
    "doctor": {"tune", "json", "log_level"} | SIZES,
    "advise": {
        "machine",
        "host_gbps",
        "link_gbps",
        "gpu_gbps",
        "gpu_gb",
        "host_gb",
        "host_tflops",
        "gpu_tflops",
    }
    | {"costs", "trace", "prompt_len", "batch", "plot", "seed", "json", "log_level"}
    | SIZES,
    "cache": {"prune", "older_than", "to", "dry_run", "json", "log_level"},
}
# All options of a replay, which starts no engine either.
REPLAY = {
    *("replay", "costs", "policy", "set", "sweep", "plot", "expert_cache", "seed", "json", "detail"),
    "log_level",
}
DRAWING = {"report", "model", "json", "log_level"}  # all options of calibrate without a text
PROMPTS = {"prompt", "text", "system"}
MAX_VALUE = 4095  # bytes of any other text: of a path, the system takes no more
ANSWER_OPTIONS = SAMPLING_FIELDS - {"seed"} | {"max_tokens", "stop", "ignore_eos"}


@dataclass(frozen=True)
class Options:
    """A parsed command line: the given options, by argparse destination."""

    command: str | None  # None: chat
    written: dict[str, Any]

    @property
    def connect(self) -> bool:
        return "connect" in self.written or self.command == "chat"

    @property
    def connect_name(self) -> str | None:
        return self.written.get("connect") or None

    @property
    def remote(self) -> str | None:
        """The endpoint, where --connect gives one instead of a name."""
        name = self.connect_name
        return name if name is not None and "://" in name else None

    @property
    def log_level(self) -> str:
        return str(self.written.get("log_level", "notice")).upper()

    def sampling(self, otherwise: Sampling) -> Sampling:
        """The given settings; those of `otherwise` for the rest."""
        return replace(otherwise, **{k: v for k, v in self.written.items() if k in SAMPLING_FIELDS})

    def config(self) -> EngineConfig:
        given = {k: v for k, v in self.written.items() if k in CONFIG_FIELDS}
        if policies := self.policies():
            given |= {"policy": policies[0].name, "policy_options": policies[0].options}
        return EngineConfig(**given)

    def policies(self) -> list[PolicyRequest]:
        """Those of --policy, --set and --sweep, in order. A --set without a name is for each; `NAME:OPTION=V`
        in the list of `bench` is a policy with options of its own. Raises WrongUsage."""
        policy = self.written.get("policy")
        words = [] if policy is None else policy.split(",") if self.command in COMPARING else [policy]
        requests = [_with_options(word) for word in words]
        names = list(dict.fromkeys(name for name, _ in requests))
        given: dict[str, dict[str, str]] = {name: {} for name in names}
        for setting in self.written.get("set", ()):
            of, option, value = _setting("--set", setting, names)
            for name in of:
                given[name][option] = value
        found = [PolicyRequest(name, given[name] | own) for name, own in requests]
        for axis in axes(self.written):
            if axis.is_setting:
                continue
            for value in axis.values:
                of, option, _ = _setting("--sweep", f"{axis.name}={value}", names)
            if fixed := [r for r in found if r.name in of and option in r.options]:
                raise WrongUsage(
                    f"--sweep {axis.name}: {fixed[0].name}.{option} is given as well; give one of them"
                )
            found = [
                replace(request, options=request.options | chosen)
                for request in found
                for chosen in ([{option: value} for value in axis.values] if request.name in of else [{}])
            ]
        return found


def _with_options(word: str) -> tuple[str, dict[str, str]]:
    """The policy and the options of `NAME:OPTION=VALUE:...`."""
    name, *settings = word.split(":")
    pairs = [setting.partition("=") for setting in settings]
    if not all(option and equals for option, equals, _ in pairs):
        raise WrongUsage(f"--policy {word}: write its options as {name}:option=value")
    return name, {option: value for option, _, value in pairs}


def _setting(argument: str, setting: str, names: list[str]) -> tuple[list[str], str, str]:
    """The policies, option and value of `POLICY.OPTION=VALUE` or, for all, `OPTION=VALUE`."""
    if not names:
        raise WrongUsage(f"{argument} {setting}: name the policy with --policy as well")
    match = re.fullmatch(r"(?:([^.=]+)\.)?([^.=]+)=(.*)", setting)
    if match is None:
        raise WrongUsage(f"{argument} {setting}: write it as {names[0]}.option=value or option=value")
    if match[1] is None:
        return names, match[2], match[3]
    name = names[0] if match[1] == "policy" and len(names) == 1 else match[1]
    if name not in names:
        raise WrongUsage(f"{argument} {setting}: the policy is {' or '.join(names)}, not {name}")
    return [name], match[2], match[3]


def parse(arguments: list[str]) -> Options:
    """Raises WrongUsage, one line with the nearest known words, for anything the grammar does not have."""
    for argument in arguments:
        if argument.encode(errors="replace").decode() != argument:
            raise WrongUsage(f"{argument!a} is not UTF-8 text")
    parser, commands = grammar()
    known = {name: command.known_options() for name, command in commands.items()}
    if line := habits.explain(arguments, {"": parser.known_options()} | known):
        raise WrongUsage(line)
    if mistyped := _unknown_before_command(arguments, commands, parser):
        raise WrongUsage(_unknown(mistyped, None, parser, commands))
    namespace, unknown = parser.parse_known_args(arguments)
    written = vars(namespace)
    command = written.pop("command", None)
    if unknown:
        raise WrongUsage(_unknown(unknown[0], command, commands[command] if command else parser, commands))
    if command not in (None, "chat", "generate"):
        _refuse(ANSWER_OPTIONS & written.keys(), f"does not belong to {command}")
    if command not in (None, "chat", "generate") and "system" in written:
        raise WrongUsage(f"--system does not belong to {command}")
    if command == "generate" and "system" in written and "chat" not in written:
        raise WrongUsage("--system: generate takes a system message only with --chat")
    if command == "generate":
        _check_prompt(written)
    if {"chat", "prompt_tokens"} <= written.keys():
        raise WrongUsage("--chat puts a text into a template; not with --prompt-tokens")
    # A chat samples by default as its model recommends.
    if written.get("temperature", 0 if command == "generate" and "chat" not in written else None) == 0:
        why = "has no effect on a greedy answer; give a --temperature as well"
        _refuse(RANDOM_OPTIONS & written.keys(), why)
    if "chaos_rate" in written and "chaos" not in written:
        raise WrongUsage("--chaos-rate belongs to --chaos; give both or neither")
    if "prefill" in written and "stepwise" not in written:
        raise WrongUsage("--prefill belongs to --stepwise; give both or neither")
    if "detail" in written and "json" not in written:
        raise WrongUsage("--detail belongs to --json; give both or neither")
    axes(written)
    if {"replay", "plot"} <= written.keys() and "sweep" not in written:
        raise WrongUsage("--plot draws a replay with --sweep only; add one, such as --sweep cache=0.25,0.5")
    if command == "calibrate":
        _check_calibrate(written)
    if command == "cache":
        _check_cache(written)
    if command == "keys" and "right" in written and written.keys() & {"list", "remove"}:
        raise WrongUsage("--right is of a new client: give it with --add NAME, or when keys are first made")
    if command in WITHOUT_ENGINE:
        _refuse(written.keys() - WITHOUT_ENGINE[command], f"does not belong to {command}")
    if "replay" in written:
        _refuse(written.keys() - REPLAY, "does not belong to bench --replay, which starts no engine")
    if command == "doctor" and "model" not in written:
        _refuse(SIZES & written.keys(), "is about a model: doctor --model DIR {} ...")
    if command == "doctor" and {"model", "tune"} <= written.keys():
        raise WrongUsage("--tune measures the machine and no model: doctor --tune")
    _check_lengths(written)
    options = Options(command, written)
    if "key" in written and "listen" not in written and options.remote is None:
        raise WrongUsage("--key is for tcp: --connect tcp://HOST:PORT, or serve --listen tcp://ADDRESS:PORT")
    if "http_keys" in written and "http" not in written:
        raise WrongUsage("--http-keys belongs to serve --http; give both or neither")
    if "energy" in written and options.remote is not None:
        raise WrongUsage("--energy reads the counters of this machine; run bench where the engine runs")
    if options.connect:
        # A running engine keeps its seed; injected faults have their own.
        allowed = {"seed"} if "chaos" in written else REQUEST_OPTIONS.get(command, set())
        engine_options = (CONFIG_FIELDS | {"set"}) - allowed - {"key"}
        without = "leave out --connect" if "connect" in written else "leave out the word chat"
        _refuse(
            engine_options & written.keys(),
            f"does not change a running engine; to start one with it, {without}",
        )
        if command == "serve":
            raise WrongUsage("serve starts an engine; it takes no --connect")
    return options


def _check_lengths(written: dict[str, Any]) -> None:
    """A child's configuration has room for paths and names, and a file system takes no longer ones."""
    for option in written.keys() - PROMPTS:
        value = written[option]
        for text in value if isinstance(value, list | tuple) else (value,):
            if isinstance(text, str | Path) and len(os.fsencode(text)) > MAX_VALUE:
                shown = f"{str(text)[:40]!r}..."
                raise WrongUsage(f"{_spelled(option)}: {shown} is longer than {MAX_VALUE} bytes")


def _check_prompt(written: dict[str, Any]) -> None:
    others = written.keys() & {"prompt", "file", "prompt_tokens"}
    if "text" in written:
        _refuse(others, "gives a second prompt; give one")
        written["prompt"] = written.pop("text")
    elif not others:
        name = written.get("connect")
        ways = "PROMPT, - for stdin, --prompt T, --file F or --prompt-tokens 1,2,3"
        taken = f" ({name[:40]!r} is taken as the engine's name, after --connect)" if name else ""
        raise WrongUsage(f"generate needs a prompt: {ways}{taken}")


def _check_calibrate(written: dict[str, Any]) -> None:
    if written.keys() & {"text", "tokens"}:
        if "report" in written and "://" in (written.get("connect") or ""):
            raise WrongUsage("--report draws a calibration of this machine; not with one of tcp://")
        return
    if "report" not in written:
        raise WrongUsage(
            "calibrate reads a text: give --text F or --tokens F.json; --report DIR alone draws what an"
            " earlier calibration found"
        )
    why = "applies to the reading of a text: give --text F or --tokens F.json too"
    _refuse(written.keys() - DRAWING, why)


def _check_cache(written: dict[str, Any]) -> None:
    if "prune" in written and not written.keys() & {"older_than", "to"}:
        raise WrongUsage("--prune: give --older-than DAYS, --to SIZE, or both")
    for option in ("older_than", "to", "dry_run"):
        if option in written and "prune" not in written:
            raise WrongUsage(f"{_spelled(option)} belongs to --prune; give both or neither")


def _refuse(options: Collection[str], why: str) -> None:
    """Raise WrongUsage for the first of these options, if any. `why`: with {} for the option."""
    if options:
        option = _spelled(min(options))
        raise WrongUsage(f"{option} {why.format(option)}")


def _unknown_before_command(arguments: list[str], commands: Collection[str], parser: Parser) -> str:
    """The first unknown option before a command, or "": the parser would take its value for a command."""
    known = parser.known_options()
    for before, argument in zip(["", *arguments], arguments, strict=False):
        is_value = before.startswith("-")
        if argument in commands or argument == "--" or not (is_value or argument.startswith("-")):
            break
        name = argument.partition("=")[0]
        if (
            re.match(r"--?[^\W\d]", name)
            and " " not in argument
            and name not in known
            and name[:2] not in known
        ):
            return argument
    return ""


def _unknown(word: str, command: str | None, parser: Parser, commands: dict[str, Parser]) -> str:
    others = [name for name, other in commands.items() if word.split("=")[0] in other.known_options()]
    if others:
        return f"{word} does not belong to {command or 'a chat'}, but to {', '.join(others)}"
    near = nearest_option(word, parser.known_options())
    return f"unknown argument {word[:80]!r}{near or f'; `{parser.prog} --help` lists the options'}"


def _spelled(destination: str) -> str:
    return "--" + destination.replace("_", "-")
