"""What the tests of dying processes share: answers that must not change, an engine's state around a fault."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launch.processes.supervisor import Supervisor
from launch.runtime import segments
from pipeline.config import EngineConfig
from protocol.client import Client
from protocol.messages import Token
from protocol.sockets import Identity

LIMIT = 60.0  # seconds for anything to happen that must
PROMPT = list(range(5, 25))
LONG = [7 + 13 * i for i in range(200)]
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


def config(model: Path, **settings: Any) -> EngineConfig:
    """In float32, two workers, tiles of 32 channels: 3 an expert, 24 in all. The host is slowed, so that a
    fault can land in the middle of something."""
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
    }
    return EngineConfig(**(plain | settings))


async def answer(client: Client, prompt: Sequence[int] = PROMPT, count: int = 32) -> list[Token]:
    """A greedy answer."""
    tokens = [t async for t in client.generate(token_ids=prompt, max_tokens=count, ignore_eos=True)]
    assert len(tokens) == count
    return tokens


async def answer_with_fault(
    client: Client, fault: Callable[[], None], prompt: Sequence[int] = PROMPT, count: int = 32, at: int = 8
) -> list[Token]:
    """The same with a fault after the token `at`."""
    tokens = []
    async for token in client.generate(token_ids=prompt, max_tokens=count, ignore_eos=True):
        tokens.append(token)
        if len(tokens) == at:
            fault()
    assert len(tokens) == count
    return tokens


def bits(tokens: Sequence[Token]) -> list[tuple[int, float]]:
    """What must not change by a bit: the tokens, and how near a tie each was."""
    return [(token.token, token.margin) for token in tokens]


class State:
    """An engine as it was, and whether it is so again: everybody there and up, no process or segment more."""

    def __init__(self, supervisor: Supervisor, client: Client) -> None:
        self.supervisor, self.client = supervisor, client
        self._processes = self._posts()
        self._segments = self.segments()

    def pid(self, role: str, index: int = 0) -> int:
        """Of the present life."""
        pids = self.supervisor.pids
        return pids[max(who for who in pids if (who.role, who.index) == (role, index))]

    def send(self, number: signal.Signals, role: str, index: int = 0) -> None:
        os.kill(self.pid(role, index), number)

    async def prefilling(self, rows: int) -> None:
        """Wait until so many rows more have been prefilled."""
        wanted = await self.prefilled() + rows
        async with asyncio.timeout(LIMIT):
            while await self.prefilled() < wanted:  # noqa: ASYNC110 - in another process
                await asyncio.sleep(0)

    async def prefilled(self) -> int:
        """Rows so far."""
        return int((await self.client.stats())["engine"]["prefill"]["rows"])

    async def kill_next(self, role: str, index: int, after: int, number: signal.Signals = KILL) -> int:
        """Kill, or stop, the first life that is later than this one, as soon as it is there; which it was."""
        end = time.monotonic() + LIMIT
        while True:
            for who, pid in self.supervisor.pids.items():
                if (who.role, who.index) == (role, index) and who.incarnation > after:
                    os.kill(pid, number)
                    return who.incarnation
            assert time.monotonic() < end
            await asyncio.sleep(0.005)

    def incarnation(self, role: str, index: int = 0) -> int:
        """Of the present life; -1 between two."""
        lives = [who.incarnation for who in self.supervisor.pids if (who.role, who.index) == (role, index)]
        return max(lives, default=-1)

    def segments(self) -> list[str]:
        return sorted(path.name for path in segments(self.runtime))

    @property
    def runtime(self) -> Path:
        return Path(self.supervisor.endpoint.removeprefix("ipc://")).parent

    async def deaths(self, role: str = "worker") -> int:
        return int((await self.client.stats())["recovery"][role]["deaths"])

    async def whole(self, role: str = "worker", deaths: int = 0) -> dict[str, Any]:
        """Wait until so many of a role have died, and all are there and up; the engine's counters then."""
        end = time.monotonic() + LIMIT
        while True:
            stats = await self.client.stats()
            there = {(peer["role"], peer["index"]): peer for peer in stats["peers"]}
            expected = {post for post in self._processes if post[0] != "coordinator"}
            known = stats["recovery"].get(role, {"deaths": 0})["deaths"] >= deaths
            up = set(there) == expected and all(peer["up"] for peer in there.values())
            if known and up and self._posts() == self._processes and self._agree(there):
                break
            assert time.monotonic() < end, f"not whole: {stats['peers']}, {self.supervisor.pids}"
            await asyncio.sleep(0.02)
        assert self.segments() == self._segments
        scheduler = stats["scheduler"]
        assert scheduler["running"] == scheduler["waiting"] == scheduler["kv_tokens_used"] == 0
        return stats

    def _agree(self, there: dict[tuple[str, int], dict[str, Any]]) -> bool:
        """Whether the coordinator means the same lives as the supervisor."""
        pids = self.supervisor.pids
        return all(pids.get(Identity(*post, p["incarnation"])) == p["pid"] for post, p in there.items())

    def _posts(self) -> list[tuple[str, int]]:
        return sorted((who.role, who.index) for who in self.supervisor.pids)


async def until(condition: Callable[[], bool], limit: float = LIMIT) -> float:
    """Wait for it; the seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit
        await asyncio.sleep(0.01)
    return time.monotonic() - began
