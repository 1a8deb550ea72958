"""What waits for the engine's thread: a queue for each client, taken in turns, so that who asks for much at
once waits behind itself and not others behind them. Within a client the order is kept. From any thread."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

Target = TypeVar("Target")
LIMIT = 4096  # calls of one client that may wait
SIZE_LIMIT = 64 << 20  # bytes of what they hold


class EngineInbox(Generic[Target]):
    """Functions to be called with the target."""

    def __init__(self) -> None:
        # by client, none of them empty: the calls, and how large each is
        self._queues: OrderedDict[bytes, deque[tuple[Callable[[Target], None], int]]] = OrderedDict()
        self._sizes: Counter[bytes] = Counter()
        self._news = threading.Condition()
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """The end was asked for; what waits is still to be ended."""
        return self._stopped

    def put(
        self, client: bytes, call: Callable[[Target], None], *, size: int = 0, always: bool = False
    ) -> bool:
        """False after `stop`, and where too many of this client wait already, or they would hold too much;
        `size`: bytes that this one holds; `always`: not then either."""
        with self._news:
            if self._stopped:
                return False
            queue = self._queues.get(client, deque())
            full = len(queue) >= LIMIT or (queue and self._sizes[client] + size > SIZE_LIMIT)
            if full and not always:
                return False
            self._queues.setdefault(client, queue).append((call, size))
            self._sizes[client] += size
            self._news.notify()
        return True

    def get(self, wait: float) -> Callable[[Target], None] | None:
        """The next client's oldest call; None where none came within `wait` seconds, or the end was asked
        for and all have been taken."""
        with self._news:
            if not self._queues and not self._stopped and wait:
                self._news.wait(wait)
            if not self._queues:
                return None
            client, queue = self._queues.popitem(last=False)
            call, size = queue.popleft()
            self._sizes[client] -= size
            if queue:
                self._queues[client] = queue
            else:
                del self._sizes[client]
            return call

    def stop(self) -> None:
        """Ask for the end."""
        with self._news:
            self._stopped = True
            self._news.notify()
