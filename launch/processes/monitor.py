"""Restarts an engine's processes when they exit or hang; where that is no use, ends the engine with one line.
A worker or the prefetcher is restarted at once at first, then after growing pauses; the coordinator receives
a WorkerDied and gives its work to others. Exits before any work, or by a crash before anything was computed,
end the engine where no worker computes anything between them. Kills from outside, which may meet any process
in its start, end it only where it has done no work for minutes of them. The gateway for HTTP is restarted
for ever: only its clients notice, and its file of API keys may be mended. When the coordinator exits or
hangs, all others but the gateway are killed and restarted on the same store: the answers of the gateway's
clients go on when the coordinator is back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from launch.errors import EngineFailed, StartFailed
from launch.processes.children import Child, ProcessGroup, TaskGuard, title
from launch.terminal.log import notice
from protocol.messages import Hung, Ready, WorkerDied, WorkerUp
from protocol.sockets import Identity
from shm.control import ControlSegment

log = logging.getLogger("tandem")

COORDINATOR = "coordinator"
GATEWAY = "gateway"
READER = "reader"
ALONE = (COORDINATOR, GATEWAY)  # roles that no other process waits for: they send heartbeats
IN_ENGINE = " in its engine thread"  # where a coordinator hangs
MOST_SUSPECTS = 1024  # requests
COUNTED = ("coordinator", "worker", "prefetcher", "reader")  # roles with a line in the control segment


@dataclass(frozen=True)
class Limits:
    """Limits of the supervisor's waits for its children, and of their restarts: in seconds, or in checks in
    a row, one every `check_interval`, so that only time counts in which the supervisor itself was running."""

    loader_silence: float = 300.0  # without a message; a cold disk may take long for the first bytes
    ready: float = 300.0  # of coordinator, workers and prefetcher: backbone read, costs measured
    check_interval: float = 0.5
    stopped_checks: int = 6  # of a process that SIGSTOP or the like has stopped
    silent_checks: int = 10  # of a coordinator that sends no heartbeat after its Ready
    engine_checks: int = 120  # of a coordinator whose engine thread makes no progress after its Ready
    start_checks: int = 120  # of a process that has sent nothing yet: its imports take a while
    early: float = 30.0  # after Ready: a coordinator that exits before that has exited early
    coordinator_exits: int = 5  # number of early exits in a row that end the engine
    futile_exits: int = 8  # in a row, of one worker or prefetcher before it worked, while no worker did
    futile_kills: float = 300.0  # seconds of that many kills from outside, while the engine did no work
    first_pause: float = 0.1  # before the second restart in a row, doubled before each further one
    longest_pause: float = 5.0
    kill_pause: float = 1.0  # the longest after a kill from outside, which says little about the next one
    killed_reader: float = 120.0  # that has not exited: the kernel waits for its disk

    def pause(self, early_exits: int) -> float:
        """Returns the seconds before the next restart: none before the first."""
        return min(self.longest_pause, self.first_pause * 2.0 ** min(early_exits - 2, 64)) * (early_exits > 1)


@dataclass
class Kills:
    """Kills from outside in a row, between which the engine has made no progress. It takes time, too, to make
    them too many: who kills ten processes a second on a busy machine meets most of them in their start."""

    count: int = 0
    since: float = 0.0  # monotonic seconds
    progress: int = 0

    def add(self, progress: int) -> None:
        if self.count == 0 or progress != self.progress:
            self.count, self.since, self.progress = 0, time.monotonic(), progress
        self.count += 1

    def go_on(self, progress: int) -> bool:
        """Returns whether the engine has made no progress since the last one."""
        return self.count > 0 and progress == self.progress

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since if self.count else 0.0

    def too_many(self, limits: Limits) -> bool:
        """Returns whether something kills the process each time, as a system that is short of memory does."""
        return self.count >= limits.futile_exits and self.seconds >= limits.futile_kills

    def pause(self, limits: Limits) -> float:
        """Returns the seconds before the next restart, which grow with the time that this takes already."""
        return min(limits.kill_pause, self.seconds / 8)

    def __str__(self) -> str:
        return (
            f"{self.count} times in {self.seconds:.0f} s in which the engine did no work: perhaps the system"
            " is short of memory"
        )


@dataclass
class ProcessSlot:
    """One process through all its generations. `config`: makes the next one's configuration map."""

    role: str
    index: int
    config: Callable[[], dict[str, Any]]
    threads: int
    fds: tuple[int, ...] = ()  # of the supervisor, which it gets
    generation: int = -1
    child: Child | None = None
    ticks: int = 0  # of its line in the control segment, when the present generation was started
    early_exits: int = 0  # in a row, by themselves: of processes that had not done any work
    futile_exits: int = 0  # of these, the last ones between which the engine made no progress
    progress: int = 0  # of the engine, at the last one
    kills: Kills = field(default_factory=Kills)  # of processes that were not up yet
    reported: str = ""  # the reason of the previous exit
    exited_at: float | None = None  # the previous generation, until this one does its work
    ready: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def title(self) -> str:
        return title(Identity(self.role, self.index, 0))

    def count_exit(self, early: bool, outside: bool, progress: int) -> None:
        """Count an exit. `early`: before it had done any work; `outside`: by a signal from outside;
        `progress`: the engine's until now."""
        if not early:
            self.early_exits, self.futile_exits, self.kills = 0, 0, Kills()
        elif outside:
            self.kills.add(progress)
        else:
            self.early_exits += 1
            self.futile_exits = self.futile_exits + 1 if progress == self.progress else 1
        self.progress = progress

    def pause(self, outside: bool, limits: Limits) -> float:
        """Returns the seconds before the next restart, after an exit that was counted."""
        return self.kills.pause(limits) if outside else limits.pause(self.early_exits)


