"""A whole cluster under faults: three emulated machines with Ray, an engine on the first, clients that ask it
without pause, and every fault so many times in random order. A program; needs root and the extra `cluster`:

    python tests/cluster/cluster_drill.py --times 10 --replicas 1

Each answer is compared with that of the same request alone, before the first fault. A fault has passed when
all machines are ready again and every client has got an answer that it asked for later; the next one comes
then. Prints a JSON line for each fault, and at the end the longest wait for a token by fault, and what the
machines have left behind. The exit code is 0 only if no answer differs, fails or is lost, and nothing is
left."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
from emulated_machines import ROOT, Network, address

from launch.equality import Verdict, rounding_bound
from launch.runtime import find_engine
from launch.stress.load import Outcome, Request, alone, ask, judge
from protocol.client import Client
from protocol.messages import Sampling

NAMES = "abc"  # of the machines; the first has Ray's head and the engine
LIMIT = 300.0  # seconds for a command, and for what follows a fault
PROMPTS = ("Once upon a time", "A list is", "The machine said", "In the morning", "def main(", "Two of them")
REQUESTS = [Request(text, text, None, 24, Sampling()) for text in PROMPTS]
# Processes, by words of their command lines.
HOST, WORKER, ACTOR = "pipeline.cluster.host", "workers.expert_worker", "ray::HostActor"
RAYLET, HEAD = "raylet/raylet", "gcs/gcs_server"
LIAISON, COORDINATOR = "launch.cluster.liaison", "pipeline.coordinator"
WATCHER = "launch.cluster.node"

Arrivals = list[float]  # of one client's tokens


class Cluster:
    """The machines, their Ray and the engine. A context manager."""

    def __init__(self, place: Path, options: list[str], replicas: int, room: int = 512 << 20) -> None:
        """`room`: bytes of the /dev/shm of each machine."""
        self.network, self._place = Network(len(NAMES), place, room), place
        self.replicas, self._options = replicas, options
        self._serve: subprocess.Popen[str] | None = None
        self.left: list[str] = []  # what was still there at the end, after all had been told to end

    def __enter__(self) -> Cluster:
        self.network.__enter__()
        try:
            self._run(0, "cluster", "start", "--address", address(0), "--name", NAMES[0])
            for i in range(1, len(NAMES)):
                self.join(i)
            words = "serve", "--name", "drill", "--cluster", address(0), "--replicas", str(self.replicas)
            self._serve = self._launch(0, *words, *self._options)
            assert self._serve.stdout is not None
            assert self._serve.stdout.readline().startswith("drill "), "the engine has not started"
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._serve is not None:
            for child in psutil.Process(self._serve.pid).children():
                child.terminate()
            self._serve.wait(LIMIT)
        for i in reversed(range(len(NAMES))):  # of one that never started there is nothing to end
            self._launch(i, "cluster", "stop").communicate(timeout=LIMIT)
        self.left = [one for i in range(len(NAMES)) for one in self._left(i)]
        self.network.__exit__()

    def join(self, i: int) -> None:
        self._run(i, "cluster", "join", address(0), "--address", address(i), "--name", NAMES[i])

    def try_alone(self, i: int) -> str:
        """Returns why a machine refuses to start the engine's model by itself; "" where it does not."""
        words = "generate", "--prompt-tokens", "1", "--max-tokens", "1", *self._options
        process = self._launch(i, *words, stderr=subprocess.PIPE)
        _, errors = process.communicate(timeout=LIMIT)
        return str(errors).strip().splitlines()[-1] if process.returncode == 2 else ""

    def leave(self, i: int) -> None:
        self._run(i, "cluster", "stop", "--name", NAMES[i])

    def switch_off(self, i: int) -> None:
        """Lose all of a machine but its disk."""
        self.network.switch_off(i)
        shutil.rmtree(self.network.runtime(i))

    def switch_on(self, i: int) -> None:
        self.network.switch_on(i)
        self.join(i)

    def find(self, i: int, word: str) -> list[psutil.Process]:
        """A machine's processes with this word on their command lines."""
        found = []
        for process in psutil.process_iter():
            try:
                here = process.environ().get("XDG_RUNTIME_DIR") == str(self.network.runtime(i))
                if here and word in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def _left(self, i: int) -> list[str]:
        """Returns what runs on a machine, and its shared memory and its engines' and hosts' directories."""
        ours = [f"a process: {word}" for word in ("python", "ray") if self.find(i, word)]
        files = self.network.shared_memory(i), self.network.runtime(i) / "tandem"
        ours += [str(path) for folder in files if folder.exists() for path in folder.iterdir()]
        return [f"{NAMES[i]}: {one}" for one in ours]

    def _run(self, i: int, *arguments: str) -> None:
        process = self._launch(i, *arguments)
        process.communicate(timeout=LIMIT)
        assert process.returncode == 0, (arguments, process.returncode)

    def _launch(self, i: int, *arguments: str, stderr: int | None = None) -> subprocess.Popen[str]:
        own = {f"XDG_{kind}_HOME": str(self._place / f"{kind}{i}") for kind in ("CACHE", "CONFIG")}
        own["XDG_STATE_HOME"] = str(self._place)  # with the token
        return self.network.run(i, sys.executable, str(ROOT / "launch.py"), *arguments, stderr=stderr, **own)


