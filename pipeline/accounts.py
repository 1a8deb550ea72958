"""Accounts: on whose behalf a client speaks, so that limits and turns are shared by all connections of one
key; and how much memory their requests may hold while they wait.

A client's name, as the event loop and the engine's thread use it, begins with its account and is otherwise
opaque. All local clients have one account; a remote client's is its key."""

from __future__ import annotations

from collections import Counter

from protocol.keys import RIGHTS  # each includes those before it; local clients have all

LOCAL = b"local"

CLIENT_BYTES = 64 << 20
ACCOUNT_BYTES = 128 << 20  # for all clients of one key
REMOTE_BYTES = 384 << 20  # for all remote clients
LOCAL_BYTES = 512 << 20  # for all local clients, whatever remote ones hold
ID_BYTES = 36  # of a token id in a list or tuple

_END = b"\0"  # in no account


def client_name(account: bytes, routing_id: bytes) -> bytes:
    """The name of a client that has this routing id on its account's socket."""
    return account + _END + routing_id


def account_of(client: bytes) -> bytes:
    """The account in a client's name."""
    return client.partition(_END)[0]


def routing_id_of(client: bytes) -> bytes:
    """The routing id in a client's name."""
    return client.partition(_END)[2]


def allows(right: str, needed: str) -> bool:
    """Whether a client with `right` may do what needs `needed`."""
    return RIGHTS.index(right) >= RIGHTS.index(needed)


class Held:
    """Bytes held for each client, each account, and all remote clients. For one thread, or under a lock."""

    def __init__(self) -> None:
        self._sizes: Counter[bytes] = Counter()  # by client, by account, and in all remote ones
        self._limits = {LOCAL: LOCAL_BYTES, _REMOTE: REMOTE_BYTES}

    def take(self, client: bytes, size: int) -> bool:
        """Hold so many more bytes; False where a limit forbids it. A client's only request is not limited by
        the client's own limit."""
        sizes, places = self._sizes, self._places(client)
        if not size:
            return True
        if any(sizes[place] + size > self._limits.get(place, ACCOUNT_BYTES) for place in places[1:]):
            return False
        if sizes[client] and sizes[client] + size > CLIENT_BYTES:
            return False
        for place in places:
            sizes[place] += size
        return True

    def give_back(self, client: bytes, size: int) -> None:
        """Of what was taken."""
        for place in self._places(client):
            self._sizes[place] -= size
            if not self._sizes[place]:
                del self._sizes[place]

    def of(self, client: bytes) -> int:
        """The bytes held for a client."""
        return self._sizes[client]

    def _places(self, client: bytes) -> tuple[bytes, ...]:
        account = account_of(client)
        return (client, account) if account == LOCAL else (client, account, _REMOTE)


_REMOTE = b""
