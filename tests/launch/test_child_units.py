"""Single children and the guard of the tasks beside a block, without an engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from scripted_children import ScriptedProcess

from launch.errors import StartFailed
from launch.processes import children
from launch.processes.children import PIPE_CAPACITY, Child, spawn
from protocol.sockets import Identity

KEY = b"k" * 32
WORKER = Identity("worker", 1, 4)


@pytest.fixture
async def made() -> AsyncIterator[tuple[Child, ScriptedProcess, int]]:
    """A child, its process, and its own end of the lifeline."""
    reader, lifeline = os.pipe()
    process = ScriptedProcess()
    child = Child(WORKER, cast(asyncio.subprocess.Process, process), lifeline, KEY)
    yield child, process, reader
    process.end(0)
    await child.wait_exit()
    os.close(reader)


async def test_configuration_that_no_pipe_takes_ends_the_child(made: Any) -> None:
    child, process, _ = made
    with pytest.raises(StartFailed, match=r"^the worker 1's configuration has \d+ bytes: too many options$"):
        child.configure({"a": "x" * PIPE_CAPACITY})
    assert (process.signals, child.exit_expected) == ([signal.SIGKILL], True)
    child.configure({"a": 1})  # its reader is there; what a killed child gets does not matter


async def test_child_that_the_system_refuses_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    async def refuse(*command: str, **options: Any) -> None:
        asked.append((command, options))
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Resource temporarily unavailable"):
        await spawn(Identity("worker", 0, 0), 2, KEY)
    assert os.listdir("/proc/self/fd") == before
    ((command, options),) = asked
    assert command[1:5] == ("-P", "-m", "workers.child", children.MODULES["worker"])
    assert command[5] == "--lifeline"
    assert options["pass_fds"] == (int(command[6]),)
    assert options["start_new_session"]
    assert options["stdin"] == asyncio.subprocess.DEVNULL
    assert options["stdout"] == options["stderr"] > 2  # a pipe: whoever reads our stderr holds up no child
    assert options["env"]["OMP_NUM_THREADS"] == "2"


# --- the guard ----------------------------------------------------------------------------------------------
