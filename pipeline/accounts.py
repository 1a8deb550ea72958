"""Accounts: on whose behalf a client speaks, so that limits and turns are shared by all
connections of one key.

A client's name, as the event loop and the engine's thread use it, begins with its account and is otherwise
opaque. All local clients have one account; a remote client's is its key."""

from __future__ import annotations

from protocol.keys import RIGHTS  # each includes those before it; local clients have all

LOCAL = b"local"
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
