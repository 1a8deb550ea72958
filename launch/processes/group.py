"""The engine's running child processes: started, their messages received, ended in order."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

from launch.errors import StartFailed, system_reason
from launch.processes.children import Child, spawn, terminate, title, wait_exits
from launch.processes.control import Control
from launch.processes.task_guard import TaskGuard
from protocol.messages import Failed, Ready, Shutdown
from protocol.sockets import Identity

KILL_LIMIT = 2.0  # seconds for the kernel to end a killed child
LAST_MESSAGE_LIMIT = 0.5  # seconds that the last message of an exited child may still be under way
STOP_ORDER = (("gateway",), ("coordinator",), ("worker", "prefetcher", "text"), ("loader",))


class ProcessGroup:
    """`on_message` is called for each message but Failed, `on_exit` after the last one of an exited child."""

    def __init__(self, control: Control, guard: TaskGuard) -> None:
        self.last_message = 0.0  # monotonic seconds: when a child last sent one
        self.on_message: Callable[[Child, object], None] = lambda child, message: None
        self.on_exit: Callable[[Child, int], None] = lambda child, code: None
        self._control = control
        self._guard = guard
        self._children: dict[Identity, Child] = {}
        self._stopped = False  # a child that is being started is killed at once
        guard.keep(self._receive())

    @property
    def pids(self) -> dict[Identity, int]:
        """Process ids of the running children."""
        return {identity: child.process.pid for identity, child in self._children.items() if child.running}

    async def prepare(self, identity: Identity, threads: int) -> Child:
        """Spawn a child, which imports its modules and waits for `start`. Raises StartFailed."""
        try:
            child = await spawn(identity, threads, self._control.key)
        except OSError as e:  # no free descriptor, for example
            raise StartFailed(f"the {title(identity)} could not be started: {system_reason(e)}") from e
        self._children[identity] = child
        self._guard.keep(self._watch(child))
        if self._stopped:
            child.kill()
        return child

    async def start(self, identity: Identity, config: dict[str, Any], threads: int) -> Child:
        """Spawn a child, unless it was prepared, and send it its configuration. Raises StartFailed."""
        child = self._children.get(identity)
        if child is None or not (child.running or child.configured):  # one that has run ends as `_watch` says
            child = await self.prepare(identity, threads)
        child.configure(config)
        return child

    async def send(self, identity: Identity, message: object) -> bool:
        return await self._control.send(identity, message)

    def kill(self, *roles: str) -> None:
        """Kill the children of these roles, or without roles all; their exits are expected."""
        self._stopped = self._stopped or not roles
        for child in self._of(*roles):
            child.kill()

    async def wait_killed(self, *roles: str) -> None:
        """Wait until the killed children of these roles, or all, have exited; KILL_LIMIT seconds at most."""
        await wait_exits(self._of(*roles), KILL_LIMIT)

    async def stop(self, orderly: bool) -> None:
        """End all in order: the gateway lets answers end, the coordinator needs the others for its requests.
        `orderly`: the engine was ready."""
        self._stopped = True
        for roles in STOP_ORDER:
            children = self._of(*roles)
            for child in children:
                child.exit_expected = True
                # Before the engine is up there is nothing to finish, and most children do not receive yet;
                # the loader does, and removes the store that it has half built.
                # The text process has nothing to finish, and may be busy.
                role = child.identity.role
                receives = (orderly and role != "text") or role == "loader"
                if not (receives and await self.send(child.identity, Shutdown())):
                    child.send_signal(signal.SIGTERM)
            await terminate(children)

    def _of(self, *roles: str) -> list[Child]:
        return [c for c in self._children.values() if not roles or c.identity.role in roles]

    async def _receive(self) -> None:
        while True:
            sender, message = await self._control.receive()
            child = self._children.get(sender)
            if child is None:
                continue  # a late message of an earlier incarnation
            self.last_message = child.last_message = time.monotonic()
            match message:
                case Failed():
                    if not child.failed.done():
                        child.failed.set_result(message)
                case _:
                    self.on_message(child, message)
                    if isinstance(message, Ready):
                        child.ready.set()

    async def _watch(self, child: Child) -> None:
        code = await child.wait_exit()
        # The exit may be seen before a message sent just ahead of it: a loader's Ready, a Failed.
        if code >= 0:
            await child.wait_last_message(LAST_MESSAGE_LIMIT)
        if self._children.get(child.identity) is child:
            del self._children[child.identity]
        self.on_exit(child, code)
