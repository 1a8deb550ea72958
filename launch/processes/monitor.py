"""Keeps an engine's processes at work: who dies is replaced, and an engine that cannot be kept ends in one
line.

A worker or the prefetcher that ends, or hangs, gets a successor, at once at first and then after growing
pauses; the coordinator is told and gives its work to others. The coordinator's end, or its silence, ends
workers and prefetcher too, and all begin anew on the same store.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from launch.errors import EngineDied, StartFailed
from launch.processes.children import Child, title
from launch.processes.group import ProcessGroup
from launch.processes.task_guard import TaskGuard
from protocol.messages import Heartbeat, Hung, Ready, WorkerDied, WorkerUp
from protocol.sockets import Identity
from shm.control import ControlSegment

log = logging.getLogger("tandem")

READY_LIMIT = 300.0  # seconds for coordinator, workers and prefetcher: backbone read, costs measured
STRIKES = 8  # lives of one worker or of the prefetcher in a row that ended before they were of any use
RESTARTS = 5  # lives of the coordinator in a row that ended early
EARLY = 30.0  # seconds after its Ready until which an end of the coordinator is early
PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds before the third life, doubled with each more
LOOK = 0.5  # seconds between two looks at who gives signs of life
STOPPED = 6  # looks in a row that find a process stopped: it hangs
SILENT = 10  # looks in a row without a sign of life of a coordinator that was ready: it hangs
UNBORN = 120  # looks until a process must have said something: importing what it runs takes a while

COORDINATOR = "coordinator"
Told = Callable[[], dict[str, Any]]


@dataclass
class ProcessSlot:
    """A place among the processes, taken by one life after the other."""

    role: str
    index: int
    told: Told
    threads: int
    incarnation: int = -1
    child: Child | None = None
    strikes: int = 0
    died: float | None = None  # when the life before this one ended
    ready: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def title(self) -> str:
        return title(Identity(self.role, self.index, 0))

    def fail(self, error: Exception) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # seen, also where nobody waits for it any more


class ProcessMonitor:
    """The posts of one engine. `on_restart` is called between the old coordinator's end and the new one's
    begin."""

    def __init__(
        self, crew: ProcessGroup, guard: TaskGuard, control: ControlSegment, on_restart: Callable[[], None]
    ) -> None:
        self._crew = crew
        self._guard = guard
        self._control = control
        self._on_restart = on_restart
        self._posts: dict[tuple[str, int], ProcessSlot] = {}
        self._began = False  # all were ready once
        self._stopping = False
        self._restarts = 0  # of all; who waits to fill one post gives way to one
        self._end: asyncio.Future[tuple[Child, int]]  # of the coordinator's present life

    def post(self, role: str, index: int, told: Told, threads: int) -> ProcessSlot:
        """One more post; `told` is what its next life is to be told."""
        made = self._posts[role, index] = ProcessSlot(role, index, told, threads)
        return made

    def has(self, role: str) -> bool:
        return any(post.role == role for post in self._posts.values())

    async def begin(self) -> None:
        """Start all posts and wait until each is ready. Raises StartFailed."""
        for post in self._posts.values():
            await self._fill(post)
        self._guard.keep(self._watch_over())
        await self._all_ready()
        self._began = True
        self._guard.keep(self._tend_coordinator(time.monotonic()))

    async def begin_late(self, post: ProcessSlot) -> None:
        """Start a post that was not needed at first, and wait until it is ready. Raises StartFailed."""
        await self._fill(post)
        await self._all_ready()

    def stop(self) -> None:
        """Nobody is replaced from now on."""
        self._stopping = True

    # --- what the children say ---------------------------------------------------------------------------

    def heard(self, child: Child, message: object) -> None:
        """A child's message, if it is about who lives."""
        match message:
            case Ready():
                post = self._post_of(child)
                if post is not None and not post.ready.done():
                    post.ready.set_result(None)
            case WorkerUp():
                self._came_up(self._posts.get((message.role, message.index)), message.incarnation)
            case Hung():
                self._end_hung(self._posts.get((message.role, message.index)), message.incarnation)
            case Heartbeat():
                pass  # that it was heard is noted

    def ended(self, child: Child, code: int) -> None:
        """A child has ended: replace it, unless that was expected."""
        post = self._post_of(child)
        if post is None or child.stopping or self._stopping:
            return
        post.child = None
        usage = child.failed.done() and child.failed.result().usage
        if not self._began and (code >= 0 or post.role == COORDINATOR):
            post.fail(StartFailed(child.epitaph(code), usage))
        elif post.role == COORDINATOR:
            self._end.set_result((child, code))
        else:
            self._guard.keep(self._replace(post, child, code))

    # --- replacing ---------------------------------------------------------------------------------------

    async def _fill(self, post: ProcessSlot) -> None:
        post.incarnation += 1
        if post.role == COORDINATOR:
            self._end = asyncio.get_running_loop().create_future()
        else:
            self._control.line(post.role, post.index).end()
        if post.child is not None:
            post.child.end_now()
        identity = Identity(post.role, post.index, post.incarnation)
        child = await self._crew.spawn(identity, post.told(), post.threads)
        if post.incarnation == identity.incarnation:
            post.child = child
        else:  # all began anew meanwhile
            child.end_now()

    async def _all_ready(self) -> None:
        awaited = {post.ready: post for post in self._posts.values()}  # a restart waits for others
        done, late = await asyncio.wait(awaited, timeout=READY_LIMIT, return_when=asyncio.FIRST_EXCEPTION)
        for ready in done:
            ready.result()
        if late:
            who = ", ".join(post.title for ready, post in awaited.items() if ready in late)
            raise StartFailed(f"not ready after {READY_LIMIT:g} s: {who}")

    async def _replace(self, post: ProcessSlot, child: Child, code: int) -> None:
        """A worker or the prefetcher."""
        post.died = time.monotonic()
        crashed = child.hung or code not in (-signal.SIGKILL, -signal.SIGTERM)
        seq = self._control.line(post.role, post.index).seq
        await self._crew.tell(
            self._coordinator, WorkerDied(post.role, post.index, post.incarnation, crashed, seq)
        )
        post.strikes = 0 if child.up else post.strikes + 1
        if post.strikes >= STRIKES:
            self._guard.fail(
                EngineDied(
                    f"{_how(child, code)}, the {STRIKES}th time in a row before it could work;"
                    " the engine has been stopped"
                )
            )
            return
        log.warning(f"{_how(child, code)}; it is being replaced")
        restarts = self._restarts
        await asyncio.sleep(_pause(post.strikes))
        if not self._stopping and restarts == self._restarts:
            await self._fill(post)

    async def _tend_coordinator(self, ready: float) -> None:
        """Begin anew whenever the coordinator has ended; `ready`: when it became ready."""
        early = 0  # lives in a row
        while True:
            child, code = await self._end
            ended = time.monotonic()
            early = 1 if ended - ready > EARLY else early + 1
            if early >= RESTARTS or (child.failed.done() and child.failed.result().usage):
                again = f", the {early}th time in a row" if early >= RESTARTS else ""
                self._guard.fail(EngineDied(f"{_how(child, code)}{again}; the engine has been stopped"))
                return
            log.warning(f"{_how(child, code)}; the engine is being restarted, its store is kept")
            await self._begin_anew(_pause(early))
            done = asyncio.ensure_future(self._all_ready())
            await asyncio.wait((done, self._end), return_when=asyncio.FIRST_COMPLETED)
            ready = time.monotonic()
            if self._end.done():
                done.cancel()
            else:
                done.result()
                log.warning(f"the engine is back after {ready - ended:.1f} s")

    async def _begin_anew(self, pause: float) -> None:
        self._restarts += 1
        self._crew.kill("worker", "prefetcher")
        await self._crew.gone("worker", "prefetcher")
        self._on_restart()
        await asyncio.sleep(pause)
        for post in self._posts.values():
            if not post.ready.done():
                post.ready.set_result(None)  # who waits for this life is not to wait for ever
            post.ready = asyncio.get_running_loop().create_future()
            post.died = None
            if not self._stopping:
                await self._fill(post)

    async def _watch_over(self) -> None:
        """End who hangs and cannot be found out by those who wait for its work: who is stopped, who says
        nothing after its birth, and a coordinator that gives no sign of life. Only time in which we ran
        ourselves counts."""
        while True:
            await asyncio.sleep(LOOK)
            for post in self._posts.values():
                if post.child is not None and post.child.alive and self._hangs(post, post.child):
                    post.child.hung = True
                    post.child.signal(signal.SIGKILL)

    def _hangs(self, post: ProcessSlot, child: Child) -> bool:
        child.stopped_looks = child.stopped_looks + 1 if child.is_stopped else 0
        news = child.heard != child.last_heard
        child.last_heard = child.heard
        child.silent_looks = 0 if news else child.silent_looks + 1
        beats = post.role == COORDINATOR and child.ready.is_set()
        silent = child.silent_looks >= (SILENT if beats else UNBORN)
        return child.stopped_looks >= STOPPED or (silent and (beats or child.heard == 0.0))

    def _came_up(self, post: ProcessSlot | None, incarnation: int) -> None:
        if post is None or post.child is None or post.incarnation != incarnation or post.child.up:
            return
        post.child.up = True
        if post.died is not None:
            log.info(f"the {post.title} is back after {time.monotonic() - post.died:.1f} s")
            post.died = None

    def _end_hung(self, post: ProcessSlot | None, incarnation: int) -> None:
        if post is not None and post.child is not None and post.incarnation == incarnation:
            post.child.hung = True
            post.child.signal(signal.SIGKILL)

    @property
    def _coordinator(self) -> Identity:
        return Identity(COORDINATOR, 0, self._posts[COORDINATOR, 0].incarnation)

    def _post_of(self, child: Child) -> ProcessSlot | None:
        post = self._posts.get((child.identity.role, child.identity.index))
        return post if post is not None and post.child is child else None


def _how(child: Child, code: int) -> str:
    """One line: which child ended, and how."""
    text = child.epitaph(code)
    return f"the {title(child.identity)} failed: {text}" if child.failed.done() else text


def _pause(strikes: int) -> float:
    """Seconds before the next life: none at first."""
    return 0.0 if strikes < 2 else min(LONGEST_PAUSE, PAUSE * 2.0 ** (strikes - 2))
