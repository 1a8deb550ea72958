"""An engine's processes: started, heard, and ended. What an end means is decided by who keeps them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

from launch.processes.children import Child, end, spawn, wait_ended
from launch.processes.control import Control
from launch.processes.task_guard import TaskGuard
from protocol.messages import Failed, Ready, Shutdown
from protocol.sockets import Identity

KILL_LIMIT = 2.0  # seconds for the kernel to end a killed child
LAST_WORDS = 0.5  # seconds that a dead child's last message may still be under way
STOP_ORDER = (("coordinator",), ("worker", "prefetcher"), ("loader",))


class ProcessGroup:
    """The children that live. `on_message(child, message)` is called for all that they say but Failed,
    `on_end(child, code)` when one has ended and everything it said was heard."""

    def __init__(self, control: Control, guard: TaskGuard) -> None:
        self.heard = 0.0  # when a child last said something
        self.on_message: Callable[[Child, object], None] = lambda child, message: None
        self.on_end: Callable[[Child, int], None] = lambda child, code: None
        self._control = control
        self._guard = guard
        self._children: dict[Identity, Child] = {}
        self._over = False  # who is being started just now is not needed any more
        guard.keep(self._listen())

    @property
    def pids(self) -> dict[Identity, int]:
        """Process ids of the children that live."""
        return {identity: child.process.pid for identity, child in self._children.items() if child.alive}

    async def prepare(self, identity: Identity, threads: int) -> Child:
        """Start a child that `spawn` will tell what to do: it imports what it runs meanwhile. Raises
        StartFailed."""
        child = await spawn(identity, threads, self._control.key)
        self._children[identity] = child
        self._guard.keep(self._watch(child))
        if self._over:
            child.end_now()
        return child

    async def spawn(self, identity: Identity, told: dict[str, Any], threads: int) -> Child:
        """Start a child, unless that was prepared and lives, and tell it what to do. Raises StartFailed."""
        child = self._children.get(identity)
        if child is None or not child.alive:
            child = await self.prepare(identity, threads)
        child.tell(told)
        return child

    async def tell(self, identity: Identity, message: object) -> bool:
        """False where this child never connected, or is gone, or does not read."""
        return await self._control.send(identity, message)

    def kill(self, *roles: str) -> None:
        """End these roles' children now, or without roles all; their ends are expected from here on."""
        self._over = self._over or not roles
        for child in self._of(*roles):
            child.end_now()

    async def gone(self, *roles: str) -> None:
        """Wait until the killed children of these roles, or all, have ended; a little while at most."""
        await wait_ended(self._of(*roles), KILL_LIMIT)

    async def stop(self, orderly: bool) -> None:
        """End all in order: the coordinator first, because it ends what its clients wait for and needs the
        others for that. `orderly`: they have begun their work, listen, and may finish what they do."""
        self._over = True
        for roles in STOP_ORDER:
            group = self._of(*roles)
            for child in group:
                child.stopping = True
                # Before the engine is up there is nothing to finish, and most children do not listen yet; the
                # loader does, and removes what it has half built.
                listens = orderly or child.identity.role == "loader"
                if not (listens and await self.tell(child.identity, Shutdown())):
                    child.signal(signal.SIGTERM)
            await end(group)

    def _of(self, *roles: str) -> list[Child]:
        return [c for c in self._children.values() if not roles or c.identity.role in roles]

    async def _listen(self) -> None:
        while True:
            sender, message = await self._control.receive()
            child = self._children.get(sender)
            if child is None:
                continue  # a former life's late words
            self.heard = child.heard = time.monotonic()
            match message:
                case Failed():
                    if not child.failed.done():
                        child.failed.set_result(message)
                case _:
                    self.on_message(child, message)
                    if isinstance(message, Ready):
                        child.ready.set()

    async def _watch(self, child: Child) -> None:
        code = await child.ended()
        # An end may be seen before what was said just ahead of it: a loader's Ready, a failure's reason.
        if code >= 0:
            await child.last_words(LAST_WORDS)
        del self._children[child.identity]
        self.on_end(child, code)
