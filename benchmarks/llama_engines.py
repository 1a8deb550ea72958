"""The two engines that `llama_cpp.py` compares, each in its own processes, behind one interface."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
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

DRIVER = Path(__file__).parent / "llama_driver.py"
LAUNCH = Path(__file__).parents[1] / "launch.py"
CONTEXT = 1024  # tokens
BATCH = 4  # sequences at most
PREFILL = 512  # tokens of the longest prompt
LOAD_LIMIT, REPLY_LIMIT = 600.0, 300.0  # seconds
TANDEM, LLAMA = "tandem", "llama.cpp"

Ids = list[list[int]]  # [B][tokens]


@dataclass(frozen=True)
class Task:
    """`batch` prompts of `prompt` tokens, then `new` tokens for each."""

    what: str
    batch: int
    prompt: int
    new: int  # 0: measure the prefill

    def ids(self, random: np.random.Generator, length: int, vocabulary: int) -> Ids:
        return random.integers(5, vocabulary, (self.batch, length)).tolist()


@dataclass
class Engine(ABC):
    """A loaded engine."""

    name: str
    pid: int
    facts: dict[str, Any]
    idle: list[float] = field(default_factory=list)  # cores it used while the other engine was measured

    def cpu_seconds(self) -> float:
        """CPU seconds of its processes so far."""
        family = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in family)

    @abstractmethod
    async def run(self, task: Task, random: np.random.Generator, prompts: Ids) -> dict[str, float]:
        """Run a task; returns `tok_s` and figures of the engine's own."""


class Llama(Engine):
    """llama.cpp, through its driver process."""

    def __init__(self, process: asyncio.subprocess.Process, facts: dict[str, Any], vocabulary: int) -> None:
        super().__init__(LLAMA, process.pid, facts)
        self._process, self._vocabulary = process, vocabulary

    async def run(self, task: Task, random: np.random.Generator, prompts: Ids) -> dict[str, float]:
        request = {"prompts": prompts, "tokens": task.ids(random, task.new, self._vocabulary)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        took = await _line(self._process, REPLY_LIMIT)
        if task.new:
            return {"tok_s": task.batch * task.new / took["decode_s"]}
        return {"tok_s": task.batch * task.prompt / took["prefill_s"]}


class Tandem(Engine):
    """Our engine, through a client."""

    def __init__(self, pid: int, client: Client, layers: int) -> None:
        welcome = client.welcome
        facts = {"policy": welcome.policy, "format": welcome.format, "backbone_dtype": welcome.backbone_dtype}
        super().__init__(TANDEM, pid, facts)
        self._client, self._layers = client, layers

    async def run(self, task: Task, random: np.random.Generator, prompts: Ids) -> dict[str, float]:
        """Also returns the engine's own rate, and the mean experts a layer and rows of a decode step. Rows
        are fewer than the batch where requests start at different times; `tok_s` is of the time when all
        decode.
        """
        per_expert = (await self._client.stats())["tiles_per_expert"]
        sent = time.perf_counter()
        answers = [
            self._client.generate(
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


async def _line(process: asyncio.subprocess.Process, limit: float) -> dict[str, Any]:
    assert process.stdout is not None
    async with asyncio.timeout(limit):
        if line := await process.stdout.readline():
            return json.loads(line)
    raise SystemExit("llama.cpp exited; see its output above")


@asynccontextmanager
async def llama(python: Path, gguf: Path, threads: int, vocabulary: int) -> AsyncIterator[Llama]:
    """Run llama.cpp with this model during the block. Raises SystemExit where it does not load."""
    options = {
        "model": str(gguf),
        "threads": threads,
        "sequences": BATCH,
        "context": CONTEXT,
        "batch": PREFILL,
    }
    process = await asyncio.create_subprocess_exec(
        *(python, "-P", DRIVER, json.dumps(options)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Llama(process, await _line(process, LOAD_LIMIT), vocabulary)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def tandem(model: str, layers: int, options: list[str]) -> AsyncIterator[Tandem]:
    """Run our engine, in its own processes, during the block; `options` follow the defaults. Raises
    SystemExit where it does not start."""
    name = f"llama-{os.getpid()}"
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
            yield Tandem(process.pid, client, layers)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await process.wait()
