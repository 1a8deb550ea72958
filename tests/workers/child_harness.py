"""A worker's or the prefetcher's surroundings: a small store, a supervisor's and a coordinator's socket, a
lifeline. The child itself is the real process."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import zmq
from fork_server import ForkedChild

import workers
from protocol.codec import decode, encode
from protocol.messages import Failed, Ready, Shutdown
from protocol.sockets import Identity, bind_router, ipc_endpoint
from shm.control import ControlSegment
from shm.layout import ExpertShape, Float32
from shm.segment import unlink
from shm.store import StoreBuilder, StoreManifest, store_name
from workers.lifetime import environment, pack_config

ROOT = Path(workers.__file__).parent.parent  # where child processes find the packages
SHAPE = ExpertShape(layers=2, experts=4, hidden=48, intermediate=300, tile=16)  # 19 tiles, the last padded
SECONDS = 100.0  # for any one answer: importing torch takes a while on a busy machine
KEY = b"k" * 32  # of the engine
UNTOUCHED = 0xAB  # bytes of a slab that nothing was copied to
WORKERS = 4  # that the control segment has lines for
MODULES = {"worker": "workers.expert_worker", "prefetcher": "workers.prefetcher"}
SOCKETS = {"worker": "work.sock", "prefetcher": "fetch.sock"}

Message = TypeVar("Message")


def weights_of(layer: int, expert: int) -> tuple[Float32, Float32, Float32]:
    """gate and up [I, H], down [H, I] of the small store's experts, before any rounding."""
    random = np.random.default_rng([layer, expert])
    wide = (SHAPE.intermediate, SHAPE.hidden)
    shapes = (wide, wide, wide[::-1])
    gate, up, down = ((random.standard_normal(s) * s[1] ** -0.5).astype(np.float32) for s in shapes)
    return gate, up, down


@contextmanager
def small_store(format: str = "f32", tile: int = SHAPE.tile) -> Iterator[str]:
    """A finished store of SHAPE, or with other tiles; its fingerprint."""
    fingerprint = uuid.uuid4().hex * 2
    manifest = StoreManifest(fingerprint, replace(SHAPE, tile=tile), format, "/models/small")
    builder = StoreBuilder.create(store_name(fingerprint), manifest)
    try:
        for layer in range(SHAPE.layers):
            for expert in range(SHAPE.experts):
                builder.layout.encode_expert(*weights_of(layer, expert), builder.expert(layer, expert))
        builder.finish()
        yield fingerprint
    finally:
        unlink(store_name(fingerprint))


@dataclass
class Child:
    """A started process and our end of its lifeline."""

    name: bytes
    generation: int
    process: ForkedChild
    lifeline: int
    errors: Path  # its stderr

    def cut(self) -> None:
        """Close the lifeline, as the exit of the parent does."""
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1

    def ended(self, limit: float = SECONDS) -> int:
        return self.process.wait(timeout=limit)

    def close(self) -> None:
        self.cut()
        self.process.kill()
        self.process.wait()


class Surroundings:
    """The two ROUTERs that a child of `role` connects to, and everything that was started."""

    def __init__(self, role: str, fingerprint: str) -> None:
        self.role = role
        self.fingerprint = fingerprint
        self.runtime = Path(tempfile.mkdtemp(prefix="tw-", dir="/tmp"))
        self._context = zmq.Context()
        self.control = bind_router(self._context, ipc_endpoint(self.runtime, "control.sock"))
        self.work = bind_router(self._context, ipc_endpoint(self.runtime, SOCKETS[role]))
        self.progress = ControlSegment.create(f"/tandem-tests-{uuid.uuid4().hex[:12]}-control-0", WORKERS)
        self._children: list[Child] = []

    def start(self, **changes: Any) -> Child:
        """Start a child without waiting for its Ready. Each index has a core, in turn."""
        generation = len(self._children) + 1
        cores = sorted(os.sched_getaffinity(0))
        config = {
            "engine": "test",
            "runtime": str(self.runtime),
            "log_level": "INFO",
            "role": self.role,
            "index": 0,
            "generation": generation,
            "store": store_name(self.fingerprint),
            "fingerprint": self.fingerprint,
            "cores": [cores[changes.get("index", 0) % len(cores)]],
            "host_slowdown": 1.0,
            "link_gbps": None,
            "mps": True,
            "control": self.progress.segment.name,
        } | changes
        name = Identity(self.role, config["index"], generation).prove(KEY)
        config["identity"] = name
        for_child, lifeline = os.pipe()
        os.write(lifeline, pack_config(config))
        errors = self.runtime / f"errors-{generation}"
        with errors.open("wb") as stderr:
            process = ForkedChild(MODULES[self.role], for_child, env=environment(1), stderr=stderr)
        os.close(for_child)
        child = Child(name, generation, process, lifeline, errors)
        self._children.append(child)
        return child

    def receive(self, socket: zmq.Socket[bytes], limit: float = SECONDS) -> tuple[bytes, object]:
        """The next message and its sender."""
        assert socket.poll(int(limit * 1000)), f"no message within {limit} s\n{self.complaints()}"
        sender, *frames = socket.recv_multipart()
        return sender, decode(frames)

    def expect(self, kind: type[Message], limit: float = SECONDS) -> Message:
        """The coordinator's next message, which must be of this kind."""
        _, message = self.receive(self.work, limit)
        assert isinstance(message, kind), message
        return message

    def ready(self) -> dict[bytes, Ready]:
        """Wait for every child's Ready on both sockets; returns them by sender."""
        messages: list[dict[bytes, Ready]] = []
        for socket in (self.work, self.control):
            received = {}
            while len(received) < len(self._children):
                sender, message = self.receive(socket)
                assert isinstance(message, Ready), message
                received[sender] = message
            messages.append(received)
        assert messages[0] == messages[1]
        return messages[0]

    def failure(self, child: Child) -> str:
        """The line with which a child has failed and exited."""
        sender, message = self.receive(self.control)
        assert sender == child.name
        assert isinstance(message, Failed)
        assert (message.role, message.usage) == (self.role, False)
        assert "\n" not in message.text
        assert child.ended() == 1
        assert child.errors.read_text() == ""
        return message.text

    def send(self, child: Child, message: object) -> None:
        """Send from the coordinator's socket."""
        self.work.send_multipart([child.name, *encode(message)])

    def shut_down(self, child: Child, socket: zmq.Socket[bytes]) -> int:
        """Send a Shutdown; returns the exit code."""
        socket.send_multipart([child.name, *encode(Shutdown("test"))])
        return child.ended()

    def quiet(self, seconds: float = 0.2) -> bool:
        """Whether the coordinator receives nothing for `seconds`."""
        return not self.work.poll(int(seconds * 1000))

    def complaints(self) -> str:
        """What the children wrote to stderr."""
        return "".join(child.errors.read_text() for child in self._children)

    def close(self) -> None:
        for child in self._children:
            child.close()
        self._context.destroy(linger=0)
        self.progress.close()
        unlink(self.progress.segment.name)
        shutil.rmtree(self.runtime)


@contextmanager
def surroundings(role: str, fingerprint: str) -> Iterator[Surroundings]:
    place = Surroundings(role, fingerprint)
    try:
        yield place
    finally:
        place.close()


def wait_gone(pid: int, limit: float = 5.0) -> bool:
    """True where a process that is not our child ends within `limit` seconds."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":  # its parent has not reaped it
            return True
        time.sleep(0.02)
    return False
