"""Measures how fast memory is read and copied here, how fast an engine on the embedded model answers, and how
fast this machine would run a model that need not be there (`launch/forecast.py`).

The last rests on what all cores together read; on what the expert kernel of each format reaches of it, with
the model's own shape and one worker on each core; on the same in the backbone's format, for its products; on
one layer's rest (attention, routing, messages) by a request to the embedded model, whose weights are small.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import astuple, dataclass
from statistics import median
from typing import Any

from launch.bench.profile import PhaseProfile
from launch.command_line.options import Options
from launch.connect import connected
from launch.doctor.machine import Finding
from launch.errors import LaunchError, system_reason
from launch.forecast import Speeds
from launch.processes.cores import Cores
from launch.processes.trials import TrialFailed, trial
from launch.terminal.format import percent, rate
from launch.terminal.interrupts import Interrupts
from launch.terminal.log import notice
from pipeline.assets import model_dir
from pipeline.checkpoint.model_source import ModelSource
from pipeline.config import EngineConfig, FormatName
from pipeline.errors import PipelineError
from pipeline.memory.plan import AUTOMATIC
from pipeline.models.config_keys import Config
from pipeline.models.registry import expert_shape, model_spec
from pipeline.models.shapes import SHAPES
from pipeline.policies.presets import make_policy
from pipeline.policies.view import PolicyRequest
from protocol.errors import ProtocolError
from protocol.program import COMMAND
from shm.errors import ShmError
from shm.layout import StoreLayout, format_named
from shm.segment import SHM_FOLDER, available_memory, byte_size, free_shm_bytes

CHILD = "launch.doctor.child"
STEP, LARGEST = 1 << 26, 1 << 30  # bytes of the buffer: many times what a cache holds
SHARE = 8  # the buffer takes at most 1 / SHARE of the available memory
SECONDS = 0.4  # of each measurement
LIMIT = 60.0  # seconds for a child to start or to end
HUGE_GAIN = 1.1  # of huge pages over small ones, from which on it is reported
BUSY = 0.2  # load average for each core, from which on the figures are too low
SPARSE = PolicyRequest("floe-host")  # of which floe formats are expected, where no sparsity is asked for
PROMPT, TOKENS = "A list is", 32
ANSWER_LIMIT = 120.0  # seconds

log = logging.getLogger("tandem")


# --- what a model's experts weigh ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Reads:
    """Bytes of a model's experts in the default format: all of them, and those that one token reads."""

    name: str
    store: int
    token: int
    layers: int


def embedded() -> Reads:
    """Returns the embedded model's. Raises OSError, ValueError, PipelineError where it is damaged."""
    return _reads("the embedded model", json.loads((model_dir() / "config.json").read_text("utf-8")))


def example() -> Reads:
    """Returns those of a well-known large model."""
    return _reads(f"Mixtral-8x7B ({AUTOMATIC[0]})", SHAPES["mixtral-8x7b"])


def _reads(name: str, config: Config) -> Reads:
    tile_format, spec = format_named(AUTOMATIC[0]), model_spec(config)
    shape = expert_shape(config, None, tile_format)
    layout = StoreLayout(shape, tile_format)
    return Reads(name, layout.total_bytes, shape.layers * spec.top_k * layout.expert_bytes, spec.layers)


# --- memory -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second, medians. `huge`: one core, from huge pages; None where the kernel has none."""

    cores: int
    buffer: int  # bytes
    one: float
    all: float
    copy: float
    huge: float | None

    def to_map(self) -> dict[str, Any]:
        """Returns the figures for JSON; GB are 1e9 bytes."""
        return {
            "read_one_core_gbps": self.one / 1e9,
            "read_all_cores_gbps": self.all / 1e9,
            "read_one_core_huge_pages_gbps": None if self.huge is None else self.huge / 1e9,
            "copy_gbps": self.copy / 1e9,
            "cores": self.cores,
            "buffer_bytes": self.buffer,
        }

    def explain(self, embedded: Reads, example: Reads) -> Iterator[Finding]:
        """Tells what the figures mean for the embedded model and for `example`, a large model."""
        words = f"one core reads {rate(self.one)}"
        words += f", {self.cores} together {rate(self.all)}" * (self.cores > 1)
        means = (
            f"a token of {example.name} reads {byte_size(example.token)} of experts: at most"
            f" {self.all / example.token:.2g} tok/s with all-host; the embedded model's"
            f" {byte_size(embedded.token)}: at most {self.all / embedded.token:,.0f}"
        )
        yield Finding("speed", "ok", words, means)
        if self.huge is not None and self.huge > HUGE_GAIN * self.one:
            means = f"{percent(self.huge / self.one - 1)} more than from the small pages of /dev/shm"
            do = "sudo mount -o remount,huge=within_size /dev/shm"
            words = f"one core reads {rate(self.huge)} from huge pages"
            yield Finding("speed", "note", words, means, do)
        means = "with --device cpu this is the link: the rate at which the prefetcher can move tiles"
        yield Finding("speed", "ok", f"one core copies {rate(self.copy)}", means)