class Faults:
    """What can happen to a cluster, each a coroutine; `i`: the machine, where it is not the first one's."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def nothing(self, i: int) -> None:
        """For comparison."""
        await asyncio.sleep(5)

    async def host_killed(self, i: int) -> None:
        self._kill(i, HOST)

    async def worker_killed(self, i: int) -> None:
        self._kill(i, WORKER)

    async def host_stopped(self, i: int) -> None:
        (host,) = self._cluster.find(i, HOST)
        host.suspend()
        await asyncio.sleep(2)
        host.resume()

    async def actor_killed(self, i: int) -> None:
        self._kill(i, ACTOR)

    async def ray_killed(self, i: int) -> None:
        self._kill(i, RAYLET)

    async def ray_and_host_killed(self, i: int) -> None:
        self._kill(i, RAYLET)
        self._kill(i, HOST)

    async def head_killed(self, i: int) -> None:
        self._kill(0, HEAD)

    async def watcher_killed(self, i: int) -> None:
        """The process that starts Ray again: the machine leaves and joins."""
        self._kill(i, WATCHER)
        await self.left_and_joined(i)

    async def left_and_joined(self, i: int) -> None:
        await asyncio.to_thread(self._cluster.leave, i)
        await asyncio.to_thread(self._cluster.join, i)

    async def liaison_killed(self, i: int) -> None:
        self._kill(0, LIAISON)

    async def coordinator_killed(self, i: int) -> None:
        self._kill(0, COORDINATOR)

    async def cable_pulled(self, i: int) -> None:
        self._cluster.network.cable(i, False)
        await asyncio.sleep(4)
        self._cluster.network.cable(i, True)

    async def cable_loose(self, i: int) -> None:
        for _ in range(5):
            self._cluster.network.cable(i, False)
            await asyncio.sleep(0.1)
            self._cluster.network.cable(i, True)
            await asyncio.sleep(0.2)

    async def machine_off(self, i: int) -> None:
        await asyncio.to_thread(self._cluster.switch_off, i)
        await asyncio.sleep(2)
        await asyncio.to_thread(self._cluster.switch_on, i)

    async def machine_stood_in(self, i: int) -> None:
        """A machine stays away until another one has its part, and comes back to a liaison that has not seen
        that."""
        others = [other for other in range(len(NAMES)) if other != i]

        def hosts() -> int:
            return sum(len(self._cluster.find(other, HOST)) for other in others)

        before = hosts()
        await asyncio.to_thread(self._cluster.switch_off, i)
        await asyncio.sleep(2)
        if not self._cluster.replicas:  # else nobody needs to
            async with asyncio.timeout(LIMIT):
                while await asyncio.to_thread(hosts) == before:  # noqa: ASYNC110 - of other processes
                    await asyncio.sleep(0.5)
            await asyncio.sleep(5)  # it answers
            self._kill(0, LIAISON)
        await asyncio.to_thread(self._cluster.switch_on, i)

    def _kill(self, i: int, word: str) -> None:
        for process in self._cluster.find(i, word):
            process.kill()


class Drill:
    """The clients, and what they have got."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster, self._random = cluster, random.Random(seed)
        self.outcomes: list[list[Outcome]] = []
        self._expected: dict[Request, Outcome] = {}
        self._faults: list[dict[str, Any]] = []
        self._bound = 0.0

    async def run(self, clients: int, times: int, only: str) -> bool:
        """Every fault so many times. False where an answer differs or is lost."""
        endpoint = find_engine("drill").endpoint
        async with Client.connect(endpoint, name="drill", retry=LIMIT) as asking:
            self._bound = rounding_bound(
                *(getattr(asking.welcome, kind) for kind in ("format", "backbone_dtype", "kv_dtype"))
            )
            for request in REQUESTS:
                outcome = await ask(asking, request, LIMIT)
                reference = alone(outcome)
                assert reference is not None, outcome
                self._expected[request] = await ask(asking, reference, LIMIT)
            self.outcomes = [[] for _ in range(clients)]
            everyone = [asyncio.create_task(self._ask(endpoint, mine)) for mine in self.outcomes]
            try:
                await self._all(asking, times, only)
            finally:
                for one in everyone:
                    one.cancel()
                await asyncio.gather(*everyone, return_exceptions=True)
                passed = self._report()
        return passed

    async def _ask(self, endpoint: str, mine: list[Outcome]) -> None:
        chosen = random.Random(self._random.random())
        async with Client.connect(endpoint, name="drill", retry=LIMIT) as client:
            while True:
                mine.append(await ask(client, chosen.choice(REQUESTS), LIMIT))

    async def _all(self, asking: Client, times: int, only: str) -> None:
        faults = Faults(self._cluster)
        known = [name for name in dir(faults) if not name.startswith("_") and only in name]
        order = [(name, 1 + n % (len(NAMES) - 1)) for name in known for n in range(times)]
        self._random.shuffle(order)
        await self._settled(asking, time.perf_counter())
        for name, i in order:
            began = time.perf_counter()
            await getattr(faults, name)(i)
            await self._settled(asking, time.perf_counter())
            fault = {"fault": name, "machine": NAMES[i], "began": began, "ended": time.perf_counter()}
            fault["wait"] = max(longest(arrivals(mine), began, fault["ended"]) for mine in self.outcomes)
            self._faults.append(fault)
            shown = {key: fault[key] for key in ("fault", "machine")}
            shown |= {"wait": round(fault["wait"], 2), "whole again": round(fault["ended"] - began, 1)}
            shown |= {"load": round(os.getloadavg()[0], 1)}
            print(json.dumps(shown | self._wrong()), flush=True)

    async def _settled(self, asking: Client, since: float) -> None:
        """Wait until all is there again, and each client has got an answer that it asked for since then."""

        def answered() -> bool:
            return all(mine and mine[-1].sent > since for mine in self.outcomes)

        def there() -> bool:
            every = all(self._cluster.find(i, word) for i in (1, 2) for word in (HOST, WORKER, ACTOR, RAYLET))
            return every and all(self._cluster.find(0, word) for word in (LIAISON, HEAD, RAYLET))

        async with asyncio.timeout(LIMIT):
            while True:
                if answered() and await self._ready(asking) and await asyncio.to_thread(there):
                    return
                await asyncio.sleep(0.2)

    async def _ready(self, asking: Client) -> bool:
        machines = (await asking.stats()).get("machines", [])
        return len(machines) == len(NAMES) - 1 and all(each["state"] == "ready" for each in machines)

    def _findings(self) -> tuple[list[str], list[str], int]:
        """Returns what differs, what is lost, and how many answers there are."""
        differs, lost, total = [], [], 0
        for outcome in itertools.chain.from_iterable(self.outcomes):
            total += 1
            if not outcome.served:
                lost.append(f"{outcome.end}: {outcome.error}")
                continue
            finding = judge(outcome, self._expected[outcome.request], self._bound)
            if finding.verdict is not Verdict.EQUAL:
                differs.append(str(finding))
        return differs, lost, total

    def _wrong(self) -> dict[str, int]:
        differs, lost, total = self._findings()
        return {"answers": total, "differ": len(differs), "lost": len(lost)}

    def _report(self) -> bool:
        waits = defaultdict(list)
        for fault in self._faults:
            waits[fault["fault"]].append(fault["wait"])
        for name, every in sorted(waits.items()):
            print(f"{name:22} {len(every):3} times, median {statistics.median(every):6.2f} s,", end=" ")
            print(f"at most {max(every):6.2f} s")
        differs, lost, total = self._findings()
        print(f"{len(self._faults)} faults, {total} answers, {len(differs)} differ, {len(lost)} lost")
        print(*differs, *lost, sep="\n")
        return not differs and not lost


def arrivals(outcomes: list[Outcome]) -> Arrivals:
    return [at for outcome in outcomes for at in outcome.arrivals]


def longest(times: Arrivals, began: float, ended: float) -> float:
    """Returns the longest time between two tokens of a client, of those that touch this span."""
    pairs = itertools.pairwise([*times, max(ended, times[-1])])
    return max(after - before for before, after in pairs if after > began and before < ended)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a word in the names of the faults")
    parser.add_argument("--replicas", type=int, default=0)
    parser.add_argument("engine", nargs="*", help="options of serve, behind --")
    asked = parser.parse_args()
    options = asked.engine or ["--tile", "32", "--format", "f32", "--backbone-dtype", "f32", "--chunk", "64"]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    place = Path(tempfile.mkdtemp(prefix="td-", dir="/tmp"))
    try:
        with Cluster(place, options, asked.replicas) as cluster:
            os.environ["XDG_RUNTIME_DIR"] = str(cluster.network.runtime(0))
            passed = asyncio.run(Drill(cluster, asked.seed).run(asked.clients, asked.times, asked.only))
        print(*(f"left: {one}" for one in cluster.left), sep="\n")
        return 0 if passed and not cluster.left else 1
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
