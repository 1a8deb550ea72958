"""What `llama_cpp.py` compares: an engine's interface, its tasks, and our engine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from launch.bench.run import Timeline
from launch.runtime import find_engine
from protocol.answer import Answer
from protocol.client import Client
from protocol.messages import Sampling

LAUNCH = Path(__file__).parents[1] / "launch.py"
CONTEXT = 1024  # tokens
BATCH = 4  # sequences at most
PREFILL = 512  # tokens of the longest prompt
LOAD_LIMIT = 600.0  # seconds
TANDEM = "tandem"

Ids = list[list[int]]  # [B][tokens]


@dataclass(frozen=True)
class Task:
    """`batch` prompts of `prompt` tokens, then `new` tokens for each."""

    what: str
    batch: int
    prompt: int
    new: int  # 0: measure the prefill

    def __str__(self) -> str:
        return f"{self.what} x {self.batch}" if self.new else f"{self.what} {self.prompt}"

    def ids(self, random: np.random.Generator, length: int, vocabulary: int) -> Ids:
        return random.integers(5, vocabulary, (self.batch, length)).tolist()


@dataclass
class Engine(ABC):
    """A loaded engine."""

    name: str
    facts: dict[str, Any]
    # cores it used while others were measured
    idle: list[float] = field(default_factory=list, init=False)

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """Of its processes that were started here."""

    def cpu_seconds(self) -> float:
        """CPU seconds of its processes so far."""
        own = [psutil.Process(pid) for pid in self.pids]
        family = [*own, *(child for process in own for child in process.children(recursive=True))]
        return sum(sum(process.cpu_times()[:2]) for process in family)

    @abstractmethod
    async def run(self, task: Task, random: np.random.Generator, prompts: Ids) -> dict[str, float]:
        """Run a task; returns `tok_s` and figures of the engine's own."""


class Tandem(Engine):
    """Our engine, through a client."""

    def __init__(self, name: str, pid: int, client: Client, layers: int) -> None:
        welcome = client.welcome
        facts = {"policy": welcome.policy, "format": welcome.format, "backbone_dtype": welcome.backbone_dtype}
        super().__init__(name, facts)
        self._pid, self.client, self._layers = pid, client, layers

    @property
    def pids(self) -> list[int]:
        return [self._pid]

    async def run(self, task: Task, random: np.random.Generator, prompts: Ids) -> dict[str, float]:
        """Also returns the engine's own rate, and the mean experts a layer and rows of a decode step. Rows
        are fewer than the batch where requests start at different times; `tok_s` is of the time when all
        decode.
        """
        per_expert = (await self.client.stats())["tiles_per_expert"]
        sent = time.perf_counter()
        answers = [
            self.client.generate(
                token_ids=prompt,
                # The first token of an answer belongs to the prefill.
                max_tokens=task.new + 1,
                # Random tokens, as for llama.cpp: greedy ones would choose the same experts repeatedly.
                sampling=Sampling(temperature=1.0, seed=int(random.integers(1 << 31))),
                ignore_eos=True,
            )
            for prompt in prompts
        ]
        arrivals = await asyncio.gather(*map(_arrivals, answers))
        line = Timeline(sent, task.prompt, tuple(arrivals))
        ends = [answer.done.stats for answer in answers if answer.done is not None]
        if any(end["kv_reused_tokens"] or end["preemptions"] for end in ends):
            raise SystemExit("the engine reused or preempted KV: the figures cannot be compared")
        if not task.new:
            return {"tok_s": line.prefill_tok_s, "engine_tok_s": median(e["prefill_tok_s"] for e in ends)}
        decode = ends[0]["engine"]["decode"]
        return {
            "tok_s": line.decode_tok_s,
            "engine_tok_s": sum(end["decode_tok_s"] for end in ends),
            "experts": decode["host_tiles"] / per_expert / self._layers / decode["steps"],
            "rows": decode["rows"] / decode["steps"],
        }


async def _arrivals(answer: Answer) -> tuple[float, ...]:
    return tuple([time.perf_counter() async for _ in answer])


@asynccontextmanager
async def tandem(title: str, model: str, layers: int, options: Sequence[str]) -> AsyncIterator[Tandem]:
    """Run our engine, in its own processes, during the block; `options` follow the defaults. Raises
    SystemExit where it does not start."""
    name = f"llama-{os.getpid()}-{len(options)}"
    own = ["serve", "--name", name, "--log-level", "warning", "--model", model, "--context", str(CONTEXT)]
    own += ["--device", "cpu", "--policy", "all-host", "--format", "int4", "--backbone-dtype", "int4"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, LAUNCH, *own, *options), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(LOAD_LIMIT):
            if not await process.stdout.readline():
                raise SystemExit("the engine did not start")
        async with Client.connect(find_engine(name).endpoint, name="llama_cpp") as client:
            yield Tandem(title, process.pid, client, layers)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await process.wait()
