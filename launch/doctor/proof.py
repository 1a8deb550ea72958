"""A trial run: an engine on the embedded model starts, answers and stops, as the command line starts it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from launch.bench.profile import PhaseProfile
from launch.command_line.options import Options
from launch.connect import connected
from launch.doctor.finding import Finding, Topic
from launch.errors import LaunchError
from launch.terminal.format import percent
from launch.terminal.interrupts import Interrupts
from pipeline.errors import PipelineError
from protocol.errors import ProtocolError
from protocol.program import COMMAND
from shm.errors import ShmError

TOPIC = Topic("engine")
PROMPT = "A list is"
TOKENS = 32
ANSWER_LIMIT = 120.0  # seconds
WITHOUT_WORKERS = (
    "start engines with --workers 0: the coordinator computes the experts itself, 1.05 to 1.25 times as fast"
    " with experts of usual size, 1.3 to 1.6 times with the embedded model; a crash there restarts"
    " the whole engine"
)

log = logging.getLogger("tandem")


@dataclass(frozen=True)
class Proof:
    """The outcome of a trial run; `failure`: its error in one line, or ""."""

    device: str
    failure: str = ""
    start: float = 0.0  # seconds until it accepted clients, including a first import of torch
    tokens: int = 0
    first: float = 0.0  # seconds to the first token
    rate: float = 0.0  # tokens a second after it
    policy: str = ""
    idle: Mapping[str, float] = field(default_factory=dict)  # shares of decode, as of PhaseProfile

    def to_map(self) -> dict[str, Any]:
        if self.failure:
            return {"failure": self.failure}
        return {
            "start_s": self.start,
            "first_token_s": self.first,
            "decode_tok_s": self.rate,
            "tokens": self.tokens,
            "policy": self.policy,
            "idle_shares": dict(self.idle),
        }


async def prove(options: Options, interrupts: Interrupts, device: str) -> Proof:
    """Start an engine on this device (auto: the default), with the workers of the options, and send a
    request. Errors become `failure`."""
    level = str(options.written.get("log_level", "warning"))
    workers = {name: value for name, value in options.written.items() if name == "workers"}
    engine = Options("generate", {"device": device, "log_level": level} | workers)
    began = time.monotonic()
    try:
        with _quiet(level):
            async with connected(engine, interrupts) as client:
                start = time.monotonic() - began
                async with asyncio.timeout(ANSWER_LIMIT):
                    result = await client.generate(prompt=PROMPT, max_tokens=TOKENS, ignore_eos=True).result()
                stats, policy = result.done.stats, client.welcome.policy
    except TimeoutError:
        return Proof(device, f"no answer within {ANSWER_LIMIT:g} s")
    except OSError as e:
        where = f"{e.filename}: " if e.filename else ""
        return Proof(device, f"{where}{e.strerror or e}")
    except (LaunchError, PipelineError, ProtocolError, ShmError) as e:
        return Proof(device, str(e))
    first, rate = (float(stats.get(key, 0.0)) for key in ("first_token_s", "decode_tok_s"))
    decode = PhaseProfile(stats["engine"]["decode"], 0)
    return Proof(device, "", start, len(result.tokens), first, rate, policy, decode.idle)


@contextmanager
def _quiet(level: str) -> Iterator[None]:
    """Hide the engine's log lines within the block, unless --log-level asks for them."""
    before = log.level
    log.setLevel(level.upper())
    try:
        yield
    finally:
        log.setLevel(before)


def explain_idle(proof: Proof) -> Iterator[Finding]:
    """Tells what waited while the engine decoded, as /why does of an answer."""
    shares = ", ".join(f"{name} {percent(share)}" for name, share in proof.idle.items())
    if "GPU" in proof.idle:
        means = "by the GPU's own clock, and of a small model; /why in the chat has the shares of each answer"
        yield TOPIC.ok(f"idle while it decoded: {shares} of the time", means)
    elif proof.idle:
        means = "the coordinator computes all else meanwhile; no GPU and no link to one is in use"
        yield TOPIC.ok(f"idle while it decoded: {shares} of the time", means)


def explain(proof: Proof, ceiling: float | None, fits_cache: bool) -> Finding:
    """`ceiling`: tokens a second by the host's memory bandwidth."""
    if proof.failure:
        where = "" if proof.device == "auto" else f" with --device {proof.device}"
        means = "no engine can run on this machine until this is solved"
        do = f"solve the problems above\nshow the engine's log: {COMMAND} doctor --log-level debug"
        found = f"the engine failed{where}: {proof.failure}"
        return TOPIC.problem(found, means, do, prevents=True)
    found = (
        f"an engine started in {proof.start:.1f} s and generated {proof.tokens} tokens "
        f"at {proof.rate:,.0f} tok/s ({proof.policy})"
    )
    means = "the embedded model is so small that the overhead of a step exceeds the reading of its experts"
    if ceiling is not None and not fits_cache and proof.rate:
        means = f"{percent(proof.rate / ceiling)} of the bound given by memory bandwidth"
    if proof.policy == "all-host":  # no GPU: the coordinator only waits while the workers compute
        return Finding(TOPIC.name, "ok", found, means, WITHOUT_WORKERS)
    return TOPIC.ok(found, means)
