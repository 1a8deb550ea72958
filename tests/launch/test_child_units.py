"""Single children and the guard of the tasks beside a block, without an engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from msgspec import msgpack
from scripted_children import KILLED, ScriptedProcess

from launch.errors import EngineFailed, StartFailed
from launch.processes import children
from launch.processes.children import PIPE_CAPACITY, Child, spawn, wait_exits
from launch.processes.task_guard import TaskGuard
from protocol.messages import Failed
from protocol.sockets import Identity
from workers.interpreter import ROOT, environment

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


async def test_configuration_has_the_identity_and_its_proof(made: Any) -> None:
    child, _, reader = made
    child.configure({"a": [1], "role": "overwritten"})
    packed = os.read(reader, 1 << 16)
    assert int.from_bytes(packed[:4], "big") == len(packed) - 4
    expected = {"a": [1], "role": "worker", "index": 1, "incarnation": 4, "identity": WORKER.prove(KEY)}
    assert msgpack.decode(packed[4:]) == expected


async def test_configuration_that_no_pipe_takes_ends_the_child(made: Any) -> None:
    child, process, _ = made
    with pytest.raises(StartFailed, match=r"^the worker 1's configuration has \d+ bytes: too many options$"):
        child.configure({"a": "x" * PIPE_CAPACITY})
    assert (process.signals, child.exit_expected) == ([signal.SIGKILL], True)
    child.configure({"a": 1})  # its reader is there; what a killed child gets does not matter


async def test_exit_closes_the_lifeline_once(made: Any) -> None:
    child, process, reader = made
    assert child.running
    process.end(3)
    assert [await child.wait_exit(), await child.wait_exit()] == [3, 3]
    assert (child.running, child.lifeline) == (False, -1)
    assert os.read(reader, 1) == b""
    child.configure({"a": 1})  # nothing is written


@pytest.mark.parametrize(
    ("code", "hung", "failed", "reason"),
    [
        (3, False, None, "the worker 1 exited with code 3"),
        (0, False, None, "the worker 1 exited with code 0"),
        (-signal.SIGSEGV, False, None, "the worker 1 was killed by SIGSEGV"),
        (KILLED, True, None, "the worker 1 made no progress and was killed"),
        (KILLED, True, "its own words", "its own words"),
        (1, False, "its own words", "its own words"),
    ],
)
async def test_reason_of_an_exit(made: Any, code: int, hung: bool, failed: str | None, reason: str) -> None:
    child, _, _ = made
    if hung:
        child.kill_hung()
        assert not child.exit_expected
    if failed is not None:
        child.failed.set_result(Failed("worker", failed, False))
    assert child.exit_reason(code) == reason


@pytest.mark.parametrize(
    ("code", "message", "waits"),
    [(0, "ready", False), (0, "failed", False), (1, "failed", False), (1, "ready", True), (0, "", True)],
)
async def test_last_message_is_waited_for(made: Any, code: int, message: str, waits: bool) -> None:
    """A Ready is the last message only of a child that did its work."""
    child, process, _ = made
    process.end(code)
    loop = asyncio.get_running_loop()
    if message == "ready":
        loop.call_later(0.01, child.ready.set)
    elif message == "failed":
        loop.call_later(0.01, child.failed.set_result, Failed("worker", "w", False))
    began = loop.time()
    await child.wait_last_message(0.1)
    assert (loop.time() - began >= 0.09) is waits
    assert not child.failed.cancelled()


async def test_checks_count_silence_and_stops_in_a_row(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    child, process, _ = made
    stopped = True
    monkeypatch.setattr(Child, "is_stopped", property(lambda self: stopped))
    for silent, halted in ((1, 1), (2, 2)):
        child.count_check()
        assert (child.silent_checks, child.stopped_checks) == (silent, halted)
    child.last_message, stopped = 5.0, False
    child.count_check()
    assert (child.silent_checks, child.stopped_checks) == (0, 0)
    child.count_check()
    assert (child.silent_checks, child.stopped_checks) == (1, 0)
    assert process.signals == []


def test_stopped_processes_are_recognized() -> None:
    class Process:
        pid = os.getpid()
        returncode = None

    async def asked(pid: int) -> bool:
        Process.pid = pid
        return Child(WORKER, cast(Any, Process()), -1, KEY).is_stopped

    pid = os.spawnvp(os.P_NOWAIT, "sleep", ["sleep", "100"])
    try:
        assert not asyncio.run(asked(pid))
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert asyncio.run(asked(pid))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert not asyncio.run(asked(pid))


async def test_exits_are_waited_for_no_longer_than_the_limit(made: Any) -> None:
    child, process, _ = made
    loop = asyncio.get_running_loop()
    began = loop.time()
    await wait_exits([child], 0.05)
    assert 0.05 <= loop.time() - began < 5
    loop.call_later(0.01, process.end, 0)
    await wait_exits([child], 60.0)
    assert loop.time() - began < 5
    await wait_exits([], 60.0)


def test_libraries_of_a_child_neither_spin_nor_take_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    monkeypatch.setenv("OMP_NUM_THREADS", "99")
    monkeypatch.setenv("A_USERS", "own")
    expected = {
        **{"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0", "A_USERS": "own"},
        **{"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}/theirs"},
    }
    assert expected.items() <= environment(3).items()
    monkeypatch.delenv("PYTHONPATH")
    assert environment(1)["PYTHONPATH"] == str(ROOT)


@pytest.mark.parametrize("role", ["loader", "coordinator", "worker", "prefetcher"])
async def test_child_that_the_system_refuses_leaves_no_descriptor(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    async def refuse(*command: str, **options: Any) -> None:
        asked.append((command, options))
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    before = os.listdir("/proc/self/fd")
    name = "worker 0" if role == "worker" else role
    line = f"^the {name} could not be started: Resource temporarily unavailable$"
    with pytest.raises(StartFailed, match=line):
        await spawn(Identity(role, 0, 0), 2, KEY)
    assert os.listdir("/proc/self/fd") == before
    ((command, options),) = asked
    assert command[1:5] == ("-P", "-m", "workers.child", children.MODULES[role])
    assert command[5] == "--lifeline"
    assert options["pass_fds"] == (int(command[6]),)
    assert options["start_new_session"]
    assert (options["stdin"], options["stdout"]) == (asyncio.subprocess.DEVNULL, 2)
    assert options["env"]["OMP_NUM_THREADS"] == "2"


# --- the guard ----------------------------------------------------------------------------------------------


async def guarded(body: Any) -> str:
    """How a block with a guard ends."""
    guard = TaskGuard()

    async def block() -> None:
        guard.enter()
        error: BaseException | None = None
        try:
            await body(guard)
        except BaseException as e:
            error = e
        await guard.end_tasks()
        guard.raise_failure(error)
        if error is not None:
            raise error

    task = asyncio.create_task(block())
    await asyncio.wait([task], timeout=5)
    if task.cancelled():
        return "cancelled"
    failure = task.exception()
    return "done" if failure is None else f"{failure}"


async def test_failed_task_cancels_the_block_and_is_raised_from_it() -> None:
    async def fail(text: str) -> None:
        raise EngineFailed(text)

    async def body(guard: TaskGuard) -> None:
        guard.keep(fail("first"))
        guard.keep(fail("second"))
        await asyncio.sleep(100)

    assert await guarded(body) == "first"


async def test_block_without_a_failure_ends_its_tasks() -> None:
    ended = []

    async def beside() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            ended.append("cancelled")

    async def body(guard: TaskGuard) -> None:
        guard.keep(beside())
        await asyncio.sleep(0)

    assert await guarded(body) == "done"
    assert ended == ["cancelled"]


async def test_cancellation_from_outside_wins_over_a_failure() -> None:
    async def both(guard: TaskGuard) -> None:
        task = asyncio.current_task()
        assert task is not None
        guard.fail(EngineFailed("it failed"))
        task.cancel()
        await asyncio.sleep(100)

    async def failure_alone(guard: TaskGuard) -> None:
        guard.fail(EngineFailed("it failed"))
        guard.fail(EngineFailed("and again"))
        await asyncio.sleep(100)

    async def error_of_the_block(guard: TaskGuard) -> None:
        raise ValueError("its own")

    assert await guarded(both) == "cancelled"
    assert await guarded(failure_alone) == "it failed"
    assert await guarded(error_of_the_block) == "its own"
