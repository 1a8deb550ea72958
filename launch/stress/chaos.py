"""Faults of a stress run: an injector that causes them in a running engine of this machine at random times,
and the engine's recovery.

    injector = Injector(client.stats, runtime, Chaos(("kill",), rate=2.0, seed=7))
    await injector.begin()
    async with injector:
        ...                                   # requests
    await injector.recover()
    injector.faults                           # the faults with their times

Times, kinds, processes and frames follow from the seed; the engine's state at those times does not, so two
runs of one seed are similar and never identical.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import psutil

from launch.errors import WrongUsage
from launch.processes.children import MODULES
from launch.runtime import running_engines
from launch.stress.hostile import HostileClient
from launch.stress.load import Outcome
from pipeline.policies.options import did_you_mean
from protocol.errors import ProtocolError

KINDS = (
    "kill",  # a process of the engine is killed
    "stop",  # one is stopped for good, and must be replaced
    "corrupt",  # a client sends hostile messages to every socket
)
SIGNALS = ("kill", "stop")  # sent to a process
TARGETS = ("worker", "prefetcher", "reader", "text", "gateway", "coordinator")  # all but the supervisor
RATE = 1.0
STARTING_SHARE = 0.1  # of these faults, meet a process in its start: more would let none end its start
COORDINATOR_SHARE = 0.02  # of the others: at each all processes are restarted, for seconds
COORDINATOR_SECONDS = 10.0  # that it has answered before it is hit: or the engine would only start
GATEWAY_SECONDS = 3.0  # after which it counts as started
PATIENCE = 0.2  # seconds for the coordinator to answer
BURST = 100  # hostile messages to each socket
RECOVERY_LIMIT = 60.0  # seconds from the load's end until all peers are up

StatsOf = Callable[[], Awaitable[dict[str, Any]]]


def runtime_of(endpoint: str) -> Path:
    """The runtime directory of the engine at this endpoint."""
    return Path(endpoint.removeprefix("ipc://")).parent


def supervisor_of(runtime: Path) -> int:
    """The process id of the supervisor of the engine in this directory. Raises WrongUsage without one."""
    for engine in running_engines():
        if engine.name == runtime.name:
            return engine.pid
    raise WrongUsage(f"no engine is running in {runtime}")


def _children(supervisor: int) -> Iterator[tuple[str, psutil.Process]]:
    """The running children of this supervisor, with their roles. psutil signals no other process that has a
    child's id later."""
    for process in psutil.Process(supervisor).children():
        with suppress(psutil.Error):  # it has exited
            words = process.cmdline()
            for role in TARGETS:
                if MODULES[role] in words:
                    yield role, process


@dataclass(frozen=True)
class Chaos:
    """`rate` faults a second on average, each of a kind drawn uniformly from `kinds`; `roles`: of the
    processes that get signals."""

    kinds: tuple[str, ...]
    rate: float = RATE
    seed: int = 0
    roles: tuple[str, ...] = TARGETS

    @classmethod
    def asked(cls, written: dict[str, Any], seed: int) -> Chaos | None:
        """Return what --chaos and --chaos-rate ask for; None without --chaos. Raises WrongUsage."""
        if "chaos" not in written:
            return None
        kinds = tuple(dict.fromkeys(kind.strip() for kind in written["chaos"].split(",")))
        for kind in kinds:
            if kind not in KINDS:
                near = did_you_mean(kind, KINDS)
                raise WrongUsage(f"--chaos: unknown kind {kind!r}{near} ({', '.join(KINDS)})")
        return cls(kinds, written.get("chaos_rate", RATE), seed)


@dataclass(frozen=True)
class Fault:
    """One injected fault. `at`: seconds of `time.perf_counter`."""

    kind: str
    at: float
    decoding: bool  # requests were running
    role: str = "client"  # of the process; of hostile messages, their sender's
    pid: int = 0


