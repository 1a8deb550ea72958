"""A siege of the gateway: hostile HTTP requests while honest clients go on.

    python -m benchmarks.siege [--requests N] [--seconds S] [--seed I] [--turns T]

Starts `launch.py serve --http` of the embedded model with API keys. Two honest clients ask for short greedy
completions all the time. The siege comes in turns, with quiet ones before, between and after: what is
compared is measured within one run, as other programs of the machine take their share of both. Requests are
sent at N/S a second as far as the gateway keeps up.

The attacker needs the same cores. It is a process in a session of its own with a niceness of 10 (the
gateway's is 5, that of engine and honest clients 0), so that these do not wait for the attacker's own work;
its cores are in the table. Requests that the engine would compute are at most COMPUTED at once: what they
cost others is the engine's share for each client (docs/serving.md, Many clients), and no matter of doors.

Exits with 1 where a process was restarted, gateway, text process or coordinator keep more than KEPT bytes,
the honest clients have less than half their speed, or an answer of theirs is missing or another one than
alone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.siege.attacker import CUT, LEFT, REFUSED, SILENT, Counts, attack, prepare
from benchmarks.siege.honest import MODULES, WATCHED, Honest, Watch, serving
from benchmarks.siege.requests import ATTACKS

HONEST = 2
QUIET_SECONDS = 12.0
KEPT, LEAST_SPEED = 100e6, 0.5
MOST_NAMED = 6  # lines of a kind


@dataclass
class Turn:
    """A part of the run, quiet or not, and how the honest clients fared."""

    hostile: int  # requests
    seconds: float
    answers: list[float]
    cores: dict[str, float]  # that were taken, by process
    memory: dict[str, int]  # bytes, at its end
    load: float  # programs of the machine that want a core

    @property
    def rate(self) -> float:
        """Returns answers a second."""
        return len(self.answers) / self.seconds


class Siege:
    """A run of the command against one engine. `turns`: quiet ones and others, in turns."""

    def __init__(self, port: int, supervisor: int, keys: dict[str, str], options: argparse.Namespace) -> None:
        texts: dict[str, bytes] = {}
        self.honest = [Honest(port, key, texts) for name, key in keys.items() if name.startswith("honest")]
        self.watch = Watch(supervisor)
        self.turns: list[Turn] = []
        self.counts: Counts = Counter()
        self._port, self._options = port, options
        self._hostile = [key for name, key in keys.items() if name.startswith("hostile")]

    async def run(self) -> None:
        """Run all turns."""
        seed = self._options.seed
        loop = asyncio.get_running_loop()
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            await loop.run_in_executor(pool, prepare, seed, self._hostile)
            await self.honest[0].ask_all()
            tasks = [asyncio.create_task(client.go_on()) for client in self.honest]
            tasks.append(asyncio.create_task(self.watch.go_on()))
            most, seconds = self._options.requests, self._options.seconds
            turns = self._options.turns
            for number in range(turns):
                await self._turn(_quiet())
                bounds = (most // turns, seconds / turns)
                await self._turn(loop.run_in_executor(pool, attack, self._port, *bounds, seed + number))
            await self._turn(_quiet())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _turn(self, attacking: Awaitable[tuple[Counts, float]]) -> None:
        watch = self.watch
        watch.look()
        began, cpu = time.monotonic(), dict(watch.seconds)
        before = [len(client.answers) for client in self.honest]
        became, own = await attacking
        seconds = time.monotonic() - began
        watch.look()
        self.counts += became
        cores = {role: (watch.seconds[role] - cpu[role]) / seconds for role in WATCHED}
        times = [s for client, n in zip(self.honest, before, strict=True) for s in client.answers[n:]]
        cores["attacker"] = own / seconds
        turn = Turn(became.total(), seconds, times, cores, dict(watch.memory), os.getloadavg()[0])
        self.turns.append(turn)
        what = f"turn {len(self.turns)}: {turn.hostile} hostile requests"
        print(f"{what}, {turn.rate:.1f} honest answers/s", file=sys.stderr, flush=True)

    @property
    def kept_speed(self) -> float:
        """Returns the honest clients' share of speed in the siege's turns, of that in the quiet ones
        beside: the median."""
        rates = [turn.rate for turn in self.turns]
        beside = [(before + after) / 2 for before, after in zip(rates[:-2:2], rates[2::2], strict=True)]
        return median(rate / quiet for rate, quiet in zip(rates[1::2], beside, strict=True))

    def faults(self) -> Iterator[str]:
        """Yields what did not hold."""
        for role in MODULES:
            if restarts := self.watch.restarts(role):
                yield f"{role}: restarted {restarts} times"
        for role in WATCHED:
            if (more := self.turns[-1].memory[role] - self.turns[0].memory[role]) > KEPT:
                yield f"{role}: keeps {more / 1e6:.0f} MB more"
        for client in self.honest:
            yield from (f"another answer: {text}" for text in client.changed[:MOST_NAMED])
            yield from (f"no answer: {text}" for text in client.failed[:MOST_NAMED])
        if self.kept_speed < LEAST_SPEED:
            yield f"the honest clients keep {self.kept_speed:.0%} of their speed"


async def _quiet() -> tuple[Counts, float]:
    await asyncio.sleep(QUIET_SECONDS)
    return Counter(), 0.0


def show(siege: Siege) -> None:
    """Print what happened as tables."""
    console, turns = Console(width=130), siege.turns
    table = Table("kind", "requests", "answered", *(LEFT, CUT, REFUSED, SILENT), title="Hostile requests")
    for kind in [*ATTACKS, "all"]:
        became: Counter[str] = Counter()
        for (of, what), number in siege.counts.items():
            if kind in (of, "all"):
                became[what] += number
        answers = ", ".join(f"{what}: {became[what]}" for what in sorted(became) if what.isdigit())
        others = [str(became[what]) for what in (LEFT, CUT, REFUSED, SILENT)]
        table.add_row(kind, str(became.total()), answers, *others)
    console.print(table)
    table = Table(
        "turn", "s", "hostile/s", "honest/s", "median s", "longest s", title="Turns, and cores taken"
    )
    for title in (*turns[0].cores, "load"):
        table.add_column(title)
    for number, turn in enumerate(turns, 1):
        times = turn.answers or [float("nan")]
        of_clients = [f"{turn.rate:.1f}", f"{median(times):.3f}", f"{max(times):.2f}"]
        cores = [f"{cores:.2f}" for cores in turn.cores.values()]
        hostile = f"{turn.hostile / turn.seconds:.0f}"
        table.add_row(str(number), f"{turn.seconds:.0f}", hostile, *of_clients, *cores, f"{turn.load:.1f}")
    console.print(table)
    table = Table("process", "MB before", "peak", "after", "restarts", title="Memory of their own")
    for role in MODULES:
        figures: list[float] = []
        if role in WATCHED:
            figures = [turns[0].memory[role], siege.watch.peak[role], turns[-1].memory[role]]
        cells = [f"{figure / 1e6:.0f}" for figure in figures] or [""] * 3
        table.add_row(role, *cells, str(siege.watch.restarts(role)))
    console.print(table)


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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the engine ends, too
    with serving(keys) as (port, supervisor, log):
        siege = Siege(port, supervisor, keys, options)
        asyncio.run(siege.run())
        lines = log.read_text().splitlines()
    show(siege)
    answers = sum(len(client.answers) for client in siege.honest)
    print(f"{answers} honest answers, at {siege.kept_speed:.0%} of their speed")
    print(f"{len(lines)} lines of the log, most often:")
    for line, times in Counter(re.sub(r"\d+", "N", line)[:100] for line in lines).most_common(MOST_NAMED):
        print(f"  {times} x {line}")
    found = list(siege.faults())
    print("\n".join(f"FAULT: {fault}" for fault in found) or "all held")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
