"""Every option, declared once: `options.py` makes the grammar, the help and the checks of it. Defaults come
from the configuration's dataclasses.

An option belongs to places: a command ("chat" also without the word), or a command with another option
("stress --chaos"). `bench --replay` starts no engine, and takes only what names it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from msgspec import structs

from launch.command_line.values import (
    above,
    absolute,
    at_least,
    between,
    devices,
    guesses,
    head_address,
    http_address,
    ip_address,
    machine_name,
    model_path,
    names,
    not_empty,
    origins,
    port,
    port_range,
    rates,
    size,
    token_ids,
)
from pipeline.calibration import LEAST_TOKENS
from pipeline.config import (
    DEFAULT_CACHE,
    DEFAULT_CONTEXT,
    KV_CONTEXTS,
    BackboneDType,
    EngineConfig,
    ExchangeName,
    FileName,
    FormatName,
    GraphsName,
    KvDType,
    OwnName,
)
from pipeline.models.shapes import PREFIX, SHAPES
from protocol.messages import CALIBRATION_TOKENS, MAX_TOKENS, Sampling

DEFAULTS = {field.name: field.default for field in structs.fields(Sampling)}
DEFAULTS |= {field.name: field.default for field in fields(EngineConfig)}
DEFAULT_HTTP = "127.0.0.1:8000"
DEFAULT_PORT, PORTS = 6379, 27  # of Ray on a machine: the first, and how many
LOG_LEVELS = ("debug", "info", "notice", "warning", "error")

COMMANDS = {
    "generate": "complete one prompt",
    "chat": "chat with a running engine (--connect NAME to choose one)",
    "serve": "start an engine and print its name and address",
    "score": "log-probabilities of a text",
    "evaluate": "multiple-choice items: how many the model answers right under --policy a,b,c",
    "bench": "speed of the same prompts under each of --policy a,b,c",
    "stress": "many clients at once; each answer is compared with the same request alone",
    "calibrate": "measure the model's routing statistics, which policies use",
    "advise": "which policy, cache and format for a model, on any machine",
    "doctor": "what this machine can do, and what to change",
    "cache": "list and prune what is kept on disk and in shared memory",
    "cluster": "several machines as one: cluster start, cluster join HEAD:PORT, cluster status, cluster stop",
}
CLIENTS = "chat, generate, score, evaluate, stress, bench, calibrate"
ENGINE = f"{CLIENTS}, serve"
SIZES = f"{ENGINE}, doctor --model, advise"
REPLAY = "bench --replay"
JSON = f"generate, score, evaluate, stress, bench, calibrate, doctor, advise, cache, cluster, {REPLAY}"
EVERYWHERE = f"{ENGINE}, doctor, advise, cache, cluster, {REPLAY}"

FORMATS = (
    f"format of the experts' weights: {', '.join(get_args(OwnName))};"
    f" {', '.join(get_args(FileName))}, which keep quantized models as they are; or"
    " floe[-u4|-u8][-int8|-int4], of which single channels can be left out: up in 2 (4, 8) bits, channels in"
    " bf16 (int8, int4) (default: a quantized model's own, else the most exact of the first that fits)"
)
BACKBONE = (
    "format of all other weights; own: bf16, and matrices that the file has quantized as they are there,"
    " or in int8 where no format keeps them (default: own for a quantized model, else bf16)"
)
MODEL = (
    "Hugging Face checkpoint directory, or GGUF file; or a model of the Hub, which is downloaded once:"
    " ORG/NAME, or ORG/NAME:TYPE for its GGUF file of a type like Q4_K_M (default: the embedded model);"
    " or random weights in the shape of a known model, to see its speed:"
    f" {PREFIX}NAME, or {PREFIX}NAME/N for N of its layers ({', '.join(SHAPES)}; or PATH/config.json)"
)
POLICY = "what to compute where (default all-host without a GPU, tandem with one)"
SET = "set an option of the policy; repeatable"
DEVICES = (
    "of the backbone and the resident experts: auto, cpu, cuda; or several that divide the layers by their"
    " memory, as cuda:0,cuda:1 or, emulated, cpu:24GB,cpu:12GB"
)
CACHE = f"share of all expert tiles on the device (default {DEFAULT_CACHE}; on a GPU all that fit)"
WORKERS = "expert workers, which divide the cores (default one per core, at most 16); 0: no processes"
CONTEXT = f"tokens of prompt and answer (default: the model's, at most {DEFAULT_CONTEXT}, or what fits)"
KV_DTYPE = (
    "format of the KV cache; int8 is an approximation in half the memory of bf16 (default: f32 with"
    " --backbone-dtype f32, else bf16)"
)
KV_TOKENS = f"tokens in the KV cache, of all requests (default {KV_CONTEXTS} contexts, or what fits)"
COSTS = (
    "use these costs instead of measuring; daop-table-1: those published for DAOP; with --replay shape:NAME"
    " also a machine, as in advise"
)
SEED = "seed of sampling and of the policy random"
HTTP = f"also serve OpenAI's and Anthropic's API over HTTP (default address {DEFAULT_HTTP})"
HOST_MEMORY = "experts in memory, as 16GB; the others are read from disk (default: all, or as many as fit)"
HTTP_KEYS = "API keys for --http, one a line: a name and a key; needed beyond this machine"
ORIGINS = "pages of other sites that may send requests to --http: their origins, with commas, or *"
NAMES = "the model's name over HTTP; others are then refused (default: its own, and every name is served)"
TEMPERATURE = "0: greedy (default 0; in a chat and with --chat the model's)"
SPECULATE = (
    "guess next tokens from the text so far, and verify them in one step: no token changes (default on)"
)
PPL = "held-out tokens to compare approximate policies with an exact one (default 256; 0: none)"
REPLAYED = (
    "simulate the policies on what --record wrote, without an engine; or on routing that is drawn with the"
    f" locality of a known model: {PREFIX}NAME, or {PREFIX}NAME/N"
)
CLUSTER = "divide the experts among the machines of this cluster (docs/cluster.md)"
REPLICAS = "copies of each other machine's experts on further ones, as many as memory allows (default 0)"
HOST_PORTS = "ports that an expert host may take on its machine (default: any that is free)"
TOKEN = "file with the cluster's token (default: where `cluster start` makes it)"
ADDRESS = "this machine's IP address, at which the others reach it (default: the one that leads there)"
PORT = f"the first of {PORTS} ports that Ray takes on this machine (default {DEFAULT_PORT})"
SWEEP = "measure each of these values: cache, batch, prompt, gen, or POLICY.OPTION; repeatable, crossed"


@dataclass(frozen=True)
class Option:
    """`words`: its name and, unless it is a flag, what stands for its value. `value`: the words that it
    takes, or what reads one; None for a flag."""

    words: str
    value: Callable[[str], Any] | tuple[str, ...] | None
    help: str
    takes: str = ""  # its places, where they are not those of its section
    also: str = ""  # further places
    bare: str | None = None  # its value where none follows
    repeatable: bool = False
    one_of: str = ""  # only one option may give this
    not_with: str = ""  # an option that excludes it
    asked: str = ""  # where an engine's option is one of requests too, which may go with --connect
    of_engine: bool = False

    @property
    def name(self) -> str:
        return self.words.split()[0]

    @property
    def spelled(self) -> str:
        return f"--{self.name}"

    @property
    def key(self) -> str:
        """Returns its name among the given options and in the configuration."""
        return self.name.replace("-", "_")

    def is_of(self, command: str) -> bool:
        return any(place.split()[0] == command for place in self.takes.split(", "))

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Add it to the grammar of a command."""
        settings: dict[str, Any] = {"help": self.help}
        default = DEFAULTS.get(self.key)
        if isinstance(default, str | float | int) and self.value and "(default" not in self.help:
            settings["help"] += f" (default {default})"
        if self.value is None:
            settings["action"] = "store_true"
        elif isinstance(self.value, tuple):
            settings |= {"choices": self.value, "metavar": [*self.words.split(), None][1]}
        else:
            settings |= {"type": self.value, "metavar": self.words.split()[-1]}
        if self.repeatable:
            settings["action"] = "append"
        if self.bare is not None:
            settings |= {"nargs": "?", "const": self.bare}
        parser.add_argument(self.spelled, **settings)


