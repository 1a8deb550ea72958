"""The words that the command line may hold, for argparse. What they mean together is `options.py`'s.

An option that was not written is absent from argparse's result; common options are taken before and after the
subcommand.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn, get_args

from launch.command_line.values import (
    above,
    absolute,
    at_least,
    between,
    model_path,
    not_empty,
    size,
    token_ids,
)
from launch.errors import WrongUsage
from pipeline.calibration.windows import LEAST_TOKENS
from pipeline.config import (
    DEFAULT_CACHE,
    DEFAULT_CONTEXT,
    KV_CONTEXTS,
    BackboneDType,
    DeviceName,
    EngineConfig,
    FormatName,
)
from pipeline.models.shapes import PREFIX, SHAPES
from protocol.messages import Calibrate, Sampling

MAX_DAYS = 1e6
LOG_LEVELS = ("debug", "info", "warning", "error")


def nearest(word: str, known: Iterable[str]) -> str:
    """ "; did you mean X or Y?", or "" where nothing is near."""
    near = difflib.get_close_matches(word.split("=")[0], list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""


class Parser(argparse.ArgumentParser):
    """Errors are WrongUsage instead of a dump of the usage."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, argument_default=argparse.SUPPRESS, **settings)

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


def grammar() -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(
        prog="launch.py",
        description="Mixture-of-experts models on one workstation. Without a command: chat in this terminal.",
    )
    _add_common(parser)
    _add_answer(parser)
    _add_chat(parser)
    subparsers = parser.add_subparsers(dest="command", metavar="command", parser_class=Parser)

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
    serve.add_argument(
        "--listen", metavar="tcp://ADDRESS:PORT", help="take clients that have a key there, too"
    )

    chat = subparsers.add_parser("chat", help="chat with a running engine (--connect: which one)")
    _add_common(chat)
    _add_answer(chat)
    _add_chat(chat)

    stress = subparsers.add_parser("stress", help="many clients at once, each answer compared with it alone")
    _add_common(stress)
    stress.add_argument("--script", type=Path, metavar="F.jsonl", help="requests, one a line (built-in ones)")
    stress.add_argument("--clients", type=at_least(1), metavar="C", help="connected at once (8)")
    stress.add_argument("--repeat", type=at_least(1), metavar="N", help="times through the script (1)")
    stress.add_argument(
        "--chaos",
        metavar="KINDS",
        help="do harm meanwhile: kill, stop, delay, corrupt, or several of them with commas between",
    )
    stress.add_argument("--chaos-rate", type=above(0.0), metavar="R", help="harms a second on average (1)")
    _add_json(stress)

    bench = subparsers.add_parser("bench", help="the same prompts under each of --policy a,b,c")
    _add_common(bench)
    bench.add_argument("--prompt-len", type=at_least(1), metavar="P", help="tokens of a prompt (128)")
    bench.add_argument("--gen-len", type=at_least(2), metavar="G", help="new tokens of an answer (64)")
    bench.add_argument("--batch", type=at_least(1), metavar="B", help="requests at once (1)")
    bench.add_argument("--rounds", type=at_least(1), metavar="N", help="measured runs of each policy (5)")
    ppl = "held-out tokens on which approximate policies are compared with an exact one (256; 0: none)"
    bench.add_argument("--ppl-tokens", type=at_least(0), metavar="N", help=ppl)
    bench.add_argument("--plot", type=Path, metavar="F.png", help="draw what was found (also .svg, .pdf)")
    replay = "what the policies would have done with the routing of a recorded run; no engine is started"
    bench.add_argument("--replay", type=Path, metavar="F", help=replay)
    _add_json(bench)

    calibrate = subparsers.add_parser("calibrate", help="find out about the model what policies plan with")
    _add_common(calibrate)
    learnt = calibrate.add_mutually_exclusive_group()
    learnt.add_argument("--text", type=Path, metavar="F", help="UTF-8 file like what the model is used for")
    learnt.add_argument("--tokens", type=Path, metavar="F.json", help="file with a JSON list of token ids")
    most = f"tokens of it that are read at most ({Calibrate.tokens})"
    calibrate.add_argument("--calibrate-tokens", type=at_least(LEAST_TOKENS), metavar="N", help=most)
    report = "draw what was found into this folder; alone: what an earlier calibration found"
    calibrate.add_argument("--report", type=Path, metavar="DIR", help=report)
    _add_json(calibrate)

    keys = subparsers.add_parser("keys", help="make the keys for clients over tcp")
    keys.add_argument("--out", type=Path, metavar="DIR", help="folder for them (~/.config/tandem/keys)")
    keys.add_argument("--log-level", choices=LOG_LEVELS, help="(info)")

    doctor = subparsers.add_parser("doctor", help="what this machine can do, and what to change")
    doctor.add_argument("--log-level", choices=LOG_LEVELS, help="(info)")
    _add_json(doctor)
    of_model = "with --model: would it fit, and with which options? Nothing is loaded"
    _add_sizes(doctor.add_argument_group("a model", of_model).add_argument)

    cache = subparsers.add_parser("cache", help="list and prune what is kept on disk")
    cache.add_argument("--prune", action="store_true", help="remove what --older-than or --to says")
    old = "what was last used more than DAYS days ago"
    cache.add_argument("--older-than", type=between(0.0, MAX_DAYS), metavar="DAYS", help=old)
    to = "the least recently used, until the rest takes no more than SIZE on disk (500MB, 20GB)"
    cache.add_argument("--to", type=size, metavar="SIZE", help=to)
    cache.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    cache.add_argument("--log-level", choices=LOG_LEVELS, help="(info)")
    _add_json(cache)
    return parser, dict(subparsers.choices)


