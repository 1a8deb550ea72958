"""The energy of a run's phases: counters are read at intervals, and interpolated at the phases' ends.

A counter moves in steps: RAPL's each millisecond, a GPU's up to ten times more seldom than it is read. So the
interpolation is between the reads at which it had changed, and reading goes on at both ends of a run until
each counter has changed once. Power of the idle machine, the engine loaded, is measured first; it is taken
off, so that what remains is what the tokens cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from launch.bench.energy import COUNTS_WITHIN, PARTS, Counter, counting, nvml_counters, rapl_counters
from launch.command_line.options import Options
from launch.errors import WrongUsage
from launch.terminal.log import notice

PERIOD = 0.02  # seconds between two reads
IDLE = 3.0  # seconds in which the idle machine's power is measured


@dataclass(frozen=True)
class PhaseEnergy:
    """Joules by part of the machine, of so many tokens of all requests."""

    tokens: int
    seconds: float
    joules: dict[str, float]  # idle power included
    idle: dict[str, float]  # what the idle machine takes in that time

    def per_token(self, part: str) -> float:
        """Without idle power; below 0 where the machine took less than when it was idle."""
        return (self.joules[part] - self.idle[part]) / self.tokens

    @property
    def j_token(self) -> float:
        return sum(self.per_token(part) for part in self.joules)

    @property
    def total_j_token(self) -> float:
        """Idle power included."""
        return sum(self.joules.values()) / self.tokens


@dataclass
class Recording:
    """Reads of C counters: the time of each, and joules [C]."""

    times: list[float] = field(default_factory=list)
    joules: list[list[float]] = field(default_factory=list)
    stopped: bool = False

    def spent(self, counter: int, begin: float, end: float) -> float:
        """Joules of a counter between two times of the recording."""
        at, values = self._steps(counter)
        before, after = np.interp([begin, end], at, values)
        return float(after - before)

    def changes(self, counter: int, begin: float, end: float) -> int:
        return sum(begin < at <= end for at in self._steps(counter)[0][1:])

    def _steps(self, counter: int) -> tuple[list[float], list[float]]:
        """The first read, and each that found another value."""
        at, values = self.times[:1], [self.joules[0][counter]]
        for when, row in zip(self.times, self.joules, strict=True):
            if row[counter] != values[-1]:
                at.append(when)
                values.append(row[counter])
        return at, values


class Meter:
    """`clock` and `sleep` are of one kind of seconds, that of the timelines of runs."""

    def __init__(
        self,
        counters: Sequence[Counter],
        unread: Sequence[str] = (),
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.counters, self.unread = list(counters), list(unread)
        self.parts = [part for part in PARTS if any(c.part == part for c in counters)]
        self.idle_watts: list[float] = []  # of each counter
        self.resolution = PERIOD  # seconds between two changes of the slowest counter, as far as reads show
        self._clock, self._sleep = clock, sleep

    async def measure_idle(self, seconds: float = IDLE) -> None:
        """Of the engine without requests. Raises OSError."""
        async with self.recording() as recording:
            begin = self._clock()
            await self._sleep(seconds)
            end = self._clock()
        each = range(len(self.counters))
        self.idle_watts = [recording.spent(c, begin, end) / (end - begin) for c in each]
        fewest = min(recording.changes(c, begin, end) for c in each)
        self.resolution = (end - begin) / max(fewest, 1)

    @asynccontextmanager
    async def recording(self) -> AsyncIterator[Recording]:
        """Read the counters during the block. Raises OSError."""
        recording = Recording()
        await self._until_changed(recording)
        task = asyncio.create_task(self._read_on(recording))
        try:
            yield recording
        finally:
            recording.stopped = True
            await task  # not cancelled: two threads would read at once
        await self._until_changed(recording)

    def energy(self, recording: Recording, begin: float, end: float, tokens: int) -> PhaseEnergy:
        """Of the tokens between two times; after `measure_idle`."""
        joules, idle = dict.fromkeys(self.parts, 0.0), dict.fromkeys(self.parts, 0.0)
        for c, (counter, watts) in enumerate(zip(self.counters, self.idle_watts, strict=True)):
            joules[counter.part] += recording.spent(c, begin, end)
            idle[counter.part] += watts * (end - begin)
        return PhaseEnergy(tokens, end - begin, joules, idle)

    def to_map(self) -> dict[str, Any]:
        idle = dict.fromkeys(self.parts, 0.0)
        for counter, watts in zip(self.counters, self.idle_watts, strict=True):
            idle[counter.part] += watts
        return {
            "counters": {part: [c.name for c in self.counters if c.part == part] for part in self.parts},
            "idle_watts": idle,
            "read_every_s": PERIOD,
            "resolution_s": self.resolution,
            "unread": self.unread,
        }

    async def _read_on(self, recording: Recording) -> None:
        while not recording.stopped:
            await self._sleep(PERIOD)
            await self._read(recording)

    async def _until_changed(self, recording: Recording) -> None:
        """Read until each counter has changed."""
        await self._read(recording)
        first, until = recording.joules[-1], self._clock() + COUNTS_WITHIN
        while self._clock() < until and any(a == b for a, b in zip(first, recording.joules[-1], strict=True)):
            await self._sleep(PERIOD)
            await self._read(recording)

    async def _read(self, recording: Recording) -> None:
        def read() -> tuple[float, list[float]]:
            return self._clock(), [counter.read() for counter in self.counters]

        at, joules = await asyncio.to_thread(read)  # a slow driver delays no token's arrival
        recording.times.append(at)
        recording.joules.append(joules)


async def open_meter(options: Options, root: Path = Path("/")) -> Meter | None:
    """With --energy, a meter of what can be read here; a line says what cannot. Raises WrongUsage where that
    is everything."""
    if "energy" not in options.written:
        return None
    readers = [rapl_counters] + [nvml_counters] * (options.written.get("device") != "cpu")
    found: list[Counter] = []
    unread: list[str] = []
    for read in readers:
        some, without = read(root)
        found += some
        unread += without
    found, still = await counting(found)
    unread += still
    if not found:
        raise WrongUsage(f"--energy: no energy counter can be read: {'; '.join(unread)}")
    for line in unread:
        notice(f"energy: without a counter: {line}")
    return Meter(found, unread)
