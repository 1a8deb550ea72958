"""Both ends of a child's socket in this process, and the messages and limits of their tests."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from pipeline.experts.peers import ChildServerSocket, ExitEvents
from protocol.messages import WorkerDied
from protocol.sockets import Identity
from shm.control import ControlSegment
from shm.segment import unlink
from workers.child_endpoint import ChildEndpoint

_CONTROLS = itertools.count()
KEY = b"k" * 32  # the engine's, with which children prove their identity
PRINT = "f" * 64  # the store's fingerprint
LIMIT = 10.0  # seconds for a message to arrive


def received(child, *kinds):
    """The next messages that a child gets, which must be of these kinds in this order."""
    messages = []
    deadline = time.monotonic() + LIMIT
    while len(messages) < len(kinds) and time.monotonic() < deadline:
        messages += list(child.receive(wait=True))
    assert tuple(type(m) for m in messages) == kinds
    return messages


def exit_of(generation: int, index: int = 0, role: str = "worker", *, crashed: bool = False) -> WorkerDied:
    """An exit as the supervisor reports it."""
    return WorkerDied(role, index, generation, crashed, -1)


@contextmanager
def control_segment(workers: int) -> Iterator[ControlSegment]:
    """Progress counters of `workers` workers and the prefetcher; removed at the end."""
    name = f"/tandem-tests{os.getpid()}-control-{next(_CONTROLS)}"
    control = ControlSegment.create(name, workers)
    try:
        yield control
    finally:
        control.close()
        unlink(name)


@contextmanager
def child_socket(
    runtime: Path,
    socket: str,
    role: str,
    fingerprint: str,
    exits: ExitEvents | None = None,
    reports: list[object] | None = None,
) -> Iterator[ChildServerSocket]:
    """`exits`: from the supervisor; `reports`: collects the messages to it."""
    report = ([] if reports is None else reports).append
    server = ChildServerSocket(runtime, socket, role, fingerprint, KEY, exits or ExitEvents(), report)
    try:
        yield server
    finally:
        server.close()


def child_endpoint(
    runtime: Path, role: str, socket: str, fingerprint: str, index: int = 0, generation: int = 0
) -> ChildEndpoint:
    """The child's end of a ChildServerSocket; used by the thread that makes it."""
    identity = Identity(role, index, generation)
    config = {**asdict(identity), "identity": identity.prove(KEY)}
    config |= {"runtime": str(runtime), "fingerprint": fingerprint}
    return ChildEndpoint(config, socket, supervised=False)
