"""Helpers of the tests that kill processes: answers that must not change, an engine's state before and after
a fault."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from marked_engine import Place

from launch.equality import F32_BOUND, Verdict, compare
from launch.processes.supervisor import Supervisor
from launch.runtime import segments, sweep
from pipeline.config import EngineConfig
from protocol.client import Client
from protocol.messages import Token
from protocol.sockets import Identity
from shm.disk_cache import sweep_cache
from shm.locks import sweep as sweep_stores

LIMIT = 60.0  # seconds for any expected event
PROMPT = list(range(5, 25))
LONG = [7 + 13 * i for i in range(200)]
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


def config(model: Path, **settings: Any) -> EngineConfig:
    """In float32, two workers, tiles of 32 channels: 3 an expert, 24 in all. The host is slowed, so that
    faults happen during a computation."""
    plain: dict[str, Any] = {
        "model": model,
        "device": "cpu",
        "policy": "all-host",
        "format": "f32",
        "backbone_dtype": "f32",
        "tile": 32,
        "workers": 2,
        "expert_cache": 0.5,
        "chunk": 16,
        "max_sequences": 6,
        "host_slowdown": 4.0,
        "speculate": "off",  # its steps depend on the clock, and so do bits
    }
    return EngineConfig(**(plain | settings))


async def answer(
    client: Client,
    prompt: Sequence[int] = PROMPT,
    count: int = 32,
    fault: Callable[[], None] | None = None,
    on_token: Callable[[], None] = lambda: None,
    reuse: bool = False,
) -> list[Token]:
    """Returns a greedy answer; `fault` happens after its eighth token. With `reuse` of KV its bits depend on
    what was computed before."""
    tokens = []
    asked = {"token_ids": prompt, "max_tokens": count, "ignore_eos": True, "reuse": reuse}
    async for token in client.generate(**asked):
        tokens.append(token)
        on_token()
        if fault is not None and len(tokens) == 8:
            fault()
    assert len(tokens) == count
    return tokens


def same(tokens: list[Token], reference: list[Token]) -> bool:
    """Equal up to near-ties: rounding depends on which process computes a tile."""
    return compare([t.token for t in tokens], reference, F32_BOUND).verdict is not Verdict.MISMATCH


def bits(tokens: Sequence[Token]) -> list[tuple[int, float]]:
    """What must not change by a bit: the tokens and their margins."""
    return [(token.token, token.margin) for token in tokens]


class State:
    """The processes and segments of an engine before faults, and the check that it has recovered."""

    def __init__(self, supervisor: Supervisor, client: Client) -> None:
        self.supervisor, self.client = supervisor, client
        # The loader, which has done its work, may still be exiting.
        self._processes = [slot for slot in self._slots() if slot[0] != "loader"]
        # A new lane has a name until its worker has mapped it.
        self._kinds = [name for name in self.kinds() if not name.endswith("-lane")]

    def pid(self, role: str, index: int = 0) -> int:
        """Of the running generation."""
        pids = self.supervisor.pids
        return pids[max(child for child in pids if (child.role, child.index) == (role, index))]

    def send(self, number: signal.Signals, role: str, index: int = 0) -> None:
        os.kill(self.pid(role, index), number)

    async def is_computing(self) -> None:
        """Wait until a request is being computed."""
        async with asyncio.timeout(LIMIT):
            while (await self.client.stats())["scheduler"]["running"] == 0:  # noqa: ASYNC110 - elsewhere
                await asyncio.sleep(0)

    async def place_experts(self, policy: str, options: dict[str, str] | None = None) -> None:
        """Have the prefetcher fill the expert cache, so that a stopped one is noticed; then set `policy`."""
        for name in ("all-host", "layerwise"):
            await self.client.set_policy(name)
        await self.client.set_policy(policy, options or {})

    async def kill_next(self, role: str, index: int, after: int, number: signal.Signals = KILL) -> int:
        """Kill, or stop, the first generation later than `after`, as soon as it runs; returns its number."""
        end = time.monotonic() + LIMIT
        while True:
            for child, pid in self.supervisor.pids.items():
                if (child.role, child.index) == (role, index) and child.generation > after:
                    os.kill(pid, number)
                    return child.generation
            assert time.monotonic() < end
            await asyncio.sleep(0.005)

    def generation(self, role: str, index: int = 0) -> int:
        """The running generation; -1 if none runs."""
        pids = self.supervisor.pids
        return max((c.generation for c in pids if (c.role, c.index) == (role, index)), default=-1)

    def segments(self) -> list[str]:
        return sorted(path.name for path in segments(self.runtime))

    def kinds(self) -> list[str]:
        """Segments without the last part of their names, which is random."""
        return [name.rpartition("-")[0] for name in self.segments()]

    @property
    def runtime(self) -> Path:
        return Path(self.supervisor.endpoint.removeprefix("ipc://")).parent

    async def exits(self, role: str = "worker") -> int:
        return int((await self.client.stats())["recovery"][role]["deaths"])

    async def wait_recovered(self, role: str = "worker", exits: int = 0) -> dict[str, Any]:
        """Wait until so many processes of a role have exited, and all have been restarted and are up; returns
        the engine's counters."""
        end = time.monotonic() + LIMIT
        while True:
            stats = await self.client.stats()
            there = {(peer["role"], peer["index"]): peer for peer in stats["peers"]}
            expected = {slot for slot in self._processes if slot[0] not in ("coordinator", "text")}
            known = stats["recovery"].get(role, {"deaths": 0})["deaths"] >= exits
            up = set(there) == expected and all(peer["up"] for peer in there.values())
            settled = self.kinds() == self._kinds
            if known and up and settled and self._slots() == self._processes and self._agree(there):
                break
            left = f"{self.segments()} instead of {self._kinds}"
            assert time.monotonic() < end, f"{stats['peers']}, {self.supervisor.pids}, {left}"
            await asyncio.sleep(0.02)
        scheduler = stats["scheduler"]
        assert scheduler["running"] == scheduler["waiting"] == scheduler["kv_tokens_used"] == 0
        return stats

    def _agree(self, there: dict[tuple[str, int], dict[str, Any]]) -> bool:
        """Whether the coordinator has the same generations as the supervisor."""
        pids = self.supervisor.pids
        return all(pids.get(Identity(*slot, p["generation"])) == p["pid"] for slot, p in there.items())

    def _slots(self) -> list[tuple[str, int]]:
        return sorted((child.role, child.index) for child in self.supervisor.pids)


def sweep_all(place: Place) -> None:
    """Sweep as a start does first."""
    sweep()
    sweep_stores()
    sweep_cache(place.cache / "tandem")
