"""A siege of the gateway: hostile HTTP requests while honest clients go on.

    python -m benchmarks.siege [--requests N] [--seconds S] [--seed I] [--turns T]

Starts `launch.py serve --http` of the embedded model with API keys. Two honest clients ask for short greedy
completions all the time. The siege comes in turns, with quiet ones before, between and after: what is compared
is measured within one run, as other programs of the machine take their share of both. Requests are sent at
N/S a second as far as the gateway keeps up. The attacker is a process of its own, on the same cores. It has a
niceness of 10, the gateway 5, engine and honest clients 0, so that they do not wait for the attacker's own
work. Requests that the engine would compute are at most COMPUTED at once: what they cost others is the engine's
share for each client (docs/serving.md, Many clients), and no matter of doors.

Exits with 1 where a process was restarted, gateway, text process or coordinator keep more than KEPT bytes, the
honest clients have less than half their speed, or an answer of theirs is missing or another one than alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import median

import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.siege_requests import ATTACKS, completion, prepared

LAUNCH = Path(__file__).parents[1] / "launch.py"
MODULES = {
    "gateway": "pipeline.gateway.process",
    "text": "pipeline.text.process",
    "coordinator": "pipeline.coordinator",
    "worker": "workers.expert_worker",
}
WATCHED = ("gateway", "text", "coordinator")
HONEST = 2
TOKENS = 16
PROMPTS = [
    f"{words} {number}" for number in range(4) for words in ("The sea is", "In the beginning", "def f(x):")
]
QUIET_SECONDS = 12.0
AT_ONCE, HELD, COMPUTED = 64, 2500, 2  # connections in use, and held open; requests of the engine
HOLD_SECONDS = 60.0  # at most
PATIENCE = 60.0  # seconds for an answer
PERIOD = 0.25  # seconds between two looks at the processes
KEPT = 100e6
LEFT, CUT, REFUSED, SILENT = "left", "cut", "refused", "silent"  # what becomes of requests without an answer
SOURCES = 8  # addresses that the attacker comes from, 127.0.0.2 and on
Counts = Counter[tuple[str, str]]  # requests by kind, and by status or what else became of them


async def connect(
    port: int, source: str, *, small: bool = False
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Returns a connection. `small`: of one that reads nothing, for which few bytes are taken."""
    bound = socket.socket()
    try:
        bound.setblocking(False)
        if small:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        bound.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT: the port is chosen by connect
        bound.bind((source, 0))
        await asyncio.get_running_loop().sock_connect(bound, ("127.0.0.1", port))
        return await asyncio.open_connection(sock=bound, limit=1 if small else 1 << 20)
    except BaseException:
        bound.close()
        raise


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Returns status and body of the next answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    if (status := int(head[9:12])) < 200:
        return await read_answer(reader)
    if length := re.search(rb"content-length: (\d+)", head):
        return status, await reader.readexactly(int(length[1]))
    return status, await reader.readuntil(b"0\r\n\r\n")


# --- the attacker ---------------------------------------------------------------------------------------


