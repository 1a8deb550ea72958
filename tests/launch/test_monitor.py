"""Restarts of an engine's processes by the real supervisor, on children that a test plays."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from scripted_children import KILLED, Play, ScriptedChild, stage, supervisor
from waiting import until

from launch.errors import EngineFailed
from launch.processes import children
from launch.processes.children import Child, terminate
from launch.processes.monitor import Limits
from launch.processes.supervisor import Supervisor
from protocol.messages import VERSION, Failed, Heartbeat, Hung, WorkerDied, WorkerUp
from protocol.sockets import Identity
from shm.control import IDLE, ControlLine

CRASHED = -signal.SIGSEGV
NEVER = Limits(check_interval=1e6, first_pause=0.001)
FEW = Limits(check_interval=1e6, first_pause=0.001, futile_exits=3)


@pytest.fixture
async def play(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Play]:
    async with stage(monkeypatch) as made:
        yield made


def line_of(engine: Supervisor, role: str, index: int = 0) -> ControlLine:
    assert engine._monitor is not None
    return engine._monitor._control.line(role, index)


async def up(play: Play, role: str, index: int, generation: int) -> ScriptedChild:
    """The next generation, which the coordinator has given work."""
    child = await play.spawned(role, index, generation)
    play.children[0].send(WorkerUp(role, index, generation))
    await until(lambda: child.child.up)
    return child


@pytest.mark.parametrize(
    ("code", "crashed", "reason"),
    [
        (KILLED, False, "the worker 1 was killed by SIGKILL"),
        (-signal.SIGTERM, False, "the worker 1 was killed by SIGTERM"),
        (CRASHED, True, "the worker 1 was killed by SIGSEGV"),
        (0, True, "the worker 1 exited with code 0"),
    ],
)
async def test_coordinator_learns_of_an_exit_and_its_work_before_the_restart(
    play: Play, code: int, crashed: bool, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tandem")
    async with supervisor(NEVER) as engine:
        line_of(engine, "worker", 1).begin(41)
        play.child("worker", 1).process.end(code)
        await up(play, "worker", 1, 1)
        assert play.child("coordinator").received == [WorkerDied("worker", 1, 0, crashed, 41)]
        assert line_of(engine, "worker", 1).seq == IDLE
        assert f"{reason}; it is being restarted" in caplog.text
        assert "the worker 1 is up again after " in caplog.text


async def test_messages_of_and_about_an_earlier_generation_and_malformed_ones_change_nothing(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    async with supervisor(NEVER):
        coordinator, first = play.child("coordinator"), play.child("worker")
        first.process.end(KILLED)
        second = await play.spawned("worker", 0, 1)
        first.send(Failed("worker", "late", True))
        first._socket.send_multipart([b"?"])  # type: ignore[union-attr]
        coordinator._socket.send_multipart([bytes([32, VERSION]), b"\xc1"])  # type: ignore[union-attr]
        coordinator.send(Hung("worker", 0, 0), WorkerUp("worker", 0, 0), Hung("worker", 7, 0))
        coordinator.send(WorkerUp("worker", 1, 0))
        await until(lambda: play.child("worker", 1).child.up)
        assert (second.child.up, second.child.hung, second.process.signals) == (False, None, [])
        assert not second.child.failed.done()
        assert "dropped a malformed message on the control socket" in caplog.text
        coordinator.send(Hung("worker", 0, 1))
        await play.spawned("worker", 0, 2)
        assert second.child.exit_reason(KILLED) == "the worker 0 made no progress and was killed"
        assert WorkerDied("worker", 0, 1, True, IDLE) in coordinator.received


async def test_crashes_of_workers_that_are_up_but_have_computed_nothing_end_the_engine(play: Play) -> None:
    """So may an import that follows the first answer; kills from outside do not count."""
    with pytest.raises(EngineFailed, match=r"^the worker 0 .* 3 times in a row"):  # noqa: PT012
        async with supervisor(FEW):
            for generation, code in enumerate((KILLED,) * 5 + (CRASHED,) * 3):
                (await up(play, "worker", 0, generation)).process.end(code)
            await asyncio.Future()
    assert sum(c.identity.role == "worker" and not c.identity.index for c in play.children) == 8


@pytest.mark.parametrize("code", [KILLED, 3])
async def test_exits_of_the_young_do_not_end_an_engine_whose_workers_compute(
    play: Play, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervisor(FEW) as engine:
        monkeypatch.setattr(children, "LAST_MESSAGE_LIMIT", 0.0)  # none is sent
        for generation in range(6):
            child = await play.spawned("worker", 0, generation)
            line_of(engine, "worker", 1).tick()
            child.process.end(code)
        await play.spawned("worker", 0, 6)


async def test_gateway_that_cannot_start_is_tried_again_for_ever(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    """Also while the whole engine is restarted, which does not wait for it. Each gets the same sockets."""

    def script(child: ScriptedChild) -> None:
        if child.identity.role == "gateway" and child.identity.generation:
            child.send(Failed("gateway", "keys.txt has no keys", usage=True))
            child.process.end(2)
        else:
            play.begin(child)

    play.script = script
    async with supervisor(FEW, http="127.0.0.1:0") as engine:
        assert engine.http != "http://127.0.0.1:0"
        play.child("gateway").process.end(KILLED)
        fifth = await play.spawned("gateway", 0, 5)
        assert fifth.fds == play.child("gateway").fds == tuple(fifth.config["listeners"])
        play.child("coordinator").process.end(KILLED)
        await until(lambda: "the engine is up again" in caplog.text)


LONG = Limits(check_interval=1e6, futile_exits=3, futile_kills=0.2, coordinator_exits=2)


async def test_kills_from_outside_are_no_crash_loop(play: Play) -> None:
    """They meet processes in their start, as many do on a busy machine."""
    async with supervisor(FEW) as engine:
        for generation in range(10):
            (await play.spawned("worker", 0, generation)).process.end(KILLED)
            (await play.spawned("text", 0, generation)).process.end(-signal.SIGTERM)
        for generation in range(2 * FEW.coordinator_exits):
            (await play.spawned("coordinator", 0, generation)).process.end(KILLED)
        await play.spawned("coordinator", 0, 2 * FEW.coordinator_exits)
        assert engine._guard.failure is None


@pytest.mark.parametrize("role", ["worker", "coordinator"])
async def test_a_system_that_kills_a_process_each_time_ends_the_engine(play: Play, role: str) -> None:
    """But not before much time without any progress."""
    killed = rf"^the {role}.* was killed by SIGKILL, \d+ times in \d+ s in which the engine did no work: "
    with pytest.raises(EngineFailed, match=killed):  # noqa: PT012 - from the end of the block
        async with supervisor(LONG) as engine:
            progress = line_of(engine, "coordinator")
            began, generation = time.monotonic(), 0
            while True:
                if time.monotonic() < began + 3 * LONG.futile_kills:
                    progressed = time.monotonic()
                    progress.answered += 1
                (await play.spawned(role, 0, generation)).process.end(KILLED)
                generation += 1
    assert time.monotonic() > progressed + LONG.futile_kills


async def test_a_coordinator_that_exits_by_itself_ends_the_engine_also_between_kills(play: Play) -> None:
    line = r"^the coordinator exited with code 3, 2 times in a row; the engine has been stopped$"
    with pytest.raises(EngineFailed, match=line):  # noqa: PT012 - from the end of the block
        async with supervisor(LONG):
            for generation, code in enumerate((3, KILLED, 3)):
                (await play.spawned("coordinator", 0, generation)).process.end(code)
            await asyncio.Future()


async def test_a_coordinator_that_waits_in_vain_for_killed_workers_is_no_crash_loop(play: Play) -> None:
    """It was no doing of its own. Where nobody kills them it is."""
    limits = Limits(check_interval=1e6, first_pause=0.001, coordinator_exits=2)

    def fail(coordinator: ScriptedChild) -> None:
        coordinator.send(Failed("coordinator", "0 of 2 workers were ready after 60 s", False))
        coordinator.process.end(1)

    with pytest.raises(EngineFailed, match=r"^the coordinator failed: 0 of 2 .* 60 s, 2 times in a row"):  # noqa: PT012
        async with supervisor(limits) as engine:
            workers = 0  # generations
            for generation in range(5):
                coordinator = await play.spawned("coordinator", 0, generation)
                (await play.spawned("worker", 0, workers)).process.end(KILLED)
                await play.spawned("worker", 0, workers + 1)
                fail(coordinator)
                workers += 2
            for generation in (5, 6):
                coordinator = await play.spawned("coordinator", 0, generation)
                line_of(engine, "worker").tick()
                fail(coordinator)
            await asyncio.Future()
    assert sum(child.identity.role == "coordinator" for child in play.children) == 7


async def test_next_coordinator_learns_what_was_computed_at_crashes_and_not_at_kills(play: Play) -> None:
    limits = Limits(check_interval=1e6, first_pause=0.001, coordinator_exits=9)
    async with supervisor(limits) as engine:
        assert engine._monitor is not None
        control = engine._monitor._control
        known: dict[int, int] = {}
        coordinator = play.child("coordinator")
        for generation, (code, computed) in enumerate(
            [(CRASHED, [5, -6]), (KILLED, [5, 7]), (-signal.SIGABRT, [5]), (CRASHED, [])], start=1
        ):
            control.requests = [(key, known.get(key, 0)) for key in computed]
            coordinator.process.end(code)
            coordinator = await play.spawned("coordinator", 0, generation)
            known = dict(coordinator.config["suspects"])
            assert control.requests == []
            await until(lambda coordinator=coordinator: coordinator.child.ready.is_set())
        assert known == {5: 2, -6: 1}


def test_pauses_between_restarts_double_up_to_the_longest() -> None:
    pauses = [Limits(first_pause=0.1, longest_pause=1.0).pause(exits) for exits in range(8)]
    assert pauses == [0, 0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert Limits(longest_pause=5.0).pause(10_000) == 5.0


async def test_restarted_coordinator_with_wrong_usage_ends_the_engine_at_once(play: Play) -> None:
    line = "^the coordinator failed: no such device; the engine has been stopped$"
    with pytest.raises(EngineFailed, match=line):  # noqa: PT012 - from the end of the block
        async with supervisor(NEVER):
            play.child("coordinator").send(Failed("coordinator", "no such device", True))
            play.child("coordinator").process.end(2)
            await asyncio.Future()


async def test_restart_of_the_engine_replaces_a_pending_restart_of_a_worker(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with supervisor(Limits(check_interval=1e6, first_pause=0.2)):
        for generation in (0, 1):
            (await play.spawned("worker", 0, generation)).process.end(3)  # the second time with a pause
        play.child("coordinator").process.end(KILLED)
        await until(lambda: "the engine is up again" in caplog.text)
        await asyncio.sleep(0.3)  # longer than the pause
        assert max(c.identity.generation for c in play.children if c.identity.role == "worker") == 2


async def restarted_with_reader(play: Play, engine: Supervisor) -> ScriptedChild:
    """A reader that a kill does not end, as one whose disk does not answer, and a coordinator that exits."""
    assert engine._monitor is not None
    await engine._monitor.start_late(engine._add_slot("reader"))
    reader = play.child("reader")
    reader.process.ignores.add(signal.SIGKILL)
    play.child("coordinator").process.end(KILLED)
    await until(lambda: signal.SIGKILL in reader.process.signals)
    return reader


async def test_an_engine_is_restarted_once_its_killed_reader_writes_nothing_more(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "KILL_LIMIT", 0.05)
    async with supervisor(NEVER) as engine:
        reader = await restarted_with_reader(play, engine)
        await asyncio.sleep(0.3)  # longer than the limit
        assert all(child.identity.generation == 0 for child in play.children)
        reader.process.end(KILLED)
        await play.spawned("coordinator", 0, 1)


async def test_a_killed_reader_that_does_not_exit_ends_the_engine(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "KILL_LIMIT", 0.05)
    line = "^the reader has not exited 0.1 s after it was killed, its disk does not answer;"
    with pytest.raises(EngineFailed, match=line):  # noqa: PT012 - from the end of the block
        async with supervisor(Limits(check_interval=1e6, killed_reader=0.1)) as engine:
            reader = await restarted_with_reader(play, engine)
            asyncio.get_running_loop().call_later(1.0, reader.process.end, KILLED)  # the end waits for it
            await asyncio.Future()


@asynccontextmanager
async def real_process(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Its input is open, and it is killed at the end of the block."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]


async def test_processes_that_do_not_exit_are_terminated_and_then_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(children, "STOP_LIMIT", 0.1)
    monkeypatch.setattr(children, "TERM_LIMIT", 0.1)
    stubborn = ("sh", "-c", "trap '' TERM; echo; while read line; do :; done")
    async with real_process("sleep", "1000") as first, real_process(*stubborn) as second:
        assert second.stdout is not None
        await second.stdout.readline()  # it ignores SIGTERM from now on
        made = [Child(Identity("worker", i, 0), p, -1, b"") for i, p in enumerate((first, second))]
        await terminate(made)
        assert [await child.wait_exit() for child in made] == [-signal.SIGTERM, KILLED]


HANGS = {
    **{"silent": "silent_checks", "engine thread": "engine_checks"},
    **{"stopped": "stopped_checks", "silent from its start": "start_checks"},
}


@pytest.mark.parametrize("hangs", HANGS)
async def test_hung_processes_are_killed_after_so_many_checks(
    play: Play, hangs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator without heartbeats, or without progress; a stopped worker; one that never sends anything.
    Nobody else is killed."""
    never = dict.fromkeys(HANGS.values(), 10_000)
    limits = Limits(check_interval=0.002, **(never | {HANGS[hangs]: 5}))

    def script(child: ScriptedChild) -> None:
        if hangs != "silent from its start" or child.identity != Identity("worker", 1, 1):
            play.begin(child)

    play.script = script
    async with supervisor(limits), real_process("sleep", "1000") as process:
        coordinator, worker = play.child("coordinator"), play.child("worker", 1)
        coordinator.send(Heartbeat())
        if hangs == "stopped":
            process.send_signal(signal.SIGSTOP)
            monkeypatch.setattr(worker.process, "pid", process.pid)
        if hangs == "silent from its start":
            worker.process.end(KILLED)
        hung = coordinator if hangs in ("silent", "engine thread") else worker
        number = 2 if hangs == "silent from its start" else 1
        await play.spawned(hung.identity.role, hung.identity.index, number)
        killed = play.child(hung.identity.role, hung.identity.index, number - 1)
        assert killed.child.hung == (" in its engine thread" if hangs == "engine thread" else "")
        assert killed.process.signals == [signal.SIGKILL]
        if hangs == "stopped":  # that is no fault of what it was computing
            assert WorkerDied("worker", 1, 0, False, IDLE) in coordinator.received
