"""Messages between the event loop and the engine's thread: clients' messages one way, events the other."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.fairness import MOST_WAITING, Held, Turns, held_bytes
from pipeline.serving.engine_status import EngineStatus
from pipeline.serving.text_queue import TextMessages
from pipeline.text.grammar import MaskDropped, MaskRequest
from protocol.messages import Calibrate, Cancel, Generate, Score, SetPolicy


@dataclass(frozen=True)
class ClientGone:
    """The client has disconnected: its requests end, and its kept KV is released."""


EngineMessage = Generate | Score | Calibrate | SetPolicy | Cancel | ClientGone


class EngineInbox:
    """Clients' messages that wait for the engine's thread. Clients are served in turn, each client's messages
    in their order. Thread-safe: the event loop calls `put` and `drop`, the engine's thread `get`."""

    def __init__(self) -> None:
        # by client, none of them empty: messages, each with its size in bytes
        self._queues: dict[bytes, deque[tuple[EngineMessage, int]]] = {}
        self._turns = Turns()
        self._gone: deque[bytes] = deque()  # clients that have disconnected
        self._held = Held()
        self._changed = threading.Condition()
        self._stopped = self._woken = False

    @property
    def stopped(self) -> bool:
        """`stop` was called. Messages may still be waiting."""
        return self._stopped

    @property
    def waiting(self) -> bool:
        """The next `get` would return at once."""
        return bool(self._queues or self._gone or self._stopped)

    def put(self, client: bytes, message: EngineMessage) -> bool:
        """Queue a message. Returns False after `stop`, and where the waiting messages of this client are too
        many, or those of this client or all clients too large (that never refuses a Cancel)."""
        size = 0 if isinstance(message, Cancel) else held_bytes(message)
        with self._changed:
            waiting = len(self._queues.get(client, ()))
            if self._stopped or waiting >= MOST_WAITING or not self._held.take(client, size):
                return False
            self._queues.setdefault(client, deque()).append((message, size))
            self._changed.notify()
        return True

    def drop(self, client: bytes) -> None:
        """Drop the messages of a client that has disconnected; the next `get` returns a ClientGone."""
        with self._changed:
            for _, size in self._queues.pop(client, ()):
                self._held.give_back(client, size)
            if not self._stopped:
                self._gone.append(client)
                self._changed.notify()

    def get(self, wait: float) -> tuple[bytes, EngineMessage] | None:
        """Take the next client's oldest message. Returns None after `wait` seconds or a `wake`, and after
        `stop` once none is left."""
        with self._changed:
            if not (self._queues or self._gone or self._stopped or self._woken) and wait:
                self._changed.wait(wait)
            self._woken = False
            if self._gone:
                return self._gone.popleft(), ClientGone()
            if not self._queues:
                return None
            client = self._turns.next(self._queues)
            message, size = self._queues[client].popleft()
            if not self._queues[client]:
                del self._queues[client]
            self._held.give_back(client, size)
            return client, message

    def wake(self) -> None:
        """End the present wait of the engine's thread, or its next one: what it waits for is elsewhere."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def stop(self) -> None:
        """Refuse further messages, and wake the engine's thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()


@dataclass(frozen=True)
class ToClients:
    """Messages and their clients: those of a step together, so that the event loop wakes once for them."""

    messages: Sequence[tuple[bytes, object]]


@dataclass(frozen=True)
class ToOtherClients:
    excluded: bytes
    message: object


@dataclass(frozen=True)
class ToSupervisor:
    message: object


@dataclass(frozen=True)
class EngineReady:
    status: EngineStatus
    texts: TextMessages
    notes: tuple[str, ...]  # lines about the engine for a person


@dataclass(frozen=True)
class EngineFailed:
    """The engine cannot start, or cannot continue."""

    reason: str
    usage: bool  # the user's input is at fault


EngineEvent = (
    ToClients | ToOtherClients | ToSupervisor | MaskRequest | MaskDropped | EngineReady | EngineFailed
)
Post = Callable[[EngineEvent], None]
