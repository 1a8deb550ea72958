"""Restarts of an engine's processes, on stand-ins for the processes."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, cast

import pytest
from waiting import until

from launch.errors import EngineFailed, StartFailed
from launch.processes import children
from launch.processes.children import Child, terminate
from launch.processes.group import ProcessGroup
from launch.processes.limits import Limits
from launch.processes.monitor import ProcessMonitor
from launch.processes.task_guard import TaskGuard
from protocol.messages import Failed, Hung, Ready, WorkerDied, WorkerUp
from protocol.sockets import Identity
from shm.control import IDLE, ControlSegment
from shm.segment import unlink

KILLED, CRASHED = -signal.SIGKILL, -signal.SIGSEGV
NEVER = Limits(check_interval=1e6)


class StandInProcess:
    """A process that runs until a test says otherwise."""

    pid = 1 << 30  # no process has it

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.signals: list[int] = []

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        self.returncode = -number


class StandInGroup:
    def __init__(self) -> None:
        self.events: list[Any] = []  # starts, messages and kills, in order
        self.children: dict[Identity, Child] = {}
        self.threads: dict[str, int] = {}

    async def start(self, identity: Identity, config: dict[str, Any], threads: int) -> Child:
        process = cast(asyncio.subprocess.Process, StandInProcess())
        child = self.children[identity] = Child(identity, process, -1, b"")
        self.events.append((identity.role, identity.index, identity.incarnation))
        self.threads[identity.role] = threads
        assert config == {"of": identity.role}
        return child

    async def send(self, identity: Identity, message: object) -> bool:
        self.events.append((identity.incarnation, message))
        return True

    def kill(self, *roles: str) -> None:
        self.events.append(("kill", *roles))

    async def wait_killed(self, *roles: str) -> None:
        self.events.append(("killed", *roles))


class Engine:
    """A coordinator, two workers and a prefetcher, whose messages and exits a test makes."""

    def __init__(self, limits: Limits) -> None:
        name = f"/tandem-test-monitor-{uuid.uuid4().hex[:12]}"
        self.control, self.group, self.guard = ControlSegment.create(name, 2), StandInGroup(), TaskGuard()
        group, note = cast(ProcessGroup, self.group), lambda: self.events.append("on_restart")
        self.monitor = ProcessMonitor(group, self.guard, self.control, note, limits)
        self.slots = {
            (role, index): self.monitor.add_slot(role, index, partial(dict, of=role), 3 + index)
            for role, index in (("coordinator", 0), ("worker", 0), ("worker", 1), ("prefetcher", 0))
        }

    @property
    def events(self) -> list[Any]:
        return self.group.events

    def child(self, role: str, index: int = 0, incarnation: int = 0) -> Child:
        return self.group.children[Identity(role, index, incarnation)]

    def message(self, child: Child, message: object) -> None:
        child.last_message += 1.0
        self.monitor.on_message(child, message)

    def ready(self, child: Child) -> None:
        self.message(child, Ready(1, *dataclasses.astuple(child.identity), 9, "f" * 64))
        child.ready.set()

    def up(self, role: str, index: int, incarnation: int) -> None:
        self.message(self.child("coordinator"), WorkerUp(role, index, incarnation))

    def signals(self, *identity: Any) -> list[int]:
        return cast(StandInProcess, self.child(*identity).process).signals

    def exit(self, code: int, *identity: Any) -> None:
        child = self.child(*identity)
        cast(StandInProcess, child.process).returncode = code
        self.monitor.on_exit(child, code)

    async def start(self) -> asyncio.Task[None]:
        """The start, in which every process has been started and none has sent its Ready."""
        starting = asyncio.create_task(self.monitor.start())
        await self.started("prefetcher", 0, 0)
        return starting

    async def started(self, *identity: Any) -> Child:
        await until(lambda: Identity(*identity) in self.group.children, 10)
        return self.child(*identity)


@asynccontextmanager
async def engine(limits: Limits = NEVER, ready: bool = True) -> AsyncIterator[Engine]:
    made = Engine(limits)
    made.guard.enter()
    error: BaseException | None = None
    try:
        if ready:
            starting = await made.start()
            for child in list(made.group.children.values()):
                assert not starting.done()
                made.ready(child)
            await starting
            made.events.clear()
        yield made
    except asyncio.CancelledError as e:
        error = e
    finally:
        made.monitor.stop()
        await made.guard.end_tasks()
        made.control.close()
        unlink(made.control.segment.name)
    made.guard.raise_failure(error)


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


async def test_start_waits_for_every_process_and_restarts_none_of_them() -> None:
    async with engine(ready=False) as e:
        starting = await e.start()
        assert e.events == [(r, i, 0) for r, i in (("coordinator", 0), ("worker", 0), ("worker", 1))] + [
            ("prefetcher", 0, 0)
        ]
        assert e.group.threads == {"coordinator": 3, "worker": 4, "prefetcher": 3}
        assert (e.monitor.has("worker"), e.monitor.has("loader")) == (True, False)
        for child in list(e.group.children.values())[1:]:
            e.ready(child)
        await asyncio.sleep(0.01)
        assert not starting.done()
        e.ready(e.child("coordinator"))
        await starting


@pytest.mark.parametrize(("role", "code"), [("worker", 1), ("prefetcher", 0), ("coordinator", KILLED)])
@pytest.mark.parametrize("usage", [True, False])
async def test_exit_during_the_start_fails_it_with_the_reason(role: str, code: int, usage: bool) -> None:
    async with engine(ready=False) as e:
        starting = await e.start()
        e.child(role).failed.set_result(Failed(role, "no such model", usage))
        e.exit(code, role, 0, 0)
        with pytest.raises(StartFailed, match=r"^no such model$") as failed:
            await starting
        assert failed.value.exit_code == (2 if usage else 1)


async def test_messages_about_an_earlier_incarnation_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with engine() as e:
        first = e.child("worker", 0)
        e.exit(KILLED, "worker", 0, 0)
        e.message(e.child("coordinator"), Hung("worker", 0, 0))
        second = await e.started("worker", 0, 1)
        assert e.events[0] == (0, WorkerDied("worker", 0, 0, False, IDLE))
        await until(lambda: e.slots["worker", 0].child is second)
        for message in (Hung("worker", 0, 0), WorkerUp("worker", 0, 0), Hung("worker", 7, 0)):
            e.message(e.child("coordinator"), message)
        e.monitor.on_exit(first, KILLED)
        assert (second.up, second.hung, e.signals("worker", 0, 1)) == (False, False, [])
        assert "up again" not in caplog.text
        e.up("worker", 0, 1)
        assert second.up
        assert caplog.text.count("the worker 0 is up again after 0.") == 1
        e.up("worker", 0, 1)
        assert caplog.text.count("up again") == 1
        e.message(e.child("coordinator"), Hung("worker", 0, 1))
        assert (second.hung, e.signals("worker", 0, 1)) == (True, [signal.SIGKILL])
        assert not second.exit_expected
        assert [e.signals("worker", 1, 0), e.signals("prefetcher", 0, 0)] == [[], []]


@pytest.mark.parametrize(
    ("code", "hung", "crashed", "reason"),
    [
        (KILLED, False, False, "the worker 1 was killed by SIGKILL"),
        (-signal.SIGTERM, False, False, "the worker 1 was killed by SIGTERM"),
        (KILLED, True, True, "the worker 1 made no progress and was killed"),
        (CRASHED, False, True, "the worker 1 was killed by SIGSEGV"),
        (0, False, True, "the worker 1 exited with code 0"),
    ],
)
async def test_coordinator_learns_of_an_exit_and_its_work_before_the_restart(
    code: int, hung: bool, crashed: bool, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine() as e:
        for index in (0, 1):
            e.control.line("worker", index).begin(40 + index)
        e.child("worker", 1).hung = hung
        e.exit(code, "worker", 1, 0)
        await e.started("worker", 1, 1)
        assert e.events == [(0, WorkerDied("worker", 1, 0, crashed, 41)), ("worker", 1, 1)]
        assert [e.control.line("worker", index).seq for index in (0, 1)] == [40, IDLE]
        assert f"{reason}; it is being restarted" in caplog.text


pauses: list[int] = []  # early exits before each


class Recorded(Limits):
    def pause(self, early_exits: int) -> float:
        pauses.append(early_exits)
        return 0.0


async def test_exits_before_any_work_end_the_engine_when_too_many_in_a_row() -> None:
    pauses.clear()
    line = "^the worker 0 exited with code 3, 3 times in a row before it could work; the engine has been s"
    with pytest.raises(EngineFailed, match=line):  # noqa: PT012 - from the end of the block
        async with engine(Recorded(check_interval=1e6, futile_exits=3)) as e:
            for incarnation in range(6):
                child = await e.started("worker", 0, incarnation)
                await until(lambda child=child: e.slots["worker", 0].child is child)
                if incarnation == 2:
                    e.up("worker", 0, incarnation)
                    e.control.line("worker", 0).tick()
                assert e.guard.failure is None
                e.exit(3, "worker", 0, incarnation)
            await asyncio.sleep(5)
    assert pauses == [1, 2, 0, 1, 2]


async def test_crashes_of_workers_that_are_up_but_have_computed_nothing_end_the_engine() -> None:
    """So may an import that follows the first answer; kills from outside do not count."""
    codes = []  # of the exits before the end of the engine
    with pytest.raises(EngineFailed, match=r"^the worker 0 .* 3 times in a row"):  # noqa: PT012
        async with engine(Limits(check_interval=1e6, futile_exits=3, first_pause=0.0)) as e:
            for incarnation, code in enumerate((KILLED,) * 9 + (CRASHED,) * 3):
                child = await e.started("worker", 0, incarnation)
                await until(lambda child=child: e.slots["worker", 0].child is child)
                e.up("worker", 0, incarnation)
                assert e.guard.failure is None
                e.exit(code, "worker", 0, incarnation)
                codes.append(code)
            await asyncio.sleep(5)
    assert codes == [KILLED] * 9 + [CRASHED] * 3


@pytest.mark.parametrize(("code", "paused"), [(KILLED, [1] * 8), (3, list(range(1, 9)))])
async def test_exits_of_the_young_do_not_end_an_engine_whose_workers_compute(
    code: int, paused: list[int]
) -> None:
    """After a kill from outside a worker is restarted at once, after an exit of its own with pauses."""
    pauses.clear()
    with pytest.raises(EngineFailed, match=r"^the worker 0 .* 3 times in a row"):  # noqa: PT012
        async with engine(Recorded(check_interval=1e6, futile_exits=3)) as e:
            for incarnation in range(10):
                child = await e.started("worker", 0, incarnation)
                await until(lambda child=child: e.slots["worker", 0].child is child)
                if incarnation < 8:
                    e.control.line("worker", 1).tick()
                assert e.guard.failure is None
                e.exit(code, "worker", 0, incarnation)
            await asyncio.sleep(5)
    assert pauses[:8] == paused


async def test_gateway_without_its_port_is_tried_again_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    """Also while the whole engine is restarted, which does not wait for it."""
    pauses.clear()
    failed = Failed("gateway", "cannot bind 127.0.0.1:9: Address already in use", usage=True)
    async with engine(Recorded(check_interval=1e6, futile_exits=3), ready=False) as e:
        e.slots["gateway", 0] = e.monitor.add_slot("gateway", 0, partial(dict, of="gateway"), 1)
        starting = await e.start()
        for child in [await e.started(*slot, 0) for slot in e.slots]:
            e.ready(child)
        await starting
        for incarnation in range(6):
            child = await e.started("gateway", 0, incarnation)
            await until(lambda child=child: e.slots["gateway", 0].child is child)
            if incarnation:
                child.failed.set_result(failed)
            e.exit(2 if incarnation else KILLED, "gateway", 0, incarnation)
        await e.started("gateway", 0, 6)
        assert pauses == [0, 1, 2, 3, 4, 5]
        assert caplog.text.count("Address already in use; until it can, it is tried again") == 1
        e.exit(KILLED, "coordinator", 0, 0)
        for role, index in list(e.slots)[:-1]:
            e.ready(await e.started(role, index, 1))
        await until(lambda: "the engine is up again" in caplog.text)


def test_pauses_between_restarts_double_up_to_the_longest() -> None:
    pauses = [Limits(first_pause=0.1, longest_pause=1.0).pause(exits) for exits in range(8)]
    assert pauses == [0, 0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert Limits(longest_pause=5.0).pause(10_000) == 5.0


async def test_restarted_coordinator_with_wrong_usage_ends_the_engine_at_once() -> None:
    line = "^the coordinator failed: no such device; the engine has been stopped$"
    with pytest.raises(EngineFailed, match=line):  # noqa: PT012 - from the end of the block
        async with engine() as e:
            e.child("coordinator").failed.set_result(Failed("coordinator", "no such device", True))
            e.exit(2, "coordinator", 0, 0)
            await asyncio.sleep(5)


async def test_restart_of_the_engine_replaces_a_pending_restart_of_a_worker(caplog) -> None:
    caplog.set_level(logging.INFO)
    async with engine(Limits(check_interval=1e6, first_pause=0.05)) as e:
        for incarnation in (0, 1):
            child = await e.started("worker", 0, incarnation)
            await until(lambda child=child: e.slots["worker", 0].child is child)
            e.exit(KILLED, "worker", 0, incarnation)  # the second time it is restarted after a pause
        e.exit(KILLED, "coordinator", 0, 0)
        await e.started("prefetcher", 0, 1)
        await asyncio.sleep(0.1)
        assert max(i.incarnation for i in e.group.children if (i.role, i.index) == ("worker", 0)) == 2
        e.up("worker", 0, 2)
        assert "worker 0 is up again" not in caplog.text


async def test_expected_exits_and_exits_at_the_end_restart_nothing() -> None:
    async with engine() as e:
        e.child("worker", 0).exit_expected = True
        e.exit(KILLED, "worker", 0, 0)
        e.monitor.stop()
        e.exit(KILLED, "worker", 1, 0)
        e.exit(KILLED, "coordinator", 0, 0)
        await asyncio.sleep(0.02)
        assert e.events == []


async def test_late_start_ends_when_the_engine_is_restarted_meanwhile() -> None:
    async with engine() as e:
        slot = e.monitor.add_slot("loader", 0, partial(dict, of="loader"), 1)
        late = asyncio.create_task(e.monitor.start_late(slot))
        await e.started("loader", 0, 0)
        assert not late.done()
        e.exit(KILLED, "coordinator", 0, 0)
        await asyncio.wait_for(late, 5)
        await e.started("loader", 0, 1)


async def test_processes_that_send_nothing_from_their_start_are_killed_after_the_longer_time() -> None:
    async with engine(Limits(check_interval=0.002, silent_checks=3, start_checks=6), ready=False) as e:
        starting = await e.start()
        await until(lambda: all(child.hung for child in e.group.children.values()))
        assert [child.silent_checks for child in e.group.children.values()] == [6] * 4
        starting.cancel()


async def test_processes_that_do_not_exit_are_terminated_and_then_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(children, "STOP_LIMIT", 0.1)
    monkeypatch.setattr(children, "TERM_LIMIT", 0.1)
    stubborn = ("sh", "-c", "trap '' TERM; echo; while read line; do :; done")
    async with (
        real_process("true") as first,
        real_process("sleep", "1000") as second,
        real_process(*stubborn) as third,
    ):
        assert third.stdout is not None
        await third.stdout.readline()  # it ignores SIGTERM from now on
        made = [Child(Identity("worker", i, 0), p, -1, b"") for i, p in enumerate((first, second, third))]
        await terminate(made)
        assert [await asyncio.wait_for(child.wait_exit(), 10) for child in made] == [
            0,
            -signal.SIGTERM,
            KILLED,
        ]
        assert not any(child.exit_expected for child in made)
        made[0].kill()  # it has exited
        assert made[0].exit_expected


@pytest.mark.parametrize("ready", [True, False])
async def test_coordinator_whose_engine_thread_hangs_is_killed_though_it_sends_heartbeats(
    ready: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its thread makes progress for twice the limit, and then none. Before its Ready it may take longer."""
    async with engine(Limits(check_interval=0.005, engine_silence=0.1), ready) as e:
        starting = None if ready else await e.start()
        coordinator, line = e.child("coordinator"), e.control.line("coordinator", 0)
        for pause in range(100):
            coordinator.last_message += 1.0
            if pause < 50:
                line.tick()
                assert not coordinator.hung
            await asyncio.sleep(0.004)
        assert coordinator.hung == ready
        assert not any(e.child(*slot).hung for slot in e.slots if slot != ("coordinator", 0))
        if starting is not None:
            starting.cancel()
        else:
            e.exit(KILLED, "coordinator", 0, 0)
            await e.started("coordinator", 0, 1)
            line = "the coordinator made no progress in its engine thread for 0.1 s and was killed; the"
            assert line in caplog.text


