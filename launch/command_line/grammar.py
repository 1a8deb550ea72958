"""The commands and options for argparse. An option that was not given is absent from its result. Common
options may be given before and after the command. `options.py` checks what options mean together."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any, NoReturn, get_args

from launch.command_line import habits
from launch.command_line.values import (
    above,
    absolute,
    at_least,
    between,
    client_name,
    http_address,
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
    DenseName,
    DeviceName,
    EngineConfig,
    ExchangeName,
    FormatName,
    GraphsName,
)
from pipeline.models.shapes import PREFIX, SHAPES
from protocol.keys import RIGHTS
from protocol.messages import Calibrate, Sampling
from protocol.program import PROGRAM

MAX_DAYS = 1e6
DEFAULT_HTTP = "127.0.0.1:8000"
MOST_LOSS = 1000  # percent
MAX_ERROR = 1000  # characters
LOG_LEVELS = ("debug", "info", "notice", "warning", "error")


def nearest(word: str, known: Iterable[str]) -> str:
    """ "; did you mean X or Y?", or "" where no known word is similar."""
    near = difflib.get_close_matches(word.split("=")[0], list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def nearest_option(word: str, options: Iterable[str]) -> str:
    """Like `nearest`, among the long options: those that begin with the word, and those spelled alike."""
    name = word.partition("=")[0].lstrip("-").replace("_", "-")
    known = {option[2:]: option for option in options if option.startswith("--")}
    begun = [other for other in known if len(name) > 1 and other.startswith(name)]
    near = begun or difflib.get_close_matches(name, known, n=2, cutoff=0.65)
    return f"; did you mean {' or '.join(known[other] for other in near[:2])}?" if near else ""


class Parser(argparse.ArgumentParser):
    """Raises WrongUsage for errors, instead of printing the usage."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, argument_default=argparse.SUPPRESS, **settings)

    def error(self, message: str) -> NoReturn:
        message = " ".join(message.split())
        choice = re.search(r"argument (\S+): invalid choice: ['\"](.*)['\"] \(choose from (.*)\)", message)
        if choice:
            known = re.findall(r"[\w-]+", choice[3])
            near = nearest(choice[2], known)
            what = "unknown command" if choice[1] == "command" else f"{choice[1]}: unknown value"
            message = f"{what} {choice[2]!r}{near} (supported: {', '.join(known)})"
            if choice[1] == "command" and choice[2] in habits.COMMANDS:
                message = f"there is no command {choice[2]!r}: {habits.COMMANDS[choice[2]]}"
            elif choice[1] == "command" and " " in choice[2]:
                message += f"; a prompt follows a command: {PROGRAM} generate PROMPT"
        if missing := re.fullmatch(r"one of the arguments (.*) is required", message):
            message = f"give {' or '.join(missing[1].split())}"
        message = message.removeprefix("argument ")
        raise WrongUsage(message if len(message) <= MAX_ERROR else f"{message[:MAX_ERROR]}...")

    def known_options(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings]