@dataclass
class Attacker:
    """Sends `most` requests within `seconds`, or fewer where the gateway does not keep up."""

    port: int
    most: int
    seconds: float
    random: Random
    variants: dict[str, list[list[bytes]]]
    counts: Counts = field(default_factory=Counter)
    sent: int = 0
    held: int = 0
    computed: int = 0

    async def run(self) -> None:
        """Attack, and end all connections."""
        self._began = time.monotonic()
        self._holding: set[asyncio.Task[None]] = set()
        await asyncio.gather(*(self._go_on() for _ in range(AT_ONCE)))
        for task in self._holding:
            task.cancel()
        await asyncio.gather(*self._holding, return_exceptions=True)

    async def _go_on(self) -> None:
        kinds = list(ATTACKS)
        weights = [attack.share / attack.requests for attack in ATTACKS.values()]
        while self.sent < self.most and (gone := time.monotonic() - self._began) < self.seconds:
            if self.sent > self.most * gone / self.seconds:
                await asyncio.sleep(0.005)
                continue
            kind = self.random.choices(kinds, weights)[0]
            attack = ATTACKS[kind]
            if (attack.computed and self.computed >= COMPUTED) or (
                attack.end == "hold" and self.held >= HELD
            ):
                continue
            self.sent += attack.requests
            self.computed += attack.computed
            self.held += attack.end == "hold"
            task = asyncio.create_task(self._strike(kind))
            if attack.end == "hold":
                self._holding.add(task)
                task.add_done_callback(self._holding.discard)
            else:
                await task

    async def _strike(self, kind: str) -> None:
        """Send what one connection sends, and count what becomes of its requests."""
        attack, rest = ATTACKS[kind], CUT
        left = 0 if attack.turns else attack.requests  # sent, and without an answer
        try:
            reader, writer = await connect(
                self.port, f"127.0.0.{2 + self.random.randrange(SOURCES)}", small=attack.end == "hold"
            )
        except OSError:
            rest = REFUSED
        else:
            try:
                async with asyncio.timeout(PATIENCE):
                    for data in self.random.choice(self.variants[kind]):
                        writer.write(data)
                        if attack.turns:
                            left += 1
                            status, _ = await read_answer(reader)
                            self.counts[kind, str(status)] += 1
                            left -= 1
                    if attack.end == "hold":
                        await asyncio.sleep(HOLD_SECONDS * self.random.random())
                    rest = CUT if attack.end == "read" else LEFT
                    while left and attack.end == "read":
                        status, _ = await read_answer(reader)
                        self.counts[kind, str(status)] += 1
                        left -= 1
            except TimeoutError:
                rest = SILENT
            except asyncio.CancelledError:  # the siege is over
                rest = LEFT
            except (OSError, EOFError, asyncio.LimitOverrunError):
                rest = CUT
            finally:
                writer.transport.abort()
        self.counts[kind, rest] += left
        self.computed -= attack.computed
        self.held -= attack.end == "hold"


_prepared: dict[str, list[list[bytes]]] = {}


def prepare(seed: int, keys: list[str]) -> None:
    """Make this process the attacker's."""
    os.setsid()  # where Linux divides cores by sessions first, it has a share of its own
    os.setpriority(os.PRIO_PROCESS, 0, 10)
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    _prepared.update(prepared(seed, keys))


def attack(port: int, most: int, seconds: float, seed: int) -> tuple[Counts, float]:
    """Run one turn of the siege in this process. Returns what became of its requests, and the seconds of a
    core that it took."""
    began = time.process_time()
    attacker = Attacker(port, most, seconds, Random(seed), _prepared)
    uvloop.run(attacker.run())
    return attacker.counts, time.process_time() - began


# --- the engine and its honest clients ------------------------------------------------------------------


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

    async def ask_once(self, prompt: str) -> None:
        """Ask for one completion."""
        reader, writer = await connect(self.port, "127.0.0.1")
        await self._ask(reader, writer, prompt)
        writer.transport.abort()

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


@dataclass
class Turn:
    """A part of the run, quiet or not, and how the honest clients fared."""

    hostile: int  # requests
    seconds: float
    answers: list[float]
    cpu: dict[str, float]  # seconds, by process
    memory: dict[str, int]  # at its end
    load: float  # programs of the machine that want a core

    @property
    def rate(self) -> float:
        """Returns answers a second."""
        return len(self.answers) / self.seconds


async def besiege(
    port: int, supervisor: int, keys: dict[str, str], options: argparse.Namespace
) -> tuple[list[Turn], Counts, Watch, list[Honest]]:
    """Run all turns. Returns them, what became of the requests, and what was seen."""
    watch, texts, counts, turns = Watch(supervisor), {}, Counter(), []
    honest = [Honest(port, keys[f"honest{number}"], texts) for number in range(HONEST)]
    hostile = [key for name, key in keys.items() if name.startswith("hostile")]
    share, seconds = options.requests // options.turns, options.seconds / options.turns
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        await loop.run_in_executor(pool, prepare, options.seed, hostile)
        async with asyncio.timeout(PATIENCE):
            for prompt in PROMPTS:  # alone
                await honest[0].ask_once(prompt)
        tasks = [asyncio.create_task(client.go_on()) for client in (*honest, watch)]
        for number in range(2 * options.turns + 1):
            watch.look()
            began, cpu, before = (
                time.monotonic(),
                dict(watch.seconds),
                [len(client.answers) for client in honest],
            )
            became: Counts = Counter()
            own = 0.0
            if number % 2:
                seed = options.seed + number
                became, own = await loop.run_in_executor(pool, attack, port, share, seconds, seed)
                counts += became
            else:
                await asyncio.sleep(QUIET_SECONDS)
            watch.look()
            spent = {role: watch.seconds[role] - cpu[role] for role in WATCHED} | {"attacker": own}
            answers = [s for client, n in zip(honest, before, strict=True) for s in client.answers[n:]]
            turn = Turn(
                became.total(),
                time.monotonic() - began,
                answers,
                spent,
                dict(watch.memory),
                os.getloadavg()[0],
            )
            turns.append(turn)
            print(
                f"turn {number + 1}: {turn.hostile} hostile requests, {turn.rate:.1f} honest answers/s",
                flush=True,
            )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return turns, counts, watch, honest