def _add_common(parser: Parser) -> None:
    default = EngineConfig()
    add = parser.add_argument_group("engine").add_argument
    _add_sizes(add)
    add("--link-gbps", type=above(0.0), metavar="X", help="emulate a link of X GB/s")
    add("--host-slowdown", type=between(1.0, math.inf), metavar="X", help="emulate workers X times slower")
    costs = "use these costs instead of measuring; daop-table-1 are published ones"
    add("--costs", type=Path, metavar="FILE", help=costs)
    record = "write the routing of what is run to a new file, for bench --replay"
    add("--record", type=absolute, metavar="F", help=record)
    add("--seed", type=at_least(0), metavar="S", help=f"of preset random and sampling ({default.seed})")
    add("--keep-store", action="store_true", help="keep the experts in shared memory after the end")
    add("--verify", action="store_true", help="compare the experts with their checksums before they are used")
    add("--name", metavar="NAME", help="of the engine (e and the process id)")
    add("--log-level", choices=LOG_LEVELS, help="(info)")
    add(
        "--connect",
        nargs="?",
        const="",
        metavar="NAME",
        help="use a running engine instead of starting one; tcp://HOST:PORT is one on another machine",
    )
    add("--key", type=Path, metavar="FILE", help="for tcp: this client's key, or with serve the engine's")


def _add_sizes(add: Callable[..., object]) -> None:
    """What decides how much memory an engine takes."""
    default = EngineConfig()
    add(
        "--model",
        type=model_path,
        metavar="DIR",
        help="Hugging Face checkpoint directory, or ORG/NAME, a model of the Hub, which is downloaded once"
        " (the embedded model); or random weights, to see how fast a"
        f" model would be: {PREFIX}NAME, or {PREFIX}NAME/N for N of its layers ({', '.join(SHAPES)})",
    )
    add("--policy", metavar="PRESET", help="who computes what (all-host without a GPU, fiddler with one)")
    add("--set", action="append", metavar="POLICY.OPTION=VALUE", help="an option of the policy; repeatable")
    add("--device", choices=get_args(DeviceName), help=f"({default.device})")
    add("--format", choices=get_args(FormatName), help="of the experts (the most exact that fits)")
    add(
        "--backbone-dtype",
        choices=get_args(BackboneDType),
        help=f"of all the rest ({default.backbone_dtype})",
    )
    add(
        "--expert-cache",
        type=between(0.0, 1.0),
        metavar="RATIO",
        help=f"share of all expert tiles on the device ({DEFAULT_CACHE}, on a GPU all that fit)",
    )
    add("--tile", type=at_least(1), metavar="N", help="channels of a tile (from the experts' shape)")
    workers = "expert workers, who divide the cores (one for each, at most 16); 0: the coordinator itself"
    add("--workers", type=at_least(0), metavar="N", help=workers)
    add(
        "--context",
        type=at_least(1),
        metavar="N",
        help=f"tokens of prompt and answer (the model's, at most {DEFAULT_CONTEXT}, or what fits)",
    )
    add(
        "--kv-tokens",
        type=at_least(1),
        metavar="N",
        help=f"tokens that the KV cache holds for all requests ({KV_CONTEXTS} contexts, or what fits)",
    )
    add("--chunk", type=at_least(1), metavar="N", help="prefill tokens of one step (measured at start)")
    add("--prefetcher", choices=("process", "thread"), help=f"who copies tiles ({default.prefetcher})")


def _add_answer(parser: Parser) -> None:
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


def _add_chat(parser: Parser) -> None:
    parser.add_argument("--system", type=not_empty, metavar="T", help="what the chat's model is told first")


def _add_json(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