def _versions() -> str:
    found = {}
    for name in ("tandem", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # a checkout that was not installed
            found[name] = "(not installed)"
    return f"tandem {found['tandem']}, Python {python_version()}, torch {found['torch']}"


def grammar() -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(
        prog=PROGRAM,
        description="Mixture-of-experts models on one workstation. Without a command: chat in this terminal.",
    )
    parser.add_argument(
        "--version", action="version", version=_versions(), help="versions of Tandem, Python and torch"
    )
    _add_common(parser)
    _add_answer(parser)
    _add_chat(parser)
    subparsers = parser.add_subparsers(dest="command", metavar="command", parser_class=Parser)

    generate = subparsers.add_parser("generate", help="complete one prompt")
    _add_common(generate)
    _add_answer(generate)
    words = "text to continue, with --chat the user's message; -: read it from stdin"
    # Not one of the group: the value of a mistyped option would count as a second prompt.
    generate.add_argument("text", nargs="?", metavar="PROMPT", help=words)
    prompt = generate.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="T", help="the same as PROMPT")
    prompt.add_argument("--file", type=Path, metavar="F", help="UTF-8 file with the prompt")
    prompt.add_argument("--prompt-tokens", type=token_ids, metavar="1,2,3", help="token ids to continue")
    template = "use the model's chat template, and sample as a chat does"
    generate.add_argument("--chat", action="store_true", help=template)
    _add_chat(generate)
    _add_json(generate)
    _add_detail(generate)

    score = subparsers.add_parser("score", help="log-probabilities of a text")
    _add_common(score)
    text = score.add_mutually_exclusive_group(required=True)
    text.add_argument("--text", type=Path, metavar="F", help="UTF-8 file")
    text.add_argument("--tokens", type=Path, metavar="F.json", help="file with a JSON list of token ids")
    add = score.add_argument
    add("--out", type=Path, metavar="F.npy", help="write all log-probabilities: float32 [positions, vocab]")
    add("--stepwise", action="store_true", help="score one token at a time, by the decode path")
    add("--prefill", type=at_least(1), metavar="N", help="tokens to prefill before stepping (default 1)")
    stride = "tokens by which the window moves over a text longer than the context (default: half of it)"
    add("--stride", type=at_least(1), metavar="N", help=stride)
    _add_json(score)
    _add_detail(score)

    evaluate = subparsers.add_parser(
        "evaluate", help="multiple-choice items: how many the model answers right under --policy a,b,c"
    )
    _add_common(evaluate)
    add = evaluate.add_argument
    add(
        "--items", type=Path, metavar="F.jsonl", help="items, one JSON object a line (default: built-in ones)"
    )
    add("--limit", type=at_least(1), metavar="N", help="only the first N items")
    _add_json(evaluate)

    serve = subparsers.add_parser("serve", help="start an engine and print its name and address")
    _add_common(serve)
    serve.add_argument(
        "--listen", metavar="tcp://ADDRESS:PORT", help="also accept clients that have a key at this address"
    )
    over_http = f"also serve OpenAI's and Anthropic's API over HTTP (default address {DEFAULT_HTTP})"
    serve.add_argument(
        "--http", nargs="?", const=DEFAULT_HTTP, type=http_address, metavar="HOST:PORT", help=over_http
    )
    keys_file = "API keys for --http, one a line: a name and a key; needed beyond this machine"
    serve.add_argument("--http-keys", type=Path, metavar="FILE", help=keys_file)

    chat = subparsers.add_parser("chat", help="chat with a running engine (--connect NAME to choose one)")
    _add_common(chat)
    _add_answer(chat)
    _add_chat(chat)

    stress = subparsers.add_parser(
        "stress", help="many clients at once; each answer is compared with the same request alone"
    )
    _add_common(stress)
    add = stress.add_argument
    script = "requests, one JSON object a line (default: built-in ones)"
    add("--script", type=Path, metavar="F.jsonl", help=script)
    add("--clients", type=at_least(1), metavar="C", help="clients connected at once (default 8)")
    add("--repeat", type=at_least(1), metavar="N", help="repetitions of the script (default 1)")
    chaos = "inject faults meanwhile: kill, stop, delay, corrupt, separated by commas"
    add("--chaos", metavar="KINDS", help=chaos)
    add("--chaos-rate", type=above(0.0), metavar="R", help="faults a second on average (default 1)")
    _add_json(stress)

    bench = subparsers.add_parser("bench", help="speed of the same prompts under each of --policy a,b,c")
    _add_common(bench)
    add = bench.add_argument
    add("--prompt-len", type=at_least(1), metavar="P", help="tokens of a prompt (default 128)")
    add("--gen-len", type=at_least(2), metavar="G", help="new tokens of an answer (default 64)")
    add("--batch", type=at_least(1), metavar="B", help="requests at once (default 1)")
    add("--rounds", type=at_least(1), metavar="N", help="measured runs of each policy (default 5)")
    ppl = "held-out tokens to compare approximate policies with an exact one (default 256; 0: none)"
    add("--ppl-tokens", type=at_least(0), metavar="N", help=ppl)
    energy = "joules a token as well, from the energy counters of processors (RAPL) and GPUs (NVML)"
    add("--energy", action="store_true", help=energy)
    add("--plot", type=Path, metavar="F.png", help="draw the results (also .svg, .pdf)")
    sweep = "measure each of these values: cache, batch, prompt, gen, or POLICY.OPTION; repeatable, crossed"
    add("--sweep", action="append", metavar="NAME=V1,V2", help=sweep)
    replay = "simulate the policies on the recorded routing of --record; no engine is started"
    add("--replay", type=Path, metavar="F", help=replay)
    _add_json(bench)
    _add_detail(bench)

    calibrate = subparsers.add_parser(
        "calibrate", help="measure the model's routing statistics, which policies use"
    )
    _add_common(calibrate)
    source = calibrate.add_mutually_exclusive_group()
    source.add_argument("--text", type=Path, metavar="F", help="UTF-8 text similar to the model's use")
    source.add_argument("--tokens", type=Path, metavar="F.json", help="file with a JSON list of token ids")
    most = f"tokens to read at most, from all of the text (default {Calibrate.tokens})"
    add = calibrate.add_argument
    add("--calibrate-tokens", type=at_least(LEAST_TOKENS), metavar="N", help=most)
    bound = "find the strongest settings of approximations that add at most X %% to the perplexity"
    add("--max-loss", type=above(0, MOST_LOSS), metavar="X", help=bound)
    report = "draw the results into this folder; without a text, those of an earlier calibration"
    add("--report", type=Path, metavar="DIR", help=report)
    _add_json(calibrate)

    keys = subparsers.add_parser("keys", help="make key files for clients over tcp, list and revoke them")
    keys.add_argument("--out", type=Path, metavar="DIR", help="their folder (default ~/.config/tandem/keys)")
    action = keys.add_mutually_exclusive_group()
    further = "make a key file for a further client of the engine whose keys are there"
    action.add_argument("--add", type=client_name, metavar="NAME", help=further)
    action.add_argument("--list", action="store_true", help="the clients of that engine, and their rights")
    remove = "revoke a client, by name or public key: engines that run close its connections"
    action.add_argument("--remove", metavar="NAME", help=remove)
    right = "of the new client: use: send requests; tune: also set the policy; admin: all (default use)"
    keys.add_argument("--right", choices=RIGHTS, help=right)
    _add_log_level(keys)

    doctor = subparsers.add_parser("doctor", help="what this machine can do, and what to change")
    _add_log_level(doctor)
    _add_json(doctor)
    tune = "measure again which kernels are the fastest here; a start does it once for a machine"
    doctor.add_argument("--tune", action="store_true", help=tune)
    of_model = (
        "with --model: whether it fits, with which options, and how fast it would be; nothing is loaded"
    )
    _add_sizes(doctor.add_argument_group("a model", of_model).add_argument)

    _add_advise(
        subparsers.add_parser("advise", help="which policy, cache and format for a model, on any machine")
    )

    cache = subparsers.add_parser("cache", help="list and prune what is kept on disk and in shared memory")
    add = cache.add_argument
    prune = "remove entries that are not in use, by --older-than, --to or both"
    add("--prune", action="store_true", help=prune)
    old = "those last used more than DAYS days ago, on disk and of --keep-store in shared memory"
    add("--older-than", type=between(0.0, MAX_DAYS), metavar="DAYS", help=old)
    to = "the least recently used, until the rest takes at most SIZE on disk (such as 20GB)"
    add("--to", type=size, metavar="SIZE", help=to)
    add("--dry-run", action="store_true", help="only list what would be removed")
    _add_log_level(cache)
    _add_json(cache)
    return parser, dict(subparsers.choices)


