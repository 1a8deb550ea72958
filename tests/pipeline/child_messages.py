"""Messages and limits of the tests of child sockets."""

from __future__ import annotations

import time

from protocol.messages import WorkerDied

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


def exit_of(incarnation: int, index: int = 0, role: str = "worker") -> WorkerDied:
    """An exit as the supervisor reports it."""
    return WorkerDied(role, index, incarnation, False, -1)
