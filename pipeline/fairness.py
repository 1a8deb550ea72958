"""What clients share: turns, one client after the other, and memory for requests that wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

CLIENT_BYTES = 64 << 20
ALL_BYTES = 512 << 20  # for all clients
ID_BYTES = 36  # of a token id in a list or tuple


class Turns:
    """Says which client is next: the one whose last turn is the longest ago. So a client that floods the
    engine delays mostly itself."""

    def __init__(self) -> None:
        self._last: dict[bytes, int] = {}
        self._number = 0

    def next(self, clients: Iterable[bytes]) -> bytes:
        """The client whose turn it is. Clients without a turn yet come first, in the given order."""
        return min(clients, key=self.last)

    def last(self, client: bytes) -> int:
        """The number of a client's last turn: 0 without one, else above those of all earlier turns."""
        return self._last.get(client, 0)

    def take(self, client: bytes) -> None:
        """Count a turn of this client."""
        self._number += 1
        self._last[client] = self._number

    def forget(self, client: bytes) -> None:
        """Drop what is known of a client that has disconnected."""
        self._last.pop(client, None)


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