def busy(load: float, cores: int) -> list[Finding]:
    """Returns a note on a load average that makes the figures measured just after it too low."""
    if load < BUSY * cores:
        return []
    words = f"load average {load:.1f} before measuring: other programs are computing"
    means = "the speeds measured here, and what follows from them, are lower than on an idle machine"
    return [Finding("speed", "note", words, means, "close other programs and run this again")]


async def measure_memory(cores: Sequence[int]) -> Bandwidth:
    """Takes a few seconds. Raises TrialFailed where too little memory is available or a child fails."""
    with _buffer() as (fd, size):
        shared = {"fd": fd, "size": size, "seconds": SECONDS}
        alone = shared | {"what": "memory", "cores": [cores[0]], "lo": 0, "hi": size}
        (one, copy, *huge), every = await _readings([alone]), None
        if len(cores) > 1:
            (every,) = await _readings([shared | {"what": "read"} | part for part in _parts(size, cores)])
    return Bandwidth(len(cores), size, one, every or one, copy, huge[0] if huge else None)


def _parts(size: int, cores: Sequence[int]) -> list[dict[str, Any]]:
    """Divides a buffer among cores, of which each is one child's."""
    part = size // len(cores) // 4096 * 4096
    return [{"cores": [core], "lo": i * part, "hi": (i + 1) * part} for i, core in enumerate(cores)]


async def _readings(configs: list[dict[str, Any]]) -> list[float]:
    """Run these children at the same time. Returns the sum of their medians for each kind of work. Raises
    TrialFailed."""
    async with AsyncExitStack() as stack:
        children = [await stack.enter_async_context(trial(CHILD, c, (c["fd"],))) for c in configs]
        for child in children:
            await child.result(LIMIT)
        for child in children:
            await child.go()
        results = [await child.result(LIMIT) for child in children]
    return [sum(map(median, of_kind)) for of_kind in zip(*results, strict=True)]


