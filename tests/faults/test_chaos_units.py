"""The fault injector: its choice of processes, and the resumption of stopped processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from waiting import until

from launch.errors import WrongUsage
from launch.runtime import EngineInfo, RuntimeDir
from launch.stress.chaos import Chaos, Injector, runtime_of, supervisor_of
from protocol.messages import VERSION


class Pool:
    """Sleeping children of this process that look like workers, and an engine's Stats that list them."""

    def __init__(self, count: int, module: str = "workers.expert_worker") -> None:
        command = [sys.executable, "-c", "import time; time.sleep(100)", module]
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
        text = {"role": "text", "index": 0, "generation": -1, "pid": 0, "up": False}
        return {"scheduler": {"running": self.running}, "peers": self.peers, "text": text}

    def stopped(self) -> list[int]:
        return [i for i, c in enumerate(self.children) if status(c.pid) == psutil.STATUS_STOPPED]

    def dead(self) -> list[int]:
        return [i for i, child in enumerate(self.children) if child.poll() is not None]

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.wait()


def status(pid: int) -> str:
    return str(psutil.Process(pid).status())


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(4)
    yield made
    made.close()


def injector(pool: Pool, tmp_path: Path, *kinds: str, rate: float = 200.0, seed: int = 0) -> Injector:
    return Injector(pool.stats, tmp_path, Chaos(kinds, rate, seed), supervisor=os.getpid())


@pytest.mark.parametrize("module", ["launch", "workers.expert_worker"])
async def test_processes_that_are_not_the_engine_s_are_not_signalled(tmp_path: Path, module: str) -> None:
    """Children of the supervisor in no role, and another process's children; whatever the Stats list."""
    others = Pool(3, module)
    supervisor = os.getpid() if module == "launch" else others.children[0].pid
    files = os.listdir("/proc/self/fd")
    kinds = Chaos(("kill", "stop"), 200.0)
    async with Injector(others.stats, tmp_path, kinds, supervisor=supervisor) as made:
        await until(lambda: made.missed > 50)
    assert os.listdir("/proc/self/fd") == files
    assert made.faults == []
    assert others.dead() == others.stopped() == []
    others.close()


async def test_stopped_processes_are_resumed_when_the_block_ends(pool: Pool, tmp_path: Path) -> None:
    async def fail() -> None:
        async with injector(pool, tmp_path, "stop"):
            await until(lambda: len(pool.stopped()) == 4)
            raise RuntimeError("the load failed")

    with pytest.raises(RuntimeError, match="the load failed"):
        await fail()
    assert pool.stopped() == pool.dead() == []


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