class ProcessMonitor:
    """One engine's slots. `on_restart`: called between a coordinator's exit and the next one's start."""

    def __init__(
        self,
        group: ProcessGroup,
        guard: TaskGuard,
        control: ControlSegment,
        on_restart: Callable[[], None],
        limits: Limits,
    ) -> None:
        self._group = group
        self._guard = guard
        self._control = control
        self._on_restart = on_restart
        self._limits = limits
        self._slots: dict[tuple[str, int], ProcessSlot] = {}
        self._started = False  # all slots have been ready
        self._stopping = False
        self.suspects: dict[int, int] = {}  # requests by their key: crashes at which each was being computed
        self._engine_restarts = 0  # a pending restart of one slot is dropped when all are restarted
        self._coordinator_exit: asyncio.Future[tuple[Child, int]]  # of the present generation

    def add_slot(
        self,
        role: str,
        index: int,
        config: Callable[[], dict[str, Any]],
        threads: int,
        fds: tuple[int, ...] = (),
    ) -> ProcessSlot:
        slot = self._slots[role, index] = ProcessSlot(role, index, config, threads, fds)
        return slot

    @property
    def coordinator(self) -> Identity:
        """Returns the identity of the present coordinator."""
        return Identity(COORDINATOR, 0, max(0, self._slots[COORDINATOR, 0].generation))

    def has(self, role: str) -> bool:
        return any(slot.role == role for slot in self._slots.values())

    async def start(self) -> None:
        """Start the processes of all other slots and wait until each is ready. Raises StartFailed."""
        for slot in list(self._slots.values()):
            if slot.generation < 0:
                await self.start_slot(slot)
        self._guard.keep(self._kill_hung_children())
        await self._wait_ready()
        self._started = True
        self._guard.keep(self._restart_coordinator(time.monotonic()))

    async def start_late(self, *slots: ProcessSlot) -> None:
        """Start slots that were added after `start`, and wait until they are ready. Raises StartFailed."""
        for slot in slots:
            await self.start_slot(slot)
        await self._wait_ready()

    def stop(self) -> None:
        """Restart nothing from now on."""
        self._stopping = True

    # --- events ------------------------------------------------------------------------------------------

    def on_message(self, child: Child, message: object) -> None:
        match message:
            case Ready():
                slot = self._slot_of(child)
                if slot is not None and not slot.ready.done():
                    slot.ready.set_result(None)
                if slot is not None and slot.role == GATEWAY:  # the others begin when the coordinator says so
                    self._on_worker_up(slot, child)
            case WorkerUp() | Hung():
                slot = self._slots.get((message.role, message.index))
                if slot is not None and slot.child is not None and slot.generation == message.generation:
                    if isinstance(message, Hung):
                        slot.child.kill_hung(stopped=_is_stopped(slot.child))
                    else:
                        self._on_worker_up(slot, slot.child)

    def on_exit(self, child: Child, code: int) -> None:
        slot = self._slot_of(child)
        if slot is None or child.exit_expected or self._stopping:
            return
        slot.child = None
        if not self._started and (failure := child.start_failure(code)) is not None:
            self._guard.fail(failure)
        elif slot.role == COORDINATOR:
            self._coordinator_exit.set_result((child, code))
        else:
            self._guard.keep(self._restart_child(slot, child, code))

    def _on_worker_up(self, slot: ProcessSlot, child: Child) -> None:
        child.up = True
        if slot.exited_at is not None:
            notice(f"the {slot.title} is up again after {time.monotonic() - slot.exited_at:.1f} s")
            slot.exited_at = None

    # --- starts and restarts -----------------------------------------------------------------------------

    async def start_slot(self, slot: ProcessSlot) -> None:
        """Start the next generation of a slot's process, unless the engine stops. Raises StartFailed."""
        if self._stopping:
            return
        slot.generation += 1
        if slot.role == COORDINATOR:
            self._coordinator_exit = asyncio.get_running_loop().create_future()
        if slot.role in COUNTED:
            line = self._control.line(slot.role, slot.index)
            line.end()
            slot.ticks = line.ticks
        if slot.role == COORDINATOR:
            self._control.requests = ()
        if slot.child is not None:
            slot.child.kill()
        identity = Identity(slot.role, slot.index, slot.generation)
        child = await self._group.start(identity, slot.config(), slot.threads, slot.fds)
        if slot.generation == identity.generation:
            slot.child = child
        else:  # the whole engine was restarted meanwhile
            child.kill()

    async def _wait_ready(self) -> None:
        # A restart replaces the futures. Local clients do not wait for a restarted gateway.
        slots = {
            slot.ready: slot for slot in self._slots.values() if not (slot.role == GATEWAY and self._started)
        }
        limit = self._limits.ready
        done, pending = await asyncio.wait(slots, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
        for ready in done:
            ready.result()
        if pending:
            late = ", ".join(slot.title for ready, slot in slots.items() if ready in pending)
            raise StartFailed(f"not ready after {limit:g} s: {late}")

    async def _restart_child(self, slot: ProcessSlot, child: Child, code: int) -> None:
        slot.exited_at = time.monotonic()
        outside = child.killed_from_outside(code)
        line = self._control.line(slot.role, slot.index) if slot.role in COUNTED else None
        if slot.role != GATEWAY:
            seq = line.seq if line is not None else -1
            died = WorkerDied(slot.role, slot.index, slot.generation, not outside, seq)
            await self._group.send(self.coordinator, died)
        # A worker is up before it has imported all that it may need; what it computes shows it works.
        idle = line is not None and line.ticks == slot.ticks
        slot.count_exit(not child.up or (idle and not outside), outside, self._progress())
        reason = _exit_line(child, code)
        engine_restarts = self._engine_restarts
        while slot.role == GATEWAY or not self._give_up(slot):
            if slot.early_exits + slot.kills.count <= 1 or reason != slot.reported:
                log.warning(f"{reason}; it is being restarted")
            slot.reported = reason
            await asyncio.sleep(slot.pause(outside, self._limits))
            if self._stopping or engine_restarts != self._engine_restarts:
                return
            try:
                await self.start_slot(slot)
                return
            except StartFailed as e:  # no memory or descriptor for another process, maybe only for a moment
                reason, outside = str(e), False
                slot.count_exit(True, outside, self._progress())
        nth = str(slot.kills) if outside else f"{slot.futile_exits} times in a row before it could work"
        self._guard.fail(EngineFailed(f"{reason}, {nth}; the engine has been stopped"))

    def _give_up(self, slot: ProcessSlot) -> bool:
        return slot.futile_exits >= self._limits.futile_exits or slot.kills.too_many(self._limits)

    def _progress(self) -> int:
        """Tiles and Works that the workers have computed, and what clients were answered."""
        lines = (self._control.line(s.role, s.index) for s in self._slots.values() if s.role == "worker")
        return sum(line.ticks for line in lines) + self._answered()

    def _answered(self) -> int:
        return self._control.line(COORDINATOR, 0).answered

    async def _restart_coordinator(self, ready_at: float) -> None:
        """Restart the whole engine each time the coordinator has exited; `ready_at`: when it became ready."""
        early_exits, kills = 0, Kills()  # in a row: by itself, and from outside
        while True:
            child, code = await self._coordinator_exit
            exited_at = time.monotonic()
            if exited_at - ready_at > self._limits.early:
                early_exits, kills = 0, Kills()
            # It may have waited in vain for processes that somebody kills each time.
            waited = child.failed.done() and self._others_are_killed()
            if outside := child.killed_from_outside(code) or waited:
                # Not by what the workers do: they compute while it starts.
                kills.add(self._answered())
            else:
                early_exits += 1
            reason = _exit_line(child, code)
            too_many = early_exits >= self._limits.coordinator_exits or kills.too_many(self._limits)
            if too_many or (child.failed.done() and child.failed.result().usage):
                nth = str(kills) if outside else f"{early_exits} times in a row"
                more = f", {nth}" if too_many else ""
                self._guard.fail(EngineFailed(f"{reason}{more}; the engine has been stopped"))
                return
            log.warning(f"{reason}; the engine is being restarted, its store is kept")
            if not outside and child.hung != "":  # a silent event loop is no doing of what is computed
                self._suspect()
            limits = self._limits
            await self._restart_all(kills.pause(limits) if outside else limits.pause(early_exits))
            all_ready = asyncio.ensure_future(self._wait_ready())
            await asyncio.wait((all_ready, self._coordinator_exit), return_when=asyncio.FIRST_COMPLETED)
            ready_at = time.monotonic()
            if self._coordinator_exit.done():
                all_ready.cancel()
            else:
                all_ready.result()
                log.warning(f"the engine is up again after {ready_at - exited_at:.1f} s")

    async def _wait_reader_gone(self) -> None:
        """Wait until a killed reader has exited: the next coordinator gives its frames to other experts.
        Raises EngineFailed."""
        limit = self._limits.killed_reader
        if not await self._group.wait_killed(READER, limit=limit):
            why = f"the reader has not exited {limit:g} s after it was killed, its disk does not answer"
            raise EngineFailed(f"{why}; the engine has been stopped")

    def _others_are_killed(self) -> bool:
        """Returns whether processes of the engine were killed from outside in their start, and it has done
        nothing since."""
        others = (slot for slot in self._slots.values() if slot.role not in ALONE)
        return any(slot.kills.go_on(self._progress()) for slot in others)

    def _suspect(self) -> None:
        """Note which requests the coordinator was computing when it crashed, or hung."""
        for key, crashes in self._control.requests:
            self.suspects.pop(key, None)
            self.suspects[key] = crashes + 1
        for key in list(self.suspects)[:-MOST_SUSPECTS]:
            del self.suspects[key]

    async def _restart_all(self, pause: float) -> None:
        self._engine_restarts += 1
        others = dict.fromkeys(slot.role for slot in self._slots.values() if slot.role not in ALONE)
        if others:  # of none, all would be killed, and for good
            self._group.kill(*others)
            await self._group.wait_killed(*others)
        await self._wait_reader_gone()
        self._on_restart()
        await asyncio.sleep(pause)
        slots = [slot for slot in self._slots.values() if slot.role != GATEWAY or slot.child is None]
        for slot in slots:
            if not slot.ready.done():
                slot.ready.set_result(None)  # a task that waits for this generation must not wait for ever
            slot.ready = asyncio.get_running_loop().create_future()
            slot.exited_at = None
        for slot in slots:
            await self.start_slot(slot)

    # --- hangs -------------------------------------------------------------------------------------------

    async def _kill_hung_children(self) -> None:
        """Kill processes that are stopped, silent since their start or without heartbeats, and a coordinator
        whose engine thread makes no progress while its event loop sends heartbeats."""
        while True:
            await asyncio.sleep(self._limits.check_interval)
            for slot in self._slots.values():
                if (child := slot.child) is not None and child.hung is None and child.running:
                    if self._stopped(child):
                        child.kill_hung(stopped=True)
                    elif self._silent(child):
                        child.kill_hung(stopped=_is_stopped(child))
                    elif slot.role == COORDINATOR and child.ready.is_set() and self._engine_hangs(child):
                        child.kill_hung(IN_ENGINE)

    def _silent(self, child: Child) -> bool:
        checks = child.silence.check(child.last_message)
        if child.identity.role in ALONE and child.ready.is_set():
            return checks >= self._limits.silent_checks
        return child.last_message == 0.0 and checks >= self._limits.start_checks

    def _stopped(self, child: Child) -> bool:
        child.stopped_checks = child.stopped_checks + 1 if _is_stopped(child) else 0
        return child.stopped_checks >= self._limits.stopped_checks

    def _engine_hangs(self, coordinator: Child) -> bool:
        ticks = self._control.line(COORDINATOR, 0).ticks
        return coordinator.idleness.check(ticks) >= self._limits.engine_checks

    def _slot_of(self, child: Child) -> ProcessSlot | None:
        slot = self._slots.get((child.identity.role, child.identity.index))
        return slot if slot is not None and slot.child is child else None


def _is_stopped(child: Child) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(child.process.pid).status() == psutil.STATUS_STOPPED)
    return False


def _exit_line(child: Child, code: int) -> str:
    reason = child.exit_reason(code)
    return f"the {title(child.identity)} failed: {reason}" if child.failed.done() else reason
