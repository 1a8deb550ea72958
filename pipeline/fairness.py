"""What clients share: turns, one client after the other, and memory for requests that wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

CLIENT_BYTES = 64 << 20
ALL_BYTES = 512 << 20  # for all clients
ID_BYTES = 36  # of a token id in a list or tuple


class Turns:
    """The order in which clients that wait have their turns. After its turn a client is behind all others, so
    one that floods the engine delays mostly itself."""

    def __init__(self) -> None:
        self._order: dict[bytes, None] = {}  # the clients that waited last time, the next one first
        self._latest: bytes | None = None  # that had a turn

    def next(self, waiting: Iterable[bytes]) -> bytes:
        """The client whose turn it is, and count that turn. `waiting`: at least one client."""
        client = self.order(waiting)[0]
        self.take(client)
        return client

    def order(self, waiting: Iterable[bytes]) -> list[bytes]:
        """The clients that wait, the next one first. Those that did not wait at the last call are behind the
        others, but before the client that has just had a turn."""
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
