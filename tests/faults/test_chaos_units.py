"""The fault injector: its choice of processes, and the resumption of stopped processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from waiting import until

from launch.errors import WrongUsage
from launch.runtime import EngineInfo, RuntimeDir
from launch.stress.chaos import (
    DELAY_SECONDS,
    Chaos,
    Injector,
    runtime_of,
    supervisor_of,
)
from protocol.errors import EngineGone
from protocol.messages import VERSION


class Pool:
    """Sleeping children of this process that look like workers, and an engine's Stats that list them."""

    def __init__(self, count: int) -> None:
        command = [sys.executable, "-c", "import time; time.sleep(100)", "workers.expert_worker"]
        self.children = [subprocess.Popen(command) for _ in range(count)]
        self.up = [True] * count
        self.peers = [
            {"role": "worker", "index": i, "generation": 0, "pid": child.pid, "up": True}
            for i, child in enumerate(self.children)
        ]
        self.running = 1

    async def stats(self) -> dict[str, Any]:
        for peer, up, child in zip(self.peers, self.up, self.children, strict=False):
            peer["up"] = up and child.poll() is None
        return {"scheduler": {"running": self.running}, "peers": self.peers}

    def stopped(self) -> list[int]:
        return [i for i, c in enumerate(self.children) if status(c.pid) == psutil.STATUS_STOPPED]

    def dead(self) -> list[int]:
        return [i for i, child in enumerate(self.children) if child.poll() is not None]


def status(pid: int) -> str:
    return str(psutil.Process(pid).status())


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(4)
    yield made
    for child in made.children:
        child.kill()
        child.wait()


def injector(pool: Pool, tmp_path: Path, *kinds: str, rate: float = 200.0, seed: int = 0) -> Injector:
    return Injector(pool.stats, tmp_path, Chaos(kinds, rate, seed), supervisor=os.getpid())


async def test_only_peers_that_are_up_are_killed(pool: Pool, tmp_path: Path) -> None:
    pool.up = [False, True, True, True]
    files = os.listdir("/proc/self/fd")
    async with injector(pool, tmp_path, "kill") as made:
        await until(lambda: pool.dead() == [1, 2, 3] and made.missed > 5)
    assert os.listdir("/proc/self/fd") == files
    order = [f.index for f in made.faults]
    assert sorted(order) == [1, 2, 3] != order  # at random
    assert {(f.kind, f.role, f.generation, f.decoding) for f in made.faults} == {("kill", "worker", 0, True)}
    assert [child.returncode for child in pool.children if child.returncode] == [-signal.SIGKILL] * 3
    assert all(0 <= time.perf_counter() - fault.at < 20 for fault in made.faults)


async def test_processes_that_are_not_the_engine_s_are_not_signalled(pool: Pool, tmp_path: Path) -> None:
    """Wrong process ids in the Stats: unused, none, another parent's, this process, and children of
    another role and of none."""
    children = [child.pid for child in pool.children]
    pids = (2**22 + 1, -5, 1, os.getpid(), *children[2:])
    pool.peers = [{"role": "worker", "index": i, "generation": 0, "pid": p} for i, p in enumerate(pids)]
    for peer in pool.peers:
        peer["up"] = True
    pool.peers[4]["role"], pool.peers[5]["role"] = "prefetcher", "other"
    files = os.listdir("/proc/self/fd")
    async with injector(pool, tmp_path, "kill", "stop") as made:
        await until(lambda: made.missed > 50)
    assert os.listdir("/proc/self/fd") == files
    assert made.faults == []
    assert pool.dead() == pool.stopped() == []


async def test_a_stop_ends_with_the_block_alone_also_where_that_fails(pool: Pool, tmp_path: Path) -> None:
    async def fail() -> None:
        async with injector(pool, tmp_path, "stop") as made:
            await until(lambda: len(pool.stopped()) == 4)
            made.chaos = Chaos(("corrupt",))  # none is stopped again
            await asyncio.sleep(DELAY_SECONDS[1] + 0.2)  # longer than any delay
            assert len(pool.stopped()) == 4
            raise RuntimeError("the load failed")

    with pytest.raises(RuntimeError, match="the load failed"):
        await fail()
    assert pool.stopped() == pool.dead() == []


async def test_delay_ends_by_itself(pool: Pool, tmp_path: Path) -> None:
    async with injector(pool, tmp_path, "delay", rate=5.0) as made:
        await until(lambda: bool(pool.stopped()))
        (fault,) = made.faults[-1:]
        made.chaos = Chaos(("corrupt",))  # no further delays; this directory has no socket
        await until(lambda: not pool.stopped(), DELAY_SECONDS[1] + 5.0)
    assert time.perf_counter() - fault.at >= DELAY_SECONDS[0]
    assert {fault.kind for fault in made.faults} <= {"delay", "corrupt"}
    assert pool.dead() == []


async def test_engine_that_ends_ends_the_injection(tmp_path: Path) -> None:
    async def gone() -> dict[str, Any]:
        raise EngineGone("it was there a moment ago")

    async with Injector(gone, tmp_path, Chaos(("kill",), 1000.0), supervisor=os.getpid()) as made:
        await until(lambda: bool(made.failure))
    assert made.failure == "it was there a moment ago"
    assert made.unrecovered == ["faults ended early: it was there a moment ago"]


def test_chaos_is_for_a_running_engine_of_this_machine(tmp_path: Path) -> None:
    runtime = RuntimeDir.claim("chaos-units")
    try:
        endpoint = runtime.endpoint("client.sock")
        runtime.publish(EngineInfo(runtime.name, 12345, "/m", endpoint, VERSION))
        assert runtime_of(endpoint) == runtime.path
        assert supervisor_of(runtime.path) == 12345
        for other in (runtime.path.with_name("chaos-other"), tmp_path):
            with pytest.raises(WrongUsage, match="no engine is running"):
                Injector(cast(Any, None), other, Chaos(("kill",)))
    finally:
        runtime.remove()
