"""The command line: what may be written, and its meaning as dataclasses. Starts nothing, reads no file.

An option that was not written is absent from argparse's result. So defaults come from the dataclasses alone,
common options are taken before and after the subcommand, and what would be ignored can be refused.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn, get_args

from launch.errors import WrongUsage
from launch.values import above, at_least, between, not_empty, token_ids
from pipeline.config import DEFAULT_CONTEXT, DeviceName, DTypeName, EngineConfig
from protocol.messages import Sampling

LOG_LEVELS = ("debug", "info", "warning", "error")
# Subcommands that the command line promises and that no code is behind yet.
NOT_YET = {
    "chat": "use `python launch.py --connect` for a plain chat with a running engine",
    "stress": "use `generate --connect` from several shells",
    "bench": "use `generate --json` with one --policy after the other",
    "calibrate": "policies that need calibration are not there either",
    "doctor": "what is missing is said when an engine starts",
    "cache": "remove folders under ~/.cache/tandem by hand",
}
CONFIG_FIELDS = {f.name for f in fields(EngineConfig)}
SAMPLING_FIELDS = {f.name for f in fields(Sampling)}
RANDOM_OPTIONS = {"top_k", "top_p", "min_p"}  # how to choose at random: without effect at temperature 0
ANSWER_OPTIONS = SAMPLING_FIELDS - {"seed"} | {"max_tokens", "stop", "ignore_eos"}


@dataclass(frozen=True)
class Options:
    """A parsed command line: the words that were written, by argparse destination."""

    command: str | None  # None: chat
    written: dict[str, Any]

    @property
    def connect(self) -> bool:
        return "connect" in self.written

    @property
    def connect_name(self) -> str | None:
        return self.written.get("connect") or None

    @property
    def log_level(self) -> str:
        return str(self.written.get("log_level", "info")).upper()

    @property
    def slab(self) -> bool:
        """Device memory was asked for, whatever the first policy needs."""
        return "expert_cache" in self.written

    def sampling(self, otherwise: Sampling) -> Sampling:
        """What was asked for; `otherwise` for the settings that were not."""
        return replace(otherwise, **{k: v for k, v in self.written.items() if k in SAMPLING_FIELDS})

    def config(self) -> EngineConfig:
        """The engine that was asked for."""
        given = {k: v for k, v in self.written.items() if k in CONFIG_FIELDS}
        if "set" in self.written:
            given["policy_options"] = _policy_options(self.written["set"], given.get("policy"))
        return EngineConfig(**given)


def parse(arguments: list[str]) -> Options:
    """Raises WrongUsage, one line with the nearest known words, for anything the grammar does not have."""
    for argument in arguments:
        if argument.encode(errors="replace").decode() != argument:
            raise WrongUsage(f"{argument!a} is not UTF-8 text")
    parser, commands = _grammar()
    namespace, unknown = parser.parse_known_args(arguments)
    written = vars(namespace)
    command = written.pop("command", None)
    if unknown:
        known = commands[command].known_options() if command else parser.known_options()
        raise WrongUsage(f"unknown argument {unknown[0]!r}{nearest(unknown[0], known)}")
    if command not in (None, "generate"):
        for option in sorted(ANSWER_OPTIONS & written.keys()):
            raise WrongUsage(f"{_spelt(option)} does not belong to {command}")
    if {"chat", "prompt_tokens"} <= written.keys():
        raise WrongUsage("--chat puts a text into a template; not with --prompt-tokens")
    # A chat samples as its model recommends, unless it is told otherwise.
    if written.get("temperature", 0 if command == "generate" else None) == 0:
        for option in sorted(RANDOM_OPTIONS & written.keys()):
            raise WrongUsage(
                f"{_spelt(option)} has no effect on a greedy answer; give a --temperature as well"
            )
    if "prefill" in written and "stepwise" not in written:
        raise WrongUsage("--prefill belongs to --stepwise; give both or neither")
    options = Options(command, written)
    if options.connect:
        engine_options = (CONFIG_FIELDS | {"set"}) - ({"seed"} if command in (None, "generate") else set())
        for option in sorted(engine_options & written.keys()):
            raise WrongUsage(f"{_spelt(option)} does not change a running engine; not with --connect")
        if command == "serve":
            raise WrongUsage("serve starts an engine; it takes no --connect")
    return options


def nearest(word: str, known: Iterable[str]) -> str:
    """ "; did you mean X or Y?", or "" where nothing is near."""
    near = difflib.get_close_matches(word.split("=")[0], list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""


class _Parser(argparse.ArgumentParser):
    """Errors are WrongUsage instead of a dump of the usage."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, argument_default=argparse.SUPPRESS, **settings)
        self.not_yet = ""  # what to use instead of a subcommand that is not there yet

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.not_yet:
            raise WrongUsage(f"{self.prog.split()[-1]} is not there yet; {self.not_yet}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        message = " ".join(message.split())
        choice = re.search(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message)
        if choice:
            known = re.findall(r"[\w-]+", choice[3])
            near = nearest(choice[2], known)
            message = f"{choice[1]}: there is no {choice[2]!r}{near} ({', '.join(known)})"
        raise WrongUsage(message.removeprefix("argument "))

    def known_options(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings]


def _grammar() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(
        prog="launch.py",
        description="Mixture-of-experts models on one workstation. Without a command: chat in this terminal.",
    )
    _add_common(parser)
    _add_answer(parser)
    subparsers = parser.add_subparsers(dest="command", metavar="command", parser_class=_Parser)

    generate = subparsers.add_parser("generate", help="complete one prompt (greedy by default)")
    _add_common(generate)
    _add_answer(generate)
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="T", help="text to continue; as a turn of a chat with --chat")
    prompt.add_argument("--prompt-tokens", type=token_ids, metavar="1,2,3", help="token ids to continue")
    generate.add_argument("--chat", action="store_true", help="put the prompt into the chat template")
    _add_json(generate)

    score = subparsers.add_parser("score", help="log-probabilities of a text")
    _add_common(score)
    text = score.add_mutually_exclusive_group(required=True)
    text.add_argument("--text", type=Path, metavar="F", help="UTF-8 file")
    text.add_argument("--tokens", type=Path, metavar="F.json", help="file with a JSON list of token ids")
    score.add_argument("--out", type=Path, metavar="F.npy", help="all of them, float32 [positions, vocab]")
    score.add_argument("--stepwise", action="store_true", help="one token at a time, by the decode path")
    score.add_argument("--prefill", type=at_least(1), metavar="N", help="tokens before the single ones (1)")
    _add_json(score)

    serve = subparsers.add_parser("serve", help="engine only; prints its name and address")
    _add_common(serve)
    for name, instead in NOT_YET.items():
        subparsers.add_parser(name, help="not there yet").not_yet = instead
    return parser, dict(subparsers.choices)


