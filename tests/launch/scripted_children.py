"""A supervisor's children without processes: real lifelines and control sockets, played by a test."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import zmq.asyncio
from child_harness import small_store
from msgspec import msgpack
from msgspec.structs import replace
from waiting import until

from launch.processes import children
from launch.processes.children import Child, title
from launch.processes.monitor import Limits
from launch.processes.supervisor import Supervisor
from pipeline.config import EngineConfig
from protocol.codec import decode, encode
from protocol.messages import VERSION, Ready, Shutdown
from protocol.sockets import Identity, connect_dealer, ipc_endpoint

PID = 1 << 30  # no process has it


class ScriptedProcess:
    """Runs until it is ended; `ignores`: signals that do not end it."""

    pid = PID

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.signals: list[int] = []
        self.ignores: set[int] = set()
        self._ended = asyncio.Event()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            self.signals.append(number)
            if number not in self.ignores:
                self.end(-number)

    def end(self, code: int) -> None:
        if self.returncode is None:
            self.returncode = code
            self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode


class ScriptedChild:
    """One child: connects when it receives its configuration, and then follows the test's script."""

    def __init__(self, identity: Identity, threads: int, key: bytes, play: Play) -> None:
        self.identity, self.threads = identity, threads
        self.process = ScriptedProcess()
        self.fds: tuple[int, ...] = ()
        self.config: dict[str, Any] = {}
        self.received: list[object] = []
        self._play = play
        self._reader, lifeline = os.pipe()
        self.child = Child(identity, cast(asyncio.subprocess.Process, self.process), lifeline, key)
        self._socket: zmq.asyncio.Socket | None = None
        asyncio.get_running_loop().add_reader(self._reader, self._on_config)

    def _on_config(self) -> None:
        asyncio.get_running_loop().remove_reader(self._reader)
        packed = os.read(self._reader, 1 << 16)
        if not packed:
            return  # its lifeline was closed before
        self.config = msgpack.decode(packed[4:])
        self._play.events.append(f"{title(self.identity)} is configured")
        endpoint = ipc_endpoint(Path(self.config["runtime"]), "control.sock")
        self._socket = connect_dealer(self._play.context, endpoint, identity=self.config["identity"])
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        assert self._socket is not None
        self._play.script(self)
        while True:
            message = decode(await self._socket.recv_multipart())
            self.received.append(message)
            self._play.events.append(f"{title(self.identity)} gets {type(message).__name__}")
            if isinstance(message, Shutdown) and self._play.obeys(self):
                self.process.end(0)

    def send(self, *messages: object) -> None:
        assert self._socket is not None
        for message in messages:
            self._socket.send_multipart(encode(message))

    def ready(self, **changed: Any) -> None:
        role, index, generation = self.identity.role, self.identity.index, self.identity.generation
        ready = Ready(VERSION, role, index, generation, PID, self._play.fingerprint)
        self.send(replace(ready, **changed))

    async def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._reader)
        os.close(self._reader)
        if self._socket is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._socket.close(linger=0)


class Play:
    """Every child that was spawned, in order. `script`: called when a child has its configuration; by default
    the loader makes a store and exits, and each child is ready at once."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.context = context
        self.children: list[ScriptedChild] = []
        self.events: list[str] = []
        self.fingerprint = ""
        self.script: Callable[[ScriptedChild], None] = self.begin
        self.obeys: Callable[[ScriptedChild], bool] = lambda child: True
        self.notes: dict[str, tuple[str, ...]] = {}
        self._files = ExitStack()

    def begin(self, child: ScriptedChild) -> None:
        role = child.identity.role
        if role == "loader":
            self.make_store()
        child.ready(notes=self.notes.get(role, ()))
        if role == "loader":
            child.process.end(0)

    def make_store(self) -> None:
        self.fingerprint = self._files.enter_context(small_store())

    async def spawn(self, identity: Identity, threads: int, key: bytes, fds: tuple[int, ...] = ()) -> Child:
        made = ScriptedChild(identity, threads, key, self)
        made.fds = fds
        self.children.append(made)
        self.events.append(f"{title(identity)} is spawned")
        return made.child

    def child(self, role: str, index: int = 0, generation: int = 0) -> ScriptedChild:
        (found,) = [c for c in self.children if c.identity == Identity(role, index, generation)]
        return found

    async def spawned(self, role: str, index: int = 0, generation: int = 0) -> ScriptedChild:
        """Once it has its configuration."""
        wanted = Identity(role, index, generation)
        await until(lambda: any(c.identity == wanted and c.config for c in self.children))
        return self.child(role, index, generation)

    async def close(self) -> None:
        for child in self.children:
            await child.close()
        self._files.close()


@asynccontextmanager
async def stage(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Play]:
    with zmq.asyncio.Context() as context:
        play = Play(context)
        monkeypatch.setattr(children, "spawn", play.spawn)
        try:
            yield play
        finally:
            await play.close()


def supervisor(limits: Limits | None = None, **config: Any) -> Supervisor:
    """Of the embedded model on the CPU with two workers."""
    chosen = {"device": "cpu", "workers": 2, "name": f"s{os.getpid()}", "policy": "all-host"} | config
    return Supervisor(EngineConfig(**chosen), log_level="INFO", limits=limits)


KILLED = -signal.SIGKILL
