"""Client messages that wait for the engine's thread, in one queue for each client. The queues are served in
turn, so a client with many messages delays no other client. Each client's messages stay in order.
Thread-safe."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

from protocol.messages import Calibrate, Cancel, Generate, Score, SetPolicy

LIMIT = 4096  # waiting messages of one client
SIZE_LIMIT = 64 << 20  # bytes of those messages
ID_BYTES = 36  # bytes of a number in a tuple


@dataclass(frozen=True)
class ClientGone:
    """The client has disconnected: its requests end, and its kept KV is released."""


EngineMessage = Generate | Score | Calibrate | SetPolicy | Cancel | ClientGone


class EngineInbox:
    """The event loop calls `put`, the engine's thread `get`."""

    def __init__(self) -> None:
        # by client, none of them empty: the messages, each with its size in bytes
        self._queues: OrderedDict[bytes, deque[tuple[EngineMessage, int]]] = OrderedDict()
        self._sizes: Counter[bytes] = Counter()
        self._changed = threading.Condition()
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """`stop` was called. Messages may still be waiting."""
        return self._stopped

    def put(self, client: bytes, message: EngineMessage) -> bool:
        """Queue a message. False after `stop`, and where this client's waiting messages are too many or too
        large; a ClientGone is queued even then."""
        size = _held_bytes(message)
        with self._changed:
            if self._stopped:
                return False
            queue = self._queues.get(client, deque())
            full = len(queue) >= LIMIT or (queue and self._sizes[client] + size > SIZE_LIMIT)
            if full and not isinstance(message, ClientGone):
                return False
            self._queues.setdefault(client, queue).append((message, size))
            self._sizes[client] += size
            self._changed.notify()
        return True

    def get(self, wait: float) -> tuple[bytes, EngineMessage] | None:
        """The next client's oldest message. None after `wait` seconds, and after `stop` once none is left."""
        with self._changed:
            if not self._queues and not self._stopped and wait:
                self._changed.wait(wait)
            if not self._queues:
                return None
            client, queue = self._queues.popitem(last=False)
            message, size = queue.popleft()
            self._sizes[client] -= size
            if queue:
                self._queues[client] = queue
            else:
                del self._sizes[client]
            return client, message

    def stop(self) -> None:
        """Refuse further messages, and wake the engine's thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()


def _held_bytes(message: EngineMessage) -> int:
    """About the bytes of memory that a waiting message holds."""
    match message:
        case Generate():
            turns = [turn.content for turn in message.messages or ()]
            texts = [message.prompt or "", message.conversation or "", *turns, *message.stop]
            return ID_BYTES * (len(message.resume) + len(message.token_ids or ())) + sum(map(len, texts))
        case Score() | Calibrate():
            return ID_BYTES * len(message.token_ids or ()) + len(message.text or "")
        case _:
            return 0
