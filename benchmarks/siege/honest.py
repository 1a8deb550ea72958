"""The engine of a siege, its honest clients, and what its processes take."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.siege.attacker import PATIENCE, connect, read_answer
from benchmarks.siege.requests import completion

LAUNCH = Path(__file__).parents[2] / "launch.py"
MODULES = {
    "gateway": "pipeline.gateway.process",
    "text": "pipeline.text.process",
    "coordinator": "pipeline.coordinator",
    "worker": "workers.expert_worker",
}
WATCHED = ("gateway", "text", "coordinator")
TOKENS = 16
PROMPTS = [
    f"{words} {number}" for number in range(4) for words in ("The sea is", "In the beginning", "def f(x):")
]
PERIOD = 0.25  # seconds between two looks at the processes


class Watch:
    """The engine's processes: their memory and processor time, and how many there have been."""

    def __init__(self, supervisor: int) -> None:
        self._supervisor = psutil.Process(supervisor)
        self.seen: dict[str, set[int]] = {role: set() for role in MODULES}  # ids of processes
        self.memory: dict[str, int] = {}  # bytes of its own, now
        self.peak: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self.look()
        self._first = {role: len(ids) for role, ids in self.seen.items()}

    def look(self) -> None:
        """Note what there is now."""
        for child in self._supervisor.children(recursive=True):
            try:
                words = child.cmdline()
                role = next((role for role, module in MODULES.items() if module in words), None)
                if role is None:
                    continue
                memory, times = child.memory_info(), child.cpu_times()
            except psutil.Error:
                continue
            self.seen[role].add(child.pid)
            if role in WATCHED:
                self.memory[role] = memory.rss - memory.shared
                self.peak[role] = max(self.peak[role], self.memory[role])
                self.seconds[role] = times.user + times.system

    def restarts(self, role: str) -> int:
        """Returns how many more processes of a role there have been than at first."""
        return len(self.seen[role]) - self._first[role]

    async def go_on(self) -> None:
        """Look again and again."""
        while True:
            self.look()
            await asyncio.sleep(PERIOD)


@dataclass
class Honest:
    """A client that asks for one completion after the other."""

    port: int
    key: str
    texts: dict[str, bytes]  # answers that are known, by prompt
    answers: list[float] = field(default_factory=list)  # seconds that each has taken
    changed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    async def go_on(self) -> None:
        """Ask until cancelled, by a connection that stays."""
        while True:
            try:
                reader, writer = await connect(self.port, "127.0.0.1")
                try:
                    while True:
                        for prompt in PROMPTS:
                            await self._ask(reader, writer, prompt)
                finally:
                    writer.transport.abort()
            except (OSError, EOFError, TimeoutError) as e:
                self.failed.append(repr(e))
                await asyncio.sleep(0.1)

    async def ask_all(self) -> None:
        """Ask for each completion once, and so learn it."""
        reader, writer = await connect(self.port, "127.0.0.1")
        for prompt in PROMPTS:
            await self._ask(reader, writer, prompt)
        writer.transport.abort()
        self.answers.clear()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, prompt: str) -> None:
        began = time.monotonic()
        writer.write(completion(self.key, prompt=prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True))
        async with asyncio.timeout(PATIENCE):
            status, body = await read_answer(reader)
        if status != 200:
            self.failed.append(f"{status} {body[:200]!r}")
            return
        text = json.loads(body)["choices"][0]["text"].encode()
        if self.texts.setdefault(prompt, text) != text:
            self.changed.append(f"{prompt!r}: {text!r} instead of {self.texts[prompt]!r}")
        self.answers.append(time.monotonic() - began)


@contextmanager
def serving(keys: dict[str, str]) -> Iterator[tuple[int, int, Path]]:
    """An engine. Yields its port, its supervisor's process id, and its log."""
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "keys"), Path(folder, "log")
        file.touch(0o600)
        file.write_text("".join(f"{name} {key}\n" for name, key in keys.items()))
        words = ("serve", "--http", "127.0.0.1:0", "--http-keys", file, "--name", f"siege-{os.getpid()}")
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, LAUNCH, *words], stdout=subprocess.PIPE, stderr=output
            )
        try:
            assert process.stdout is not None
            process.stdout.readline()
            found = re.search(r"HTTP is served at \S+:(\d+)", log.read_text())
            if found is None:
                raise SystemExit(f"the engine did not start:\n{log.read_text()}")
            yield int(found[1]), process.pid, log
        finally:
            process.terminate()
            process.wait(60)