def _section(takes: str, *options: Option, of_engine: bool = False) -> list[Option]:
    return [
        replace(o, takes=(o.takes or takes) + (o.also and f", {o.also}"), of_engine=of_engine)
        for o in options
    ]


_sizes = _section(
    SIZES,
    Option("model DIR", model_path, MODEL),
    Option("policy PRESET", str, POLICY, also=REPLAY, asked="bench, evaluate"),
    Option("set POLICY.OPTION=VALUE", str, SET, also=REPLAY, asked="bench, evaluate", repeatable=True),
    Option("device DEVICE[,DEVICE]", devices, DEVICES),
    Option("format FORMAT", get_args(FormatName), FORMATS),
    Option("backbone-dtype", get_args(BackboneDType), BACKBONE),
    Option("expert-cache RATIO", between(0.0, 1.0), CACHE, also=REPLAY),
    Option("host-memory SIZE", size, HOST_MEMORY),
    Option("tile N", at_least(1), "channels of a tile (default: by the experts' shape)"),
    Option("workers N", at_least(0), WORKERS),
    Option(
        "exchange", get_args(ExchangeName), "how workers get work: sockets or shared memory", takes=ENGINE
    ),
    Option("context N", at_least(1), CONTEXT),
    Option("kv-tokens N", at_least(1), KV_TOKENS),
    Option("kv-dtype", get_args(KvDType), KV_DTYPE),
    Option("chunk N", at_least(1), "prefill tokens of one step (default: measured)"),
    Option("graphs", get_args(GraphsName), "decode steps by CUDA graphs, on a GPU"),
    Option("speculate on|off|N", guesses, SPECULATE, takes=ENGINE),
    of_engine=True,
)
_engine = _section(
    ENGINE,
    Option("link-gbps X[,X]", rates, "emulate a link of X GB/s to the device, or to each"),
    Option("host-slowdown X", between(1.0, math.inf), "emulate workers X times slower"),
    Option("costs FILE", Path, COSTS, also=REPLAY),
    Option("record F", absolute, "record the routing into a new file, for bench --replay"),
    Option("seed S", at_least(0), SEED, also=REPLAY, asked="chat, generate, stress --chaos"),
    Option("keep-store", None, "leave the experts in shared memory for the next start"),
    Option("name NAME", str, "the engine's name (default: e and the process id)"),
    Option("http HOST:PORT", http_address, HTTP, takes="serve", bare=DEFAULT_HTTP),
    Option("http-keys FILE", Path, HTTP_KEYS, takes="serve --http"),
    Option("allowed-origins ORIGIN,...", origins, ORIGINS, takes="serve --http"),
    Option("served-model-name NAME[,NAME]", names, NAMES, takes="serve --http"),
    of_engine=True,
)
_answer = _section(
    "chat, generate",
    Option("max-tokens N", at_least(1), f"new tokens at most (default {MAX_TOKENS})"),
    Option("temperature X", between(0.0, math.inf), TEMPERATURE),
    Option("top-k K", at_least(0), "only the K most probable tokens; 0: all"),
    Option("top-p P", above(0.0, 1.0), "only the most probable tokens, P in all"),
    Option("min-p P", between(0.0, 1.0), "only tokens P times as probable as the best"),
    Option("repetition-penalty X", above(0.0), "divides the logits of tokens that occurred; 1: none"),
    Option("stop T", not_empty, "end before this text; repeatable", repeatable=True),
    Option("ignore-eos", None, "continue after the model's end-of-text token"),
    Option("system T", not_empty, "system message of the chat", takes="chat, generate --chat"),
)
_generate = _section(
    "generate",
    Option("prompt T", str, "text to continue, or with --chat to answer; -: from stdin", one_of="prompt"),
    Option("prompt-tokens 1,2,3", token_ids, "token ids to continue", one_of="prompt", not_with="chat"),
    Option("chat", None, "use the model's chat template, and sample as a chat does"),
)
_texts = _section(
    "score",
    Option("text F", Path, "UTF-8 file", one_of="text", also="calibrate"),
    Option("tokens F.json", Path, "file with a JSON list of token ids", one_of="text", also="calibrate"),
    Option("out F.npy", Path, "write all log-probabilities: float32 [positions, vocab]"),
    Option("stepwise", None, "score one token at a time, by the decode path"),
    Option("items F.jsonl", Path, "items, one JSON object a line (default: built-in ones)", takes="evaluate"),
    Option("limit N", at_least(1), "only the first N items", takes="evaluate"),
)
_stress = _section(
    "stress",
    Option("script F.jsonl", Path, "requests, one JSON object a line (default: built-in ones)"),
    Option("clients C", at_least(1), "clients connected at once (default 8)"),
    Option("repeat N", at_least(1), "repetitions of the script (default 1)"),
    Option("chaos KINDS", str, "inject faults meanwhile: kill, stop, corrupt, separated by commas"),
    Option("chaos-rate R", above(0.0), "faults a second on average (default 1)", takes="stress --chaos"),
)
_bench = _section(
    "bench",
    Option("prompt-len P", at_least(1), "tokens of a prompt (default 128)", also="advise"),
    Option("gen-len G", at_least(2), "new tokens of an answer (default 64)"),
    Option("batch B", at_least(1), "requests at once (default 1)", also="advise"),
    Option("rounds N", at_least(1), "measured runs of each policy (default 5)"),
    Option("ppl-tokens N", at_least(0), PPL),
    Option("plot F.png", Path, "draw the results (also .svg, .pdf)", also=f"{REPLAY} --sweep"),
    Option("sweep NAME=V1,V2", str, SWEEP, also=REPLAY, repeatable=True),
    Option("replay F", Path, REPLAYED, takes=REPLAY),
)
_calibrate = _section(
    "calibrate",
    Option("calibrate-tokens N", at_least(LEAST_TOKENS), f"tokens to read (default {CALIBRATION_TOKENS})"),
    Option("max-loss X", above(0, 1000), "find approximations that add at most X %% to the perplexity"),
)
_advise = _section(
    "advise",
    Option("machine NAME", str, "a known one, such as 4090-pcie4; the other options change its numbers"),
    Option("host-gbps X", above(0.0), "GB/s that all cores read from the host's memory"),
    Option("link-gbps X", above(0.0), "GB/s from the host's memory to the GPU's"),
    Option("gpu-gbps X", above(0.0), "GB/s that the GPU reads from its memory"),
    Option("gpu-gb X", above(0.0), "size of the GPU's memory"),
    Option("host-gb X", above(0.0), "free memory of the host (default: enough)"),
    Option("disk-gbps X", above(0.0), "GB/s that its disk reads, for experts that do not fit into memory"),
    Option("trace F", Path, "routing of this model that --record wrote"),
    Option("seed S", at_least(0), "seed of synthetic routing"),
)
_cache = _section(
    "cache --prune",
    Option("prune", None, "remove what is not in use, by --older-than, --to or both", takes="cache"),
    Option("older-than DAYS", between(0.0, 1e6), "what was last used more than DAYS days ago"),
    Option("to SIZE", size, "the least recently used, until SIZE is left on disk (such as 20GB)"),
    Option("dry-run", None, "only list what would be removed"),
)
_cluster = _section(
    f"{', '.join(f'{command} --cluster' for command in ENGINE.split(', '))}, doctor --cluster",
    Option("cluster HEAD:PORT", head_address, CLUSTER, takes=f"{ENGINE}, doctor"),
    Option("replicas N", at_least(0), REPLICAS),
    Option("host-ports FIRST-LAST", port_range, HOST_PORTS),
    Option("token FILE", Path, TOKEN, also="cluster"),
    of_engine=True,
)
_machines = _section(
    "cluster",
    Option("address IP", ip_address, ADDRESS),
    Option("port N", port, PORT),
    Option("name NAME", machine_name, "the machine's name in the cluster (default: its host name)"),
    Option("foreground", None, "run until a signal, as a service does"),
)
_every = _section(
    EVERYWHERE,
    Option("connect NAME", str, "use a running engine instead of starting one", takes=CLIENTS, bare=""),
    Option("json", None, "print one JSON object on stdout, and nothing else there", takes=JSON),
    Option("log-level", LOG_LEVELS, "least severe messages shown (default notice; info: details of a start)"),
)

# By the headings of --help.
TABLE = {
    "options": _generate + _texts + _stress + _bench + _calibrate + _cache + _machines + _every,
    "answer": _answer,
    "model and memory": _sizes,
    "engine": _engine,
    "several machines": _cluster,
    "a machine (default: this one, on which the model is run for a moment)": _advise,
}
