"""The fault injector: at random moments it does harm to a running engine of this machine.

    async with Injector(client.stats, runtime, Chaos(("kill",), rate=2.0, seed=7)) as injector:
        ...                                   # requests
    injector.faults                           # what was done, and when

Moments, kinds, victims and frames come from the seed alone; whom a moment meets, and what it is doing, does
not, so two runs of one seed are alike and never the same.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any

from launch.chaos.plan import SIGNALS, Chaos
from launch.chaos.processes import PidHandle, supervisor_of
from launch.chaos.stranger import Stranger
from protocol.errors import ProtocolError

VICTIMS = ("worker", "prefetcher")
DELAY_SECONDS = (0.010, 0.500)
BURST = 100  # hostile messages to each socket

StatsOf = Callable[[], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class Fault:
    """One harm that was done. `at` is in seconds of the monotonic clock, `time.perf_counter`."""

    kind: str
    at: float
    decoding: bool  # requests were running
    role: str = "stranger"  # or the victim's
    index: int = 0
    incarnation: int = 0


class Injector:
    """Does harm for the length of its block. Whatever it stopped goes on when the block ends, and no process
    is signalled that is not, beyond doubt, this engine's."""

    def __init__(self, stats: StatsOf, runtime: Path, chaos: Chaos, *, supervisor: int | None = None) -> None:
        """`stats` gives what `Client.stats` does. Raises WrongUsage where no engine runs in `runtime`, unless
        its supervisor's process id is given."""
        self.chaos = chaos
        self.faults: list[Fault] = []
        self.missed = 0  # moments at which no victim was up
        self.failure = ""  # why it ended early
        self.stranger = Stranger(runtime, chaos.seed)
        self._stats = stats
        self._supervisor = supervisor_of(runtime) if supervisor is None else supervisor
        self._random = Random(chaos.seed)
        self._killed: set[tuple[str, int, int]] = set()
        self._held: dict[int, PidHandle] = {}  # processes that we stopped
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Injector:
        self._task = asyncio.create_task(self._run(), name="fault injector")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        await self.stranger.close()
        if not self._task.cancelled():
            self._task.result()

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                await self._strike_for_ever(group)
        except* ProtocolError as e:  # the engine is gone; whose fault that is others find out
            self.failure = str(e.exceptions[0])
        finally:
            for pid in list(self._held):
                self._let_go(pid)

    async def _strike_for_ever(self, group: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += self._random.expovariate(self.chaos.rate)
            await asyncio.sleep(max(0.0, due - loop.time()))
            stats = await self._stats()
            kind = self._random.choice(self.chaos.kinds)
            decoding = stats["scheduler"]["running"] > 0
            if kind in SIGNALS:
                self._strike(kind, decoding, stats["peers"], group)
            else:
                self.faults.append(Fault(kind, time.perf_counter(), decoding))
                for socket in self.stranger.sockets():
                    await self.stranger.burst(socket, BURST)
                due = loop.time()  # a burst may last; the moments that it covered are not made up for

    def _strike(
        self, kind: str, decoding: bool, peers: list[dict[str, Any]], group: asyncio.TaskGroup
    ) -> None:
        self._forget_the_dead()
        # Drawn also where they are not needed: whatever this moment meets, what follows stays the same.
        choice, pause = self._random.random(), self._random.uniform(*DELAY_SECONDS)
        victims = [p for p in peers if p["up"] and p["role"] in VICTIMS and self._whole(p)]
        victim = victims[int(choice * len(victims))] if victims else None
        grip = victim and PidHandle.take(victim["pid"], victim["role"], self._supervisor)
        if not victim or not grip:
            self.missed += 1
            return
        fault = Fault(
            kind, time.perf_counter(), decoding, victim["role"], victim["index"], victim["incarnation"]
        )
        if kind == "kill":
            landed = grip.send(signal.SIGKILL)
            grip.close()
            self._killed.add((fault.role, fault.index, fault.incarnation))
        else:
            self._held[grip.pid] = grip  # before it stops: whatever happens now, it is let go
            landed = grip.send(signal.SIGSTOP)
            if kind == "delay":
                group.create_task(self._release(grip.pid, pause))
        if landed:
            self.faults.append(fault)
        else:
            self.missed += 1

    def _whole(self, peer: dict[str, Any]) -> bool:
        """Whether we have done nothing to it: a death is seen a moment after it."""
        life = (peer["role"], peer["index"], peer["incarnation"])
        return peer["pid"] not in self._held and life not in self._killed

    async def _release(self, pid: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._let_go(pid)

    def _let_go(self, pid: int) -> None:
        grip = self._held.pop(pid, None)
        if grip is not None:
            grip.send(signal.SIGCONT)
            grip.close()

    def _forget_the_dead(self) -> None:
        for pid in [pid for pid, grip in self._held.items() if not grip.alive]:
            self._held.pop(pid).close()