def _add_common(parser: _Parser) -> None:
    default = EngineConfig()
    engine = parser.add_argument_group("engine")
    add = engine.add_argument
    add("--model", type=Path, metavar="DIR", help="Hugging Face checkpoint directory (the embedded model)")
    add("--policy", metavar="PRESET", help="who computes what (all-host without a GPU, fiddler with one)")
    add("--set", action="append", metavar="POLICY.OPTION=VALUE", help="an option of the policy; repeatable")
    add("--device", choices=get_args(DeviceName), help=f"({default.device})")
    add("--format", choices=get_args(DTypeName), help=f"of the experts ({default.format})")
    add("--backbone-dtype", choices=get_args(DTypeName), help=f"of all the rest ({default.backbone_dtype})")
    add(
        "--expert-cache",
        type=between(0.0, 1.0),
        metavar="RATIO",
        help=f"share of all expert tiles that fits the device ({default.expert_cache})",
    )
    add("--tile", type=at_least(1), metavar="N", help="channels of a tile (from the experts' shape)")
    add("--workers", type=at_least(1), metavar="N", help="expert workers (one for each core)")
    add(
        "--context",
        type=at_least(1),
        metavar="N",
        help=f"tokens of prompt and answer (the model's, at most {DEFAULT_CONTEXT})",
    )
    add("--chunk", type=at_least(1), metavar="N", help="prefill tokens of one step (measured at start)")
    add("--link-gbps", type=above(0.0), metavar="X", help="emulate a link of X GB/s")
    add("--host-slowdown", type=between(1.0, math.inf), metavar="X", help="emulate workers X times slower")
    add("--costs", type=Path, metavar="FILE", help="use these costs instead of measuring")
    add("--seed", type=at_least(0), metavar="S", help=f"of preset random and sampling ({default.seed})")
    add("--prefetcher", choices=("process", "thread"), help=f"who copies tiles ({default.prefetcher})")
    add("--keep-store", action="store_true", help="keep the experts in shared memory after the end")
    add("--name", metavar="NAME", help="of the engine (e and the process id)")
    add("--log-level", choices=LOG_LEVELS, help="(info)")
    add("--connect", nargs="?", const="", metavar="NAME", help="use a running engine instead of starting one")


def _add_answer(parser: _Parser) -> None:
    default = Sampling()
    add = parser.add_argument_group("answer").add_argument
    add("--max-tokens", type=at_least(1), metavar="N", help="new tokens at most (128)")
    add("--temperature", type=between(0.0, math.inf), metavar="X", help="0 is greedy (0)")
    add("--top-k", type=at_least(0), metavar="K", help=f"0 is no limit ({default.top_k})")
    add("--top-p", type=above(0.0, 1.0), metavar="P", help=f"({default.top_p})")
    add("--min-p", type=between(0.0, 1.0), metavar="P", help=f"({default.min_p})")
    add("--repetition-penalty", type=above(0.0), metavar="X", help=f"({default.repetition_penalty})")
    add("--stop", action="append", type=not_empty, metavar="T", help="end before this text; repeatable")
    add("--ignore-eos", action="store_true", help="go on after the model's end of text")


def _add_json(parser: _Parser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")


def _policy_options(settings: list[str], policy: str | None) -> dict[str, str]:
    if policy is None:
        raise WrongUsage(f"--set {settings[0]}: name the policy with --policy as well")
    options = {}
    for setting in settings:
        match = re.fullmatch(r"([^.=]+)\.([^=]+)=(.*)", setting)
        if match is None:
            raise WrongUsage(f"--set {setting}: write it as {policy}.option=value")
        if match[1] not in (policy, "policy"):
            raise WrongUsage(f"--set {setting}: the policy is {policy}, not {match[1]}")
        options[match[2]] = match[3]
    return options


def _spelt(destination: str) -> str:
    return "--" + destination.replace("_", "-")