def _add_common(parser: Parser) -> None:
    default = EngineConfig()
    add = parser.add_argument_group("engine").add_argument
    _add_sizes(add)
    add("--link-gbps", type=above(0.0), metavar="X", help="emulate a link of X GB/s")
    add("--host-slowdown", type=between(1.0, math.inf), metavar="X", help="emulate workers X times slower")
    costs = "use these costs instead of measuring; daop-table-1: those published for DAOP"
    add("--costs", type=Path, metavar="FILE", help=costs)
    record = "record the routing into a new file, for bench --replay"
    add("--record", type=absolute, metavar="F", help=record)
    seed = f"seed of sampling and of the policy random (default {default.seed})"
    add("--seed", type=at_least(0), metavar="S", help=seed)
    add("--keep-store", action="store_true", help="leave the experts in shared memory for the next start")
    add("--verify", action="store_true", help="compare the experts with their checksums before use")
    add("--name", metavar="NAME", help="the engine's name (default: e and the process id)")
    _add_log_level(parser)
    connect = "use a running engine instead of starting one; tcp://HOST:PORT for another machine"
    add("--connect", nargs="?", const="", metavar="NAME", help=connect)
    key = "for tcp: the client's key file; with serve --listen, the engine's"
    add("--key", type=Path, metavar="FILE", help=key)