class Injector:
    """Injects faults during its block, into this engine's processes alone; at the end stopped ones resume."""

    def __init__(self, stats: StatsOf, runtime: Path, chaos: Chaos, *, supervisor: int | None = None) -> None:
        """`stats`: as `Client.stats`. Raises WrongUsage where no engine runs in `runtime`."""
        self.chaos = chaos
        self.faults: list[Fault] = []
        self.missed = 0  # faults without a process that was up
        self.failure = ""  # why it ended early
        self.before: dict[str, Any] = {}  # the engine's counters
        self.after: dict[str, Any] = {}
        self.recovered_after: float | None = None  # seconds from the load's end
        self.missing: list[str] = []  # a line for each peer that was not up then
        self.hostile = HostileClient(runtime, chaos.seed)
        self._stats = stats
        self._supervisor = supervisor_of(runtime) if supervisor is None else supervisor
        self._random = Random(chaos.seed)
        self._killed: set[int] = set()  # process ids
        self._asked: asyncio.Future[dict[str, Any]] | None = None  # a Stats without an answer so far
        self._silent_at = time.monotonic()  # when the coordinator did not answer
        self._stopped: dict[int, psutil.Process] = {}  # by this injector
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Injector:
        self._task = asyncio.create_task(self._run(), name="fault injector")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        if self._asked is not None:
            self._asked.cancel()
            await asyncio.wait([self._asked])
        await self.hostile.close()
        if not self._task.cancelled():
            self._task.result()

    async def _run(self) -> None:
        try:
            await self._inject_forever()
        except ProtocolError as e:  # the engine has ended; the load's outcomes tell whether it failed
            self.failure = str(e)
        finally:
            for process in self._stopped.values():
                with suppress(psutil.NoSuchProcess):
                    process.resume()

    async def _inject_forever(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += self._random.expovariate(self.chaos.rate)
            await asyncio.sleep(max(0.0, due - loop.time()))
            stats = await self._look()
            kind = self._random.choice(self.chaos.kinds)
            # Both always drawn: later draws do not depend on the engine's state.
            draws = self._random.random(), self._random.random()
            decoding = stats is not None and stats["scheduler"]["running"] > 0
            if kind in SIGNALS:
                self._signal(kind, decoding, stats, *draws)
            else:
                self.faults.append(Fault(kind, time.perf_counter(), decoding))
                for socket in self.hostile.sockets():
                    await self.hostile.burst(socket, BURST)
                due = loop.time()  # faults that fell due during a long burst are skipped

    async def _look(self) -> dict[str, Any] | None:
        """Returns the engine's state; None while its coordinator does not answer, because it restarts."""
        patience = 0.0
        if self._asked is None:
            self._asked, patience = asyncio.ensure_future(self._stats()), PATIENCE
        await asyncio.wait((self._asked,), timeout=patience)
        if not self._asked.done():
            self._silent_at = time.monotonic()
            return None
        answered, self._asked = self._asked, None
        return answered.result()

    def _signal(
        self, kind: str, decoding: bool, stats: dict[str, Any] | None, luck: float, choice: float
    ) -> None:
        """`luck` draws among groups of processes, `choice` within one; both from 0 to 1."""
        self._stopped = {pid: process for pid, process in self._stopped.items() if process.is_running()}
        targets = self._targets(kind, stats, luck)
        if not targets:
            self.missed += 1
            return
        role, process = targets[int(choice * len(targets))]
        fault = Fault(kind, time.perf_counter(), decoding, role, process.pid)
        try:
            if kind == "kill":
                self._killed.add(process.pid)
                process.kill()
            else:
                self._stopped[process.pid] = process  # before the signal, so that it is resumed in any case
                process.suspend()
        except psutil.NoSuchProcess:
            self.missed += 1
            return
        self.faults.append(fault)

    def _targets(
        self, kind: str, stats: dict[str, Any] | None, luck: float
    ) -> list[tuple[str, psutil.Process]]:
        """Those that are up, or in STARTING_SHARE of all cases those that are not, where there are any. Or
        the coordinator, which is left alone until it has answered for a while. None was killed here before;
        one that was stopped may still be killed."""
        peers = [] if stats is None else [*stats["peers"], stats["text"]]
        up = {peer["pid"] for peer in peers if peer["up"]}
        groups: dict[str, list[tuple[str, psutil.Process]]] = {"up": [], "starting": [], "coordinator": []}
        for role, process in _children(self._supervisor):
            done = self._killed if kind == "kill" else self._killed | self._stopped.keys()
            if role not in self.chaos.roles or process.pid in done:
                continue
            if role == "coordinator":
                if time.monotonic() > self._silent_at + COORDINATOR_SECONDS:
                    groups["coordinator"].append((role, process))
            elif role == "gateway":
                old = time.time() - process.create_time() > GATEWAY_SECONDS
                groups["up" if old else "starting"].append((role, process))
            elif process.pid in up or process.pid in self._stopped:
                groups["up"].append((role, process))
            elif role != "text":  # whose start takes seconds
                groups["starting"].append((role, process))
        if luck > 1 - COORDINATOR_SHARE:
            return groups["coordinator"]
        return (luck < STARTING_SHARE and groups["starting"]) or groups["up"]

    async def begin(self) -> None:
        """Read the engine's state. Raises WrongUsage without processes for these faults, ProtocolError."""
        self.before = await self._stats()
        if not self.before["peers"] and (needing := [kind for kind in self.chaos.kinds if kind in SIGNALS]):
            raise WrongUsage(
                f"--chaos {','.join(needing)}: this engine has neither workers nor a prefetcher; start one"
                " with --workers"
            )

    async def recover(self) -> None:
        """Wait until all peers are up, and read the engine's state again. Raises ProtocolError."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.missing = await wait_recovered(self._stats, self.before["peers"], self.faults, RECOVERY_LIMIT)
        if not self.missing:
            self.recovered_after = loop.time() - began
        self.after = await self._stats()

    @property
    def unrecovered(self) -> list[str]:
        """A line for each peer that did not recover, and for an injector that ended early."""
        return [*self.missing, *([f"faults ended early: {self.failure}"] if self.failure else [])]

    def report(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """Times are seconds."""
        kills = [fault for fault in self.faults if fault.kind == "kill"]
        waits = _next_tokens(kills, outcomes)
        restarted = any(fault.role == "coordinator" for fault in self.faults)
        before = {} if restarted else self.before.get("recovery", {})
        return {
            "kinds": list(self.chaos.kinds),
            "seed": self.chaos.seed,
            "faults": _by_role(self.faults),
            "total": len(self.faults),
            "during_decode": sum(fault.decoding for fault in self.faults),
            "kills_during_decode": sum(fault.decoding for fault in kills),
            "hostile_messages": {"sent": dict(self.hostile.sent), "answered": self.hostile.answered},
            "malformed": _malformed(self.after),
            "kill_to_every_next_token_s": {
                "median": median(waits) if waits else None,
                "max": max(waits, default=None),
            },
            "kills_measured": len(waits),  # during an answer that went on
            "missed": self.missed,
            "respawns": {  # in the life of the coordinator at the end
                role: times["deaths"] - before.get(role, {"deaths": 0})["deaths"]
                for role, times in self.after.get("recovery", {}).items()
            },
            "recovery": self.after.get("recovery"),
            "whole_after_s": self.recovered_after,
        }


async def wait_recovered(
    stats: StatsOf, before: list[dict[str, Any]], faults: list[Fault], limit: float
) -> list[str]:
    """Wait until each peer of `before` is up, and no killed process, `limit` seconds at most. Returns a line
    for each that is not."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    killed = {fault.pid for fault in faults if fault.kind == "kill"}
    while True:
        peers = (await stats())["peers"]
        up = {(p["role"], p["index"]) for p in peers if p["up"] and p["pid"] not in killed}
        known = dict.fromkeys((p["role"], p["index"]) for p in [*before, *peers])
        missing = [
            f"{role} {index} is not up {limit:g} s after the load"
            for role, index in known
            if (role, index) not in up
        ]
        if not missing or loop.time() > began + limit:
            return missing
        await asyncio.sleep(0.05)


def _malformed(stats: dict[str, Any]) -> dict[str, int]:
    """Messages that the coordinator's sockets refused, by the peers' role."""
    clients = {"client": stats["clients"]["malformed"]} if "clients" in stats else {}
    return {**stats.get("malformed", {}), **clients}


def _by_role(faults: Iterable[Fault]) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for fault in faults:
        counts[fault.kind][fault.role] += 1
    return {kind: dict(counts[kind]) for kind in KINDS if kind in counts}


def _next_tokens(kills: Iterable[Fault], outcomes: Sequence[Outcome]) -> list[float]:
    """Returns the seconds from each kill to the next token of the last of the answers in progress: those with
    a token before the kill and one after it, which may have been computed before it."""
    waits = []
    for kill in kills:
        in_progress = [
            next(at - kill.at for at in outcome.arrivals if at > kill.at)
            for outcome in outcomes
            if outcome.arrivals and outcome.arrivals[0] <= kill.at < outcome.arrivals[-1]
        ]
        if in_progress:
            waits.append(max(in_progress))
    return waits