def show(turns: list[Turn], counts: Counts, watch: Watch) -> None:
    """Print what happened as tables."""
    console = Console(width=140)
    table = Table("kind", "requests", "answered", *(LEFT, CUT, REFUSED, SILENT), title="Hostile requests")
    for kind in [*ATTACKS, "all"]:
        became: Counter[str] = Counter()
        for (of, what), number in counts.items():
            if kind in (of, "all"):
                became[what] += number
        answers = ", ".join(f"{what}: {became[what]}" for what in sorted(became) if what.isdigit())
        others = [str(became[what]) for what in (LEFT, CUT, REFUSED, SILENT)]
        table.add_row(kind, str(became.total()), answers, *others)
    console.print(table)
    table = Table("turn", "s", "hostile/s", "honest answers/s", "median s", "longest s", title="Turns")
    for role in WATCHED:
        table.add_column(f"{role}: cores, MB at the end")
    table.add_column("attacker: cores")
    table.add_column("load")
    for number, turn in enumerate(turns, 1):
        times = turn.answers or [float("nan")]
        of_clients = [f"{turn.rate:.1f}", f"{median(times):.3f}", f"{max(times):.2f}"]
        of_roles = [f"{turn.cpu[r] / turn.seconds:.2f}, {turn.memory[r] / 1e6:.0f}" for r in WATCHED]
        cells = [f"{turn.seconds:.0f}", f"{turn.hostile / turn.seconds:.0f}", *of_clients, *of_roles]
        table.add_row(str(number), *cells, f"{turn.cpu['attacker'] / turn.seconds:.2f}", f"{turn.load:.1f}")
    console.print(table)
    table = Table("process", "MB before", "peak", "after", "restarts", title="Memory of their own")
    for role in MODULES:
        figures = ["", "", ""]
        if role in WATCHED:
            memory = (turns[0].memory[role], watch.peak[role], turns[-1].memory[role])
            figures = [f"{bytes_ / 1e6:.0f}" for bytes_ in memory]
        table.add_row(role, *figures, str(watch.restarts(role)))
    console.print(table)


def faults(turns: list[Turn], watch: Watch, honest: list[Honest]) -> Iterator[str]:
    """Yields what did not hold."""
    for role in MODULES:
        if watch.restarts(role):
            yield f"{role}: restarted {watch.restarts(role)} times"
    for role in WATCHED:
        if (more := turns[-1].memory[role] - turns[0].memory[role]) > KEPT:
            yield f"{role}: keeps {more / 1e6:.0f} MB more"
    for client in honest:
        yield from (f"another answer: {text}" for text in client.changed[:3])
        yield from (f"no answer: {text}" for text in client.failed[:3])
    if (kept := kept_speed(turns)) < 0.5:
        yield f"the honest clients keep {kept:.0%} of their speed"


def kept_speed(turns: list[Turn]) -> float:
    """Returns the honest clients' share of speed in the siege's turns, of that in the quiet ones beside."""
    of_pairs = (
        turns[number].rate / ((turns[number - 1].rate + turns[number + 1].rate) / 2)
        for number in range(1, len(turns), 2)
    )
    return median(of_pairs)


def main() -> int:
    """Run the command. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.siege")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=1000.0)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    names = [*(f"honest{number}" for number in range(HONEST)), "hostile0", "hostile1"]
    keys = {name: secrets.token_hex(16) for name in names}
    with serving(keys) as (port, supervisor, log):
        turns, counts, watch, honest = asyncio.run(besiege(port, supervisor, keys, options))
        lines = log.read_text().splitlines()
    show(turns, counts, watch)
    answers = sum(len(client.answers) for client in honest)
    print(
        f"honest answers: {answers}, at {kept_speed(turns):.0%} of their speed; {len(lines)} lines of the log:"
    )
    for line, times in Counter(re.sub(r"\d+", "N", line)[:130] for line in lines).most_common(15):
        print(f"  {times} x {line}")
    found = list(faults(turns, watch, honest))
    print("\n".join(f"FAULT: {fault}" for fault in found) or "all held")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