def _add_sizes(add: Callable[..., object]) -> None:
    """The options that determine how much memory an engine takes."""
    default = EngineConfig()
    add(
        "--model",
        type=model_path,
        metavar="DIR",
        help="Hugging Face checkpoint directory, or ORG/NAME, a model of the Hub, which is downloaded once"
        " (default: the embedded model); or random weights in the shape of a known model, to see its speed:"
        f" {PREFIX}NAME, or {PREFIX}NAME/N for N of its layers ({', '.join(SHAPES)})",
    )
    policy = "what to compute where (default all-host without a GPU, fiddler with one)"
    add("--policy", metavar="PRESET", help=policy)
    setting = "set an option of the policy; repeatable"
    add("--set", action="append", metavar="POLICY.OPTION=VALUE", help=setting)
    add(
        "--device",
        choices=get_args(DeviceName),
        help=f"device of the backbone and the resident experts (default {default.device})",
    )
    formats = (
        f"format of the experts' weights: {', '.join(get_args(DenseName))}; or floe[-u4|-u8][-int8|-int4], of"
        " which single channels can be left out: up in 2 (4, 8) bits, channels in bf16 (int8, int4) (default:"
        " the most exact that fits, none of the last)"
    )
    add("--format", choices=get_args(FormatName), metavar="FORMAT", help=formats)
    backbone_dtype = f"format of all other weights (default {default.backbone_dtype})"
    add("--backbone-dtype", choices=get_args(BackboneDType), help=backbone_dtype)
    expert_cache = f"share of all expert tiles on the device (default {DEFAULT_CACHE}; on a GPU all that fit)"
    add("--expert-cache", type=between(0.0, 1.0), metavar="RATIO", help=expert_cache)
    add("--tile", type=at_least(1), metavar="N", help="channels of a tile (default: by the experts' shape)")
    workers = (
        "expert workers, which divide the cores (default one per core, at most 16); 0: no worker processes"
    )
    add("--workers", type=at_least(0), metavar="N", help=workers)
    exchange = f"how work gets to the workers: sockets or shared memory (default {default.exchange})"
    add("--exchange", choices=get_args(ExchangeName), help=exchange)
    context = f"tokens of prompt and answer (default: the model's, at most {DEFAULT_CONTEXT}, or what fits)"
    add("--context", type=at_least(1), metavar="N", help=context)
    kv_tokens = f"tokens in the KV cache, of all requests (default {KV_CONTEXTS} contexts, or what fits)"
    add("--kv-tokens", type=at_least(1), metavar="N", help=kv_tokens)
    add("--chunk", type=at_least(1), metavar="N", help="prefill tokens of one step (default: measured)")
    graphs = f"decode steps by CUDA graphs, on a GPU (default {default.graphs})"
    add("--graphs", choices=get_args(GraphsName), help=graphs)


