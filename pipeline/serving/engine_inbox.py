"""Client messages that wait for the engine's thread, in one queue for each client. Accounts are served in
turn, and each account's clients in turn, so a client with many messages delays no other client, and a key
with many clients no other account. Each client's messages stay in order. Thread-safe."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.accounts import ID_BYTES, Held, account_of
from protocol.messages import Calibrate, Cancel, ChatMessage, Generate, Score, SetPolicy

LIMIT = 4096  # waiting messages of one client
MESSAGE_BYTES = 512  # of a message beside its texts and ids


@dataclass(frozen=True)
class ClientGone:
    """The client has disconnected: its requests end, and its kept KV is released."""


EngineMessage = Generate | Score | Calibrate | SetPolicy | Cancel | ClientGone
_Queue = deque[tuple[EngineMessage, int]]  # messages, each with its size in bytes


class EngineInbox:
    """The event loop calls `put` and `drop`, the engine's thread `get`."""

    def __init__(self, charge: Callable[[bytes, float], None] = lambda client, seconds: None) -> None:
        """`charge` counts the seconds that the engine's thread took to handle a client's message."""
        self.charge = charge
        # by account and client, none of them empty
        self._accounts: OrderedDict[bytes, OrderedDict[bytes, _Queue]] = OrderedDict()
        self._gone: deque[bytes] = deque()  # clients that have disconnected
        self._held = Held()
        self._changed = threading.Condition()
        self._stopped = self._woken = False

    @property
    def stopped(self) -> bool:
        """`stop` was called. Messages may still be waiting."""
        return self._stopped

    def put(self, client: bytes, message: EngineMessage) -> bool:
        """Queue a message. False after `stop`, and where the waiting messages of this client are too many, or
        those of this client, its account or all clients too large (that never refuses a Cancel)."""
        size = 0 if isinstance(message, Cancel) else held_bytes(message)
        account = account_of(client)
        with self._changed:
            waiting = len(self._accounts.get(account, OrderedDict()).get(client, ()))
            if self._stopped or waiting >= LIMIT or not self._held.take(client, size):
                return False
            queues = self._accounts.setdefault(account, OrderedDict())
            queues.setdefault(client, deque()).append((message, size))
            self._changed.notify()
        return True

    def drop(self, client: bytes) -> None:
        """A client has disconnected: its messages are dropped, and the next `get` returns a ClientGone."""
        with self._changed:
            queues = self._accounts.get(account_of(client), OrderedDict())
            for _, size in queues.pop(client, ()):
                self._held.give_back(client, size)
            if not queues:
                self._accounts.pop(account_of(client), None)
            if not self._stopped:
                self._gone.append(client)
                self._changed.notify()

    def get(self, wait: float) -> tuple[bytes, EngineMessage] | None:
        """The next client's oldest message. None after `wait` seconds or a `wake`, and after `stop` once none
        is left."""
        with self._changed:
            if not (self._accounts or self._gone or self._stopped or self._woken) and wait:
                self._changed.wait(wait)
            self._woken = False
            if self._gone:
                return self._gone.popleft(), ClientGone()
            if not self._accounts:
                return None
            account, queues = self._accounts.popitem(last=False)
            client, queue = queues.popitem(last=False)
            message, size = queue.popleft()
            self._held.give_back(client, size)
            if queue:
                queues[client] = queue
            if queues:
                self._accounts[account] = queues
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


def held_bytes(value: object) -> int:
    """About the bytes of memory that a waiting message, or a value in it, holds."""
    match value:
        case str() | bytes():
            return sys.getsizeof(value)
        case ChatMessage():  # there may be many
            texts = (value.role, value.content, value.extra)
            return MESSAGE_BYTES + sum(map(sys.getsizeof, texts))
        case tuple() if value and type(value[0]) is int:  # then all are
            return ID_BYTES * len(value)
        case tuple() | list():
            return ID_BYTES + sum(map(held_bytes, value))
        case dict():
            return MESSAGE_BYTES + sum(held_bytes(entry) for pair in value.items() for entry in pair)
        case int() | float() | None:
            return 0
        case _:
            assert dataclasses.is_dataclass(value)
            names = dataclasses.fields(value)
            return MESSAGE_BYTES + sum(held_bytes(getattr(value, field.name)) for field in names)
