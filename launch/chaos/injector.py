"""The fault injector: causes faults in a running engine of this machine at random times.

    async with Injector(client.stats, runtime, Chaos(("kill",), rate=2.0, seed=7)) as injector:
        ...                                   # requests
    injector.faults                           # the faults with their times

Times, kinds, processes and frames follow from the seed; the engine's state at those times does not, so
two runs of one seed are similar and never identical.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from launch.chaos.hostile_client import HostileClient
from launch.chaos.processes import PidHandle, supervisor_of
from launch.errors import WrongUsage
from pipeline.policies.options import did_you_mean
from protocol.errors import ProtocolError

KINDS = (
    "kill",  # a worker or the prefetcher is killed
    "stop",  # one of them is stopped for good, and must be replaced
    "delay",  # one of them is stopped for a moment
    "corrupt",  # a client sends hostile messages to every socket
)
SIGNALS = ("kill", "stop", "delay")  # sent to a worker or the prefetcher
RATE = 1.0


@dataclass(frozen=True)
class Chaos:
    """`rate` faults a second on average, each of a kind drawn uniformly from `kinds`."""

    kinds: tuple[str, ...]
    rate: float = RATE
    seed: int = 0

    @classmethod
    def asked(cls, written: dict[str, Any], seed: int) -> Chaos | None:
        """From --chaos and --chaos-rate; None without --chaos. Raises WrongUsage."""
        if "chaos" not in written:
            return None
        kinds = tuple(dict.fromkeys(kind.strip() for kind in written["chaos"].split(",")))
        for kind in kinds:
            if kind not in KINDS:
                near = did_you_mean(kind, KINDS)
                raise WrongUsage(f"--chaos: unknown kind {kind!r}{near} ({', '.join(KINDS)})")
        return cls(kinds, written.get("chaos_rate", RATE), seed)


TARGETS = ("worker", "prefetcher")
DELAY_SECONDS = (0.010, 0.500)
BURST = 100  # hostile messages to each socket

StatsOf = Callable[[], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class Fault:
    """One injected fault. `at`: seconds of `time.perf_counter`."""

    kind: str
    at: float
    decoding: bool  # requests were running
    role: str = "client"  # of the process; of hostile messages, their sender's
    index: int = 0
    incarnation: int = 0


class Injector:
    """Injects faults during its block, into this engine's processes alone; at the end stopped ones resume."""

    def __init__(self, stats: StatsOf, runtime: Path, chaos: Chaos, *, supervisor: int | None = None) -> None:
        """`stats`: as `Client.stats`. Raises WrongUsage where no engine runs in `runtime`."""
        self.chaos = chaos
        self.faults: list[Fault] = []
        self.missed = 0  # faults without a process that was up
        self.failure = ""  # why it ended early
        self.hostile = HostileClient(runtime, chaos.seed)
        self._stats = stats
        self._supervisor = supervisor_of(runtime) if supervisor is None else supervisor
        self._random = Random(chaos.seed)
        self._killed: set[tuple[str, int, int]] = set()
        self._stopped: dict[int, PidHandle] = {}  # stopped by this injector
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Injector:
        self._task = asyncio.create_task(self._run(), name="fault injector")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        await self.hostile.close()
        if not self._task.cancelled():
            self._task.result()

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                await self._inject_forever(group)
        except* ProtocolError as e:  # the engine has ended; the load's outcomes tell whether it failed
            self.failure = str(e.exceptions[0])
        finally:
            for pid in list(self._stopped):
                self._resume(pid)

    async def _inject_forever(self, group: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += self._random.expovariate(self.chaos.rate)
            await asyncio.sleep(max(0.0, due - loop.time()))
            stats = await self._stats()
            kind = self._random.choice(self.chaos.kinds)
            decoding = stats["scheduler"]["running"] > 0
            if kind in SIGNALS:
                self._signal(kind, decoding, stats["peers"], group)
            else:
                self.faults.append(Fault(kind, time.perf_counter(), decoding))
                for socket in self.hostile.sockets():
                    await self.hostile.burst(socket, BURST)
                due = loop.time()  # faults that fell due during a long burst are skipped

    def _signal(
        self, kind: str, decoding: bool, peers: list[dict[str, Any]], group: asyncio.TaskGroup
    ) -> None:
        self._drop_exited()
        # Always drawn, so that later draws do not depend on the engine's state.
        choice, pause = self._random.random(), self._random.uniform(*DELAY_SECONDS)
        targets = [p for p in peers if p["up"] and p["role"] in TARGETS and self._untouched(p)]
        target = targets[int(choice * len(targets))] if targets else None
        handle = target and PidHandle.take(target["pid"], target["role"], self._supervisor)
        if not target or not handle:
            self.missed += 1
            return
        fault = Fault(
            kind, time.perf_counter(), decoding, target["role"], target["index"], target["incarnation"]
        )
        if kind == "kill":
            sent = handle.send(signal.SIGKILL)
            handle.close()
            self._killed.add((fault.role, fault.index, fault.incarnation))
        else:
            self._stopped[handle.pid] = handle  # before the signal, so that it is resumed in any case
            sent = handle.send(signal.SIGSTOP)
            if kind == "delay":
                group.create_task(self._resume_later(handle.pid, pause))
        if sent:
            self.faults.append(fault)
        else:
            self.missed += 1

    def _untouched(self, peer: dict[str, Any]) -> bool:
        """Whether this injector has neither stopped nor killed it; Stats may still list a killed process."""
        incarnation = (peer["role"], peer["index"], peer["incarnation"])
        return peer["pid"] not in self._stopped and incarnation not in self._killed

    async def _resume_later(self, pid: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._resume(pid)

    def _resume(self, pid: int) -> None:
        handle = self._stopped.pop(pid, None)
        if handle is not None:
            handle.send(signal.SIGCONT)
            handle.close()

    def _drop_exited(self) -> None:
        for pid in [pid for pid, handle in self._stopped.items() if not handle.running]:
            self._stopped.pop(pid).close()
