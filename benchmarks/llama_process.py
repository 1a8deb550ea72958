"""llama.cpp in processes of its own: a build that does not crash here, with the settings that are fastest."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.llama_engines import BATCH, CONTEXT, LOAD_LIMIT, PREFILL, Engine, Ids, Task
from benchmarks.llama_environment import Build

DRIVER = Path(__file__).parent / "llama_driver.py"
LLAMA = "llama.cpp"
REPLY_LIMIT = 300.0  # seconds
CRASHES = (signal.SIGSEGV, signal.SIGILL, signal.SIGBUS)
TRIAL_TOKENS = 16  # decoded for each sequence
TRIALS = 2  # of each of two settings

Report = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    threads: int
    repack: bool = True  # the weights, for this CPU's instructions, while loading
    flash: bool = True  # attention
    micro_batch: int = PREFILL  # tokens of a prompt computed at once

    def __str__(self) -> str:
        repacked = "repacked weights" if self.repack else "weights as stored"
        attention = f"flash attention {'on' if self.flash else 'off'}"
        return f"{repacked}, {attention}, micro-batches of {self.micro_batch}, {self.threads} threads"


class Crashed(SystemExit):
    """A signal that means a fault in its code ended llama.cpp. Uncaught, it ends the benchmark."""

    def __init__(self, crash: signal.Signals) -> None:
        super().__init__(f"llama.cpp crashed: {crash.name}")
        self.signal = crash


class Driver:
    """A `llama_driver.py` with a loaded model."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Use `start`."""
        self.process = process
        self.facts: dict[str, Any] = {}

    @classmethod
    async def start(cls, python: Path, model: Path, settings: Settings) -> Driver:
        """Load the model and generate a few tokens. Raises Crashed, SystemExit."""
        options = {"model": str(model), "sequences": BATCH, "context": CONTEXT, "batch": PREFILL}
        process = await asyncio.create_subprocess_exec(
            *(python, "-P", DRIVER, json.dumps(options | {"settings": asdict(settings)})),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        driver = cls(process)
        try:
            driver.facts = await driver._reply(LOAD_LIMIT)
        except BaseException:
            await driver.close()
            raise
        return driver

    async def run(self, settings: Settings, prompts: Ids, tokens: Ids) -> dict[str, float]:
        """Seconds, as the driver says. Raises Crashed, SystemExit."""
        request = {"settings": asdict(settings), "prompts": prompts, "tokens": tokens}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        return await self._reply(REPLY_LIMIT)

    async def close(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    async def _reply(self, limit: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(limit):
            if line := await self.process.stdout.readline():
                return json.loads(line)
            code = await self.process.wait()
        if -code in CRASHES:
            raise Crashed(signal.Signals(-code))
        raise SystemExit("llama.cpp exited; see its output above")


class Llama(Engine):
    """llama.cpp with a model, each task with settings of its own."""

    def __init__(self, python: Path, model: Path, vocabulary: int, threads: int) -> None:
        super().__init__(LLAMA, {})
        self.settings: dict[str, Settings] = {}  # by task
        self.default = Settings(threads)
        self._python, self._model, self._vocabulary = python, model, vocabulary
        self._drivers: dict[bool, Driver] = {}  # by `repack`

    @property
    def pids(self) -> list[int]:
        return [driver.process.pid for driver in self._drivers.values()]

    async def run(self, task: Task, random: np.random.Generator, prompts: Ids) -> dict[str, float]:
        return {"tok_s": await self.rate(task, self.settings[str(task)], random, prompts)}

    async def rate(self, task: Task, settings: Settings, random: np.random.Generator, prompts: Ids) -> float:
        """Tokens a second. Raises Crashed, SystemExit."""
        driver = await self._driver(settings)
        tokens = task.ids(random, task.new, self._vocabulary)
        took = await driver.run(settings, prompts, tokens)
        if task.new:
            return task.batch * task.new / took["decode_s"]
        return task.batch * task.prompt / took["prefill_s"]

    async def choose(self, tasks: Sequence[Task], cores: int, report: Report) -> None:
        """Time each task with several settings, and keep those that are fastest."""
        for task in tasks:
            changes = alternatives(task, self.default.threads, cores)
            best = await fastest(self.default, changes, self._trial(task))
            self.settings[str(task)] = best
            report(f"{LLAMA}, {task}: fastest with {best}")

    async def load(self) -> None:
        """Start what the settings need, and end the rest."""
        needed = {settings.repack: settings for settings in self.settings.values()}
        for repack in self._drivers.keys() - needed.keys():
            await self._drivers.pop(repack).close()
        for settings in needed.values():
            self.facts |= (await self._driver(settings)).facts

    async def close(self) -> None:
        while self._drivers:
            await self._drivers.popitem()[1].close()

    def _trial(self, task: Task) -> Callable[[Settings], Awaitable[float]]:
        random = np.random.default_rng(0)
        short = replace(task, new=min(task.new, TRIAL_TOKENS))

        async def rate(settings: Settings) -> float:
            return await self.rate(short, settings, random, task.ids(random, task.prompt, self._vocabulary))

        return rate

    async def _driver(self, settings: Settings) -> Driver:
        if settings.repack not in self._drivers:
            self._drivers[settings.repack] = await Driver.start(self._python, self._model, settings)
        return self._drivers[settings.repack]


def alternatives(task: Task, threads: int, cores: int) -> list[dict[str, Any]]:
    """Changes of the default settings that may make a task faster: `cores` are fewer than `threads` where
    cores have two threads each."""
    found: list[dict[str, Any]] = [{"repack": False}, {"flash": False}]
    if not task.new:
        found += [{"micro_batch": PREFILL // parts} for parts in (4, 8)]
    return found + ([{"threads": cores}] if cores < threads else [])


async def fastest(
    default: Settings, changes: Sequence[dict[str, Any]], rate: Callable[[Settings], Awaitable[float]]
) -> Settings:
    """Each change stays where it is faster than the settings before it, which are timed in turns with it."""
    best = default
    for change in changes:
        candidate = replace(best, **change)
        rates: dict[Settings, list[float]] = {best: [], candidate: []}
        for _ in range(TRIALS):
            for settings, its in rates.items():
                its.append(await rate(settings))
        best = max(rates, key=lambda settings: max(rates[settings]))
    return best


@asynccontextmanager
async def llama(
    builds: Sequence[Build],
    start: Callable[[Build], Llama],
    setup: Callable[[Llama], Awaitable[None]],
    report: Report,
) -> AsyncIterator[Llama]:
    """The engine of the first build that does not crash in `setup`, during the block. `start` builds
    llama.cpp where it is missing. Raises Crashed where all crash, SystemExit."""
    why = ""
    async with AsyncExitStack() as stack:
        for build in builds:
            engine = start(build)
            stack.push_async_callback(engine.close)
            engine.facts |= {"build": build.name, "fallback": why}
            try:
                await setup(engine)
                break
            except Crashed as crash:
                await engine.close()
                why = f"the build {build.name} ended by {crash.signal.name} in a trial"
                report(f"{LLAMA}: {why}")
                if build == builds[-1]:
                    raise
        yield engine