@contextmanager
def _buffer() -> Iterator[tuple[int, int]]:
    """Yields a nameless file in memory and its size: with the mount options of /dev/shm, where that has
    space. Raises TrialFailed."""
    size = min(LARGEST, available_memory() // SHARE) // STEP * STEP
    if size <= 0:
        raise TrialFailed("too little memory is available to measure")
    fd = -1
    try:
        if free_shm_bytes() > 2 * size:
            fd = os.open(SHM_FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        else:
            fd = os.memfd_create("tandem-doctor")
        os.posix_fallocate(fd, 0, size)
        yield fd, size
    except OSError as e:
        raise TrialFailed(f"no buffer of {byte_size(size)}: {e.strerror}") from e
    finally:
        if fd >= 0:
            os.close(fd)


# --- an engine ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proof:
    """The outcome of a trial run of an engine: its figures for JSON, or its error in one line. `start_s`:
    until it accepted clients, including a first import of torch; `idle_shares`: of decode."""

    device: str
    figures: Mapping[str, Any]
    failure: str = ""

    def to_map(self) -> dict[str, Any]:
        return {"failure": self.failure} if self.failure else dict(self.figures)

    def explain(self) -> Finding:
        """Tells how the engine did, and what waited while it decoded."""
        if self.failure:
            where = "" if self.device == "auto" else f" with --device {self.device}"
            means = "no engine can run on this machine until this is solved"
            do = f"solve the problems above\nshow the engine's log: {COMMAND} doctor --log-level debug"
            words = f"the engine failed{where}: {self.failure}"
            return Finding("engine", "problem", words, means, do, prevents=True)
        words = (
            "an engine started in {start_s:.1f} s and generated {tokens} tokens at {decode_tok_s:,.0f} tok/s"
            " ({policy})".format_map(self.figures)
        )
        means = "the embedded model is so small that a step's overhead exceeds the reading of its experts"
        idle = ", ".join(f"{name} {percent(share)}" for name, share in self.figures["idle_shares"].items())
        return Finding("engine", "ok", words, means + f"\nidle while it decoded: {idle}" * bool(idle))


async def prove(options: Options, interrupts: Interrupts, device: str) -> Proof:
    """Start an engine on the embedded model, on this device (auto: the default) and with the workers of the
    options, and send a request. Errors become `failure`."""
    level = str(options.written.get("log_level", "warning"))
    workers = {name: value for name, value in options.written.items() if name == "workers"}
    engine = Options("generate", {"device": device, "log_level": level} | workers)
    began, before = time.monotonic(), log.level
    log.setLevel(level.upper())
    try:
        async with connected(engine, interrupts) as client:
            start = time.monotonic() - began
            async with asyncio.timeout(ANSWER_LIMIT):
                result = await client.generate(prompt=PROMPT, max_tokens=TOKENS, ignore_eos=True).result()
            stats, policy = result.done.stats, client.welcome.policy
    except TimeoutError:
        return Proof(device, {}, f"no answer within {ANSWER_LIMIT:g} s")
    except OSError as e:
        return Proof(device, {}, system_reason(e))
    except (LaunchError, PipelineError, ProtocolError, ShmError) as e:
        return Proof(device, {}, str(e))
    finally:
        log.setLevel(before)
    return Proof(
        device,
        {
            "start_s": start,
            "first_token_s": stats.get("first_token_s", 0.0),
            "decode_tok_s": stats.get("decode_tok_s", 0.0),
            "tokens": len(result.tokens),
            "policy": policy,
            "idle_shares": dict(PhaseProfile(stats["engine"]["decode"], 0).idle),
        },
    )


# --- a model that need not be there -------------------------------------------------------------------------


async def measure_speeds(
    source: ModelSource, asked: EngineConfig, names: Sequence[str], options: Options, interrupts: Interrupts
) -> Speeds:
    """Takes about ten seconds. `names`: the formats. Raises TrialFailed."""
    notice("measuring how fast this machine would run it: about ten seconds")
    here, load = Cores.here(), os.getloadavg()[0]
    cores = [core for cpus in here.for_workers(here.default_workers()) for core in cpus.cores]
    every = [*names, asked.backbone_dtype]
    kinds = [(name, astuple(expert_shape(source.config, asked.tile, format_named(name)))) for name in every]
    with _buffer() as (fd, size):
        base: dict[str, Any] = {"what": "kernels", "fd": fd, "size": size, "seconds": SECONDS}
        base |= {"left_out": left_out(asked), "experts": kinds}
        reads, *paces = await _readings([base | part for part in _parts(size, cores)])
    proof = await prove(options, interrupts, "cpu")
    if proof.failure:
        raise TrialFailed(proof.failure)
    small = embedded()
    layer = max(0.0, 1 / proof.figures["decode_tok_s"] - small.token / reads) / small.layers
    experts = dict(zip(names, paces, strict=False))
    return Speeds(max(reads, *paces), experts, paces[-1], layer, load, len(cores))


def left_out(asked: EngineConfig) -> float:
    """Returns the share of an expert's channels that a token leaves out in a floe format: the policy's, where
    it has a number, else that of SPARSE."""
    if asked.policy is not None:
        wished = make_policy(PolicyRequest(asked.policy, asked.policy_options), 0).sparsity.wished
        if wished is not None and (wished or "sparsity" in asked.policy_options):
            return wished
    return make_policy(SPARSE, 0).sparsity.wished or 0.0


def explain_speeds(names: Sequence[FormatName], speeds: Speeds) -> list[str]:
    """Tells how expected speeds were measured, in lines."""
    reached = ", ".join(f"{name} {percent(speeds.experts[name] / speeds.memory)}" for name in names)
    return [
        *(f"{finding.found}; {finding.means}" for finding in busy(speeds.load, speeds.cores)),
        f"Measured here just now: all cores read up to {rate(speeds.memory)}; the expert kernels reach"
        f" {reached} of that, the backbone {percent(speeds.backbone / speeds.memory)}; the rest of a"
        f" layer takes {1e3 * speeds.layer:.2g} ms.",
    ]
