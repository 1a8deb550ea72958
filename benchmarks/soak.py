"""Load and faults for minutes: memory, descriptors and files of an engine must not grow.

    python benchmarks/soak.py --minutes 10 --chaos kill,stop,delay,corrupt --rate 0.3 --clients 4

Prints a table, and one JSON object as the last line. A figure is flat if the median of its last fifth of
samples is not above that of the second fifth by more than a tolerance: the first fifth is warming up.
Resident memory gets no verdict: it counts the store's shared pages in each process that has touched them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

from served import served

from launch.chaos.injector import Injector
from launch.chaos.plan import Chaos
from launch.chaos.pool import wait_recovered
from launch.chaos.processes import usage
from launch.equality import compare, rounding_bound
from launch.runtime import SHM, EngineInfo, segments
from launch.stress.requests import Outcome, Request, ask
from protocol.client import Client
from protocol.messages import Sampling
from shm.store import store_name

EVERY = 10.0  # seconds between samples
MB = 1e6
TOLERANCE = {"mb": (1.05, 8.0), "descriptors": (1.0, 3.0), "count": (1.0, 0.0)}  # factor, then addend
VERDICTS = {True: "flat", False: "GROWS", None: ""}
WHOLE_LIMIT = 60.0  # seconds
PROMPTS = (
    "The harbour was quiet when the last ferry came in, and",
    "What to take on a walk in the mountains:\n\n1. A map\n2. A warm coat\n3.",
    "def main():",
    "A semaphore is",
    "Der Zug nach Lübeck hatte Verspätung, und auf dem Bahnsteig",
)
REQUESTS = [Request(prompt, prompt, None, 48, Sampling()) for prompt in PROMPTS]


class Load:
    """Clients that repeat the same requests while `on`; each answer is compared with that of the request
    alone."""

    def __init__(self, alone: dict[str, Outcome], bound: float) -> None:
        self.on = True
        self.ends: Counter[str] = Counter()
        self.verdicts: Counter[str] = Counter()
        self.tokens = 0
        self._alone, self._bound = alone, bound

    async def client(self, client: Client, number: int) -> None:
        turn = number
        while self.on:
            request = REQUESTS[turn % len(REQUESTS)]
            outcome = await ask(client, request)
            turn += 1
            self.ends[str(outcome.end)] += 1
            self.tokens += len(outcome.tokens)
            if outcome.served:
                found = compare(
                    [s.token for s in outcome.steps], self._alone[request.label].steps, self._bound
                )
                self.verdicts[str(found.verdict)] += 1
            else:
                await asyncio.sleep(1.0)  # without it, requests to a lost engine would follow without a pause


async def soak(minutes: float, chaos: Chaos, clients: int, options: list[str]) -> dict[str, Any]:
    async with served(f"soak-{os.getpid()}", options) as engine, AsyncExitStack() as stack:
        watcher = await stack.enter_async_context(Client.connect(engine.endpoint, name="soak"))
        connected = [
            await stack.enter_async_context(Client.connect(engine.endpoint, name=f"soak {i}"))
            for i in range(clients)
        ]
        welcome = watcher.welcome
        alone = {request.label: await ask(watcher, request) for request in REQUESTS}
        load = Load(alone, rounding_bound(welcome.format, welcome.backbone_dtype))
        runtime = Path(engine.endpoint.removeprefix("ipc://")).parent
        before = await watcher.stats()
        samples: list[dict[str, float]] = []
        injector = Injector(watcher.stats, runtime, chaos)
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group, injector:
            for number, client in enumerate(connected):
                group.create_task(load.client(client, number))
            while time.perf_counter() - began < minutes * 60:
                samples.append(await asyncio.to_thread(sample, engine, runtime, welcome.fingerprint, began))
                await asyncio.sleep(EVERY)
            load.on = False
        seconds = time.perf_counter() - began
        missing = await wait_recovered(watcher.stats, before["peers"], injector.faults, WHOLE_LIMIT)
        after = await watcher.stats()
        return {
            "seconds": seconds,
            "seed": chaos.seed,
            "faults": Counter(f"{fault.kind} {fault.role}" for fault in injector.faults),
            "during_decode": sum(fault.decoding for fault in injector.faults),
            "faults_ended_early": injector.failure,
            "not_whole_at_the_end": missing,
            "requests": sum(load.ends.values()),
            "ends": load.ends,
            "verdicts": load.verdicts,
            "tok_s": load.tokens / seconds,
            "recovery": after["recovery"],
            "malformed": after["malformed"],
            "hostile_messages": sum(injector.hostile.sent.values()),
            "flat": {name: flat(name, [one.get(name, 0.0) for one in samples]) for name in names(samples)},
            "samples": samples,
        }


def sample(engine: EngineInfo, runtime: Path, fingerprint: str, began: float) -> dict[str, float]:
    """The engine's present resources: by role, the sum of its processes; a role's name ends with the unit."""
    found: Counter[str] = Counter()
    for one in usage(engine.pid):
        found["processes count"] += 1
        found[f"{one.role} pss mb"] += one.pss / MB
        found[f"{one.role} rss mb"] += one.rss / MB
        found[f"{one.role} private mb"] += one.private / MB
        found[f"{one.role} descriptors"] += one.descriptors
    found["total pss mb"] = sum(value for name, value in found.items() if name.endswith(" pss mb"))
    own = [*segments(runtime), SHM / store_name(fingerprint).removeprefix("/")]
    found["segments count"] = len(own)
    found["segments mb"] = sum(path.stat().st_size for path in own if path.exists()) / MB
    return {"second": round(time.perf_counter() - began, 1), **{k: round(v, 2) for k, v in found.items()}}


def names(samples: list[dict[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for one in samples for name in one if name != "second"))


def flat(name: str, values: list[float]) -> dict[str, Any]:
    """Medians of the second and the last fifth, and whether the figure is flat."""
    fifth = max(1, len(values) // 5)
    second, last = median(values[fifth : 2 * fifth] or values), median(values[-fifth:])
    factor, more = TOLERANCE[name.rsplit(" ", 1)[1]]
    verdict = None if name.endswith(" rss mb") else last <= second * factor + more
    return {"second": second, "last": last, "max": max(values), "flat": verdict}


def show(found: dict[str, Any]) -> None:
    print(f"{found['seconds']:.0f} s, {found['requests']} requests, {found['tok_s']:.0f} tok/s")
    print(f"ends {dict(found['ends'])}; compared with the same alone: {dict(found['verdicts'])}")
    print(f"faults, seed {found['seed']}: {dict(found['faults'])}; {found['during_decode']} during decode")
    print(f"hostile messages: {found['hostile_messages']}; refused: {found['malformed']}")
    print(f"recovery: {found['recovery']}; missing at the end: {found['not_whole_at_the_end'] or 'nothing'}")
    print(f"{'':28} {'2nd fifth':>10} {'last fifth':>10} {'max':>10}")
    for name, figures in found["flat"].items():
        numbers = " ".join(f"{figures[key]:10.1f}" for key in ("second", "last", "max"))
        print(f"{name:28} {numbers}  {VERDICTS[figures['flat']]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--chaos", default="kill,stop,delay,corrupt")
    parser.add_argument("--rate", type=float, default=0.3, help="faults a second on average")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "options",
        nargs="*",
        default=["--policy", "on-demand", "--device", "cpu"],
        help="of the engine, behind --; a policy with a prefetcher has one to kill",
    )
    arguments = parser.parse_args()
    chaos = Chaos.asked({"chaos": arguments.chaos, "chaos_rate": arguments.rate}, arguments.seed)
    assert chaos is not None  # the options require it
    found = asyncio.run(soak(arguments.minutes, chaos, arguments.clients, arguments.options))
    show(found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
