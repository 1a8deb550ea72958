"""Shared between clients: turns, one client after the other, memory for requests that wait, and time; and
limits of what a misbehaving one can cause."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from protocol.messages import ChatMessage, Record

CLIENT_BYTES = 64 << 20
ALL_BYTES = 512 << 20  # for all clients
ID_BYTES = 36  # of a token id in a list or tuple
MESSAGE_BYTES = 512  # of a message beside its texts and ids
MOST_WAITING = 4096  # messages of one client in one queue


class Turns:
    """The order in which clients that wait have their turns. After its turn a client is behind all others, so
    one that floods the engine delays mostly itself."""

    def __init__(self) -> None:
        self._order: dict[bytes, None] = {}  # the clients that waited last time, the next one first
        self._latest: bytes | None = None  # that had a turn

    def next(self, waiting: Iterable[bytes]) -> bytes:
        """Returns the client whose turn it is, and counts that turn. `waiting`: at least one client."""
        client = self.order(waiting)[0]
        self.take(client)
        return client

    def order(self, waiting: Iterable[bytes]) -> list[bytes]:
        """Returns the clients that wait, the next one first. Those that did not wait at the last call are
        behind the others, but before the client that has just had a turn."""
        now = dict.fromkeys(waiting)
        kept = [client for client in self._order if client in now]
        place = len(kept) - (kept[-1:] == [self._latest])
        kept[place:place] = [client for client in now if client not in self._order]
        self._order = dict.fromkeys(kept)
        return kept

    def take(self, client: bytes) -> None:
        """Count a turn of this client."""
        self._order.pop(client, None)
        self._order[client] = None
        self._latest = client


class Debts:
    """After a client's work its next one waits until that of others, if there is any, has taken as long."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: in seconds."""
        self._clock = clock
        self._owed: dict[bytes, float] = {}  # seconds, by client

    def may(self, client: bytes, others: set[bytes]) -> bool:
        """Returns whether a client's next work may begin. `others`: that have work by which it is paid."""
        return client not in self._owed or others <= {client}

    @contextmanager
    def owing(self, client: bytes) -> Iterator[None]:
        """The block is a client's work."""
        began = self._clock()
        yield
        self._owed[client] = self._clock() - began

    @contextmanager
    def paying(self, others: set[bytes]) -> Iterator[None]:
        """The block is work of these clients, which pays what the others owe."""
        began = self._clock()
        yield
        for client in [client for client in self._owed if not others <= {client}]:
            self._owed[client] -= self._clock() - began
            if self._owed[client] <= 0:
                del self._owed[client]

    def forget(self, client: bytes) -> None:
        """Drop the debt of a client that has disconnected."""
        self._owed.pop(client, None)


class Held:
    """Counts the bytes that are held for each client. For one thread, or under a lock."""

    def __init__(self) -> None:
        self._sizes: Counter[bytes] = Counter()
        self._all = 0

    def take(self, client: bytes, size: int) -> bool:
        """Reserve so many bytes; returns False where that is over a limit. A client's only request may be
        larger than the limit of a client."""
        own = self._sizes[client]
        if size and (self._all + size > ALL_BYTES or (own and own + size > CLIENT_BYTES)):
            return False
        self._sizes[client] += size
        self._all += size
        return True

    def give_back(self, client: bytes, size: int) -> None:
        """Release bytes that were reserved."""
        self._all -= size
        self._sizes[client] -= size
        if not self._sizes[client]:
            del self._sizes[client]


def held_bytes(value: object) -> int:
    """Returns about the bytes of memory that a waiting message, or a value in it, holds."""
    match value:
        case str() | bytes():
            return sys.getsizeof(value)
        case ChatMessage():  # there may be many
            texts = (value.role, value.content, value.extra)
            return MESSAGE_BYTES + sum(map(sys.getsizeof, texts))
        case tuple() if value and type(value[0]) is int:  # then all are
            return ID_BYTES * len(value)
        case tuple() | list():
            return ID_BYTES * (1 + len(value)) + sum(map(held_bytes, value))
        case dict():
            return MESSAGE_BYTES + sum(held_bytes(entry) for pair in value.items() for entry in pair)
        case int() | float() | None:
            return 0
        case _:
            names = value.__struct_fields__ if isinstance(value, Record) else ()
            return MESSAGE_BYTES + sum(held_bytes(getattr(value, name)) for name in names)


class RateLimiter:
    """Allows `limit` units in each second."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._spent = 0
        self._began = 0.0

    def spend(self, cost: int = 1) -> bool:
        """Counts `cost` units; returns False where this second's exceed the limit."""
        now = time.monotonic()
        if now - self._began >= 1.0:
            self._began, self._spent = now, 0
        self._spent += cost
        return self._spent <= self._limit


class TimeShare:
    """Lets some work take a share of the time. After each piece that exceeds it, the work waits."""

    def __init__(self, share: float, burst: float) -> None:
        """`burst`: seconds that may be spent at once after a pause."""
        self._share = share
        self._burst = burst
        self._left = burst
        self._updated = time.monotonic()

    def spend(self, seconds: float) -> None:
        """Count time that was spent."""
        self._refill()
        self._left -= seconds

    @property
    def wait(self) -> float:
        """Seconds until the work may go on: none until the burst is spent, then as long as that takes to be
        earned again."""
        self._refill()
        return 0.0 if self._left > 0 else (self._burst - self._left) / self._share

    def _refill(self) -> None:
        now = time.monotonic()
        self._left = min(self._left + (now - self._updated) * self._share, self._burst)
        self._updated = now


class SparseLog:
    """Logs up to `limit` warnings a second that clients cause; the others are only counted."""

    def __init__(self, log: logging.Logger, limit: int = 5) -> None:
        self._log = log
        self._limiter = RateLimiter(limit)
        self._skipped = 0

    def warning(self, text: str, *, failed: bool = False) -> None:
        """`failed`: with the traceback of the exception that is being handled."""
        if not self._limiter.spend():
            self._skipped += 1
            return
        more = f" ({self._skipped} more lines like this were left out)" if self._skipped else ""
        self._skipped = 0
        self._log.warning("%s%s", text, more, exc_info=failed)
