"""What the tests of the peers' sockets share."""

from __future__ import annotations

import time

from protocol.messages import WorkerDied

PRINT = "f" * 64  # the store's fingerprint
LIMIT = 10.0  # seconds for a message to come through


def received(peer, *kinds):
    """The next messages of a peer, one of each kind in this order."""
    messages = []
    deadline = time.monotonic() + LIMIT
    while len(messages) < len(kinds) and time.monotonic() < deadline:
        messages += list(peer.receive(wait=True))
    assert tuple(type(m) for m in messages) == kinds
    return messages


def death(incarnation: int, index: int = 0, role: str = "worker") -> WorkerDied:
    return WorkerDied(role, index, incarnation, False, -1)
