"""What waits for the engine's thread: a queue for each client, taken in turns, so that who asks for much at
once waits behind itself and not others behind them. Within a client the order is kept. From any thread."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

Target = TypeVar("Target")
LIMIT = 4096  # calls of one client that may wait


class Calls(Generic[Target]):
    """Functions to be called with the target."""

    def __init__(self) -> None:
        self._queues: OrderedDict[bytes, deque[Callable[[Target], None]]] = OrderedDict()  # none is empty
        self._news = threading.Condition()
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """The end was asked for; what waits does not matter any more."""
        return self._stopped

    def put(self, client: bytes, call: Callable[[Target], None], always: bool = False) -> bool:
        """False where too many of this client wait already; `always`: not then either."""
        with self._news:
            queue = self._queues.setdefault(client, deque())
            if len(queue) >= LIMIT and not always:
                return False
            queue.append(call)
            self._news.notify()
        return True

    def get(self, wait: float) -> Callable[[Target], None] | None:
        """The next client's oldest call; None where none came within `wait` seconds, or the end was asked
        for."""
        with self._news:
            if not self._queues and not self._stopped and wait:
                self._news.wait(wait)
            if not self._queues or self._stopped:
                return None
            client, queue = self._queues.popitem(last=False)
            call = queue.popleft()
            if queue:
                self._queues[client] = queue
            return call

    def stop(self) -> None:
        """Ask for the end."""
        with self._news:
            self._stopped = True
            self._news.notify()