def _add_advise(parser: Parser) -> None:
    model = parser.add_argument_group(
        "a model", "a folder, or one that is not here: of the Hub, or shape:NAME"
    )
    _add_sizes(model.add_argument)
    machine = "a machine that is not here (default: this one, on which the model is run for a moment)"
    add = parser.add_argument_group("a machine", machine).add_argument
    known = "a known one, such as 4090-pcie4; the other options change its numbers"
    add("--machine", metavar="NAME", help=known)
    add("--host-gbps", type=above(0.0), metavar="X", help="GB/s that all cores read from the host's memory")
    add("--link-gbps", type=above(0.0), metavar="X", help="GB/s from the host's memory to the GPU's")
    add("--gpu-gbps", type=above(0.0), metavar="X", help="GB/s that the GPU reads from its memory")
    add("--gpu-gb", type=above(0.0), metavar="X", help="size of the GPU's memory")
    add("--host-gb", type=above(0.0), metavar="X", help="free memory of the host (default: enough)")
    add("--host-tflops", type=above(0.0), metavar="X", help="of all cores (default: by --host-gbps)")
    add("--gpu-tflops", type=above(0.0), metavar="X", help="of the GPU (default: by --gpu-gbps)")
    costs = "costs measured on that machine in --format, in place of the rates; daop-table-1: DAOP's"
    add("--costs", type=Path, metavar="FILE", help=costs)
    add = parser.add_argument_group("the use").add_argument
    add("--trace", type=Path, metavar="F", help="routing of this model that --record wrote")
    add("--prompt-len", type=at_least(1), metavar="P", help="tokens of a prompt (default 128)")
    add("--batch", type=at_least(1), metavar="B", help="requests at once (default 1)")
    add("--plot", type=Path, metavar="F.png", help="draw the results (also .svg, .pdf)")
    add("--seed", type=at_least(0), metavar="S", help="seed of synthetic routing (default 0)")
    _add_json(parser)
    _add_log_level(parser)


def _add_answer(parser: Parser) -> None:
    default = Sampling()
    add = parser.add_argument_group("answer").add_argument
    add("--max-tokens", type=at_least(1), metavar="N", help="new tokens at most (default 128)")
    temperature = "0: greedy (default 0; in a chat and with --chat the model's)"
    add("--temperature", type=between(0.0, math.inf), metavar="X", help=temperature)
    add(
        "--top-k",
        type=at_least(0),
        metavar="K",
        help=f"only the K most probable tokens; 0: all (default {default.top_k})",
    )
    add(
        "--top-p",
        type=above(0.0, 1.0),
        metavar="P",
        help=f"only the most probable tokens, P in all (default {default.top_p})",
    )
    add(
        "--min-p",
        type=between(0.0, 1.0),
        metavar="P",
        help=f"only tokens P times as probable as the best (default {default.min_p})",
    )
    penalty = f"divides the logits of tokens that occurred (default {default.repetition_penalty}: none)"
    add("--repetition-penalty", type=above(0.0), metavar="X", help=penalty)
    add("--stop", action="append", type=not_empty, metavar="T", help="end before this text; repeatable")
    add("--ignore-eos", action="store_true", help="continue after the model's end-of-text token")


def _add_chat(parser: Parser) -> None:
    parser.add_argument("--system", type=not_empty, metavar="T", help="system message of the chat")


def _add_detail(parser: Parser) -> None:
    parser.add_argument("--detail", action="store_true", help="with --json: also the figures of each layer")


def _add_json(parser: Parser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on stdout, and nothing else there"
    )


def _add_log_level(parser: Parser) -> None:
    verbose = "show details on stderr: --log-level info"
    parser.add_argument("-v", "--verbose", action="store_const", dest="log_level", const="info", help=verbose)
    parser.add_argument(
        "--log-level", choices=LOG_LEVELS, help="least severe messages shown (default notice)"
    )