@pytest.mark.parametrize("hangs", ["silent coordinator", "stopped worker", "silent start", None])
async def test_hung_processes_are_killed_after_so_many_checks(hangs: str | None, monkeypatch) -> None:
    limits = Limits(check_interval=0.002, silent_checks=8, stopped_checks=5, start_checks=12)
    count, checks = Child.count_check, 0

    def counted(child: Child) -> None:
        nonlocal checks
        checks += 1
        if child.identity.role == "coordinator" and hangs != "silent coordinator":
            child.last_message += 1.0
        count(child)

    monkeypatch.setattr(Child, "count_check", counted)
    stopped = Identity("worker", 1, 0) if hangs == "stopped worker" else None
    async with engine(limits) as e, real_process("sleep", "1000") as process:
        e.child("worker", 1).process = process
        if stopped:
            process.send_signal(signal.SIGSTOP)
        if hangs == "silent start":
            e.exit(KILLED, "worker", 0, 0)
            await e.started("worker", 0, 1)
        begun = checks
        await until(lambda: any(c.hung for c in e.group.children.values()) or checks > begun + 100)
        if stopped:
            assert await asyncio.wait_for(process.wait(), 10) == KILLED
        else:
            assert process.returncode is None
        hung = [(c.identity, c.silent_checks, c.stopped_checks) for c in e.group.children.values() if c.hung]
    if hangs == "silent coordinator":
        assert hung == [(Identity("coordinator", 0, 0), 8, 0)]
    elif hangs == "silent start":
        assert hung == [(Identity("worker", 0, 1), 12, 0)]
    else:  # a worker that has sent its Ready may be silent
        assert [(identity, checks) for identity, _, checks in hung] == ([(stopped, 5)] if stopped else [])
