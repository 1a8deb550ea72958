"""Who speaks on a connection of the door: the first message of each is the door's RemoteClient. Runs in the
event loop."""

from __future__ import annotations

import heapq
from typing import Any

from protocol.codec import decode
from protocol.errors import MalformedMessage
from protocol.keys import RIGHTS
from protocol.messages import RemoteClient
from protocol.sockets import parse_identity

REMEMBERED = 4096  # numbers of connections; smaller ones than these are refused, used or not
LARGEST = 4096  # bytes of an introduction
LONGEST = 256  # characters of an account


class Introductions:
    """Admits each connection's identity once. A client that was forgotten, but whose connection is still
    open, cannot introduce itself again: its messages come through the same connection as the door's."""

    def __init__(self, key: bytes) -> None:
        """`key`: the engine's, with which the door proves its connections."""
        self._key = key
        self._incarnation = -1  # of the newest door
        self._used: set[int] = set()
        self._smallest: list[int] = []  # a heap of the same numbers
        self._floor = -1  # this number and smaller ones are refused

    def proven(self, identity: bytes) -> bool:
        """Whether the door made this identity."""
        try:
            return parse_identity(identity, self._key).role == "remote"
        except MalformedMessage:
            return False

    def read(self, identity: bytes, frames: list[bytes]) -> RemoteClient:
        """The client behind a proven connection that is not known yet. Raises MalformedMessage where these
        frames are no introduction, or where this connection has had its own."""
        if sum(map(len, frames)) > LARGEST:
            raise MalformedMessage("too large for an introduction")
        connection = parse_identity(identity, self._key)
        message: Any = decode(frames)
        if not isinstance(message, RemoteClient):
            raise MalformedMessage(f"{type(message).__name__} before the introduction")
        if message.right not in RIGHTS or not 0 < len(message.account) <= LONGEST:
            raise MalformedMessage("RemoteClient of no account or right")
        if not message.account.isascii() or not message.account.isprintable() or message.account == "local":
            raise MalformedMessage("RemoteClient.account is no key")
        if connection.incarnation > self._incarnation:
            self._incarnation, self._floor = connection.incarnation, -1
            self._used.clear()
            self._smallest.clear()
        if (
            connection.incarnation < self._incarnation
            or connection.index <= self._floor
            or connection.index in self._used
        ):
            raise MalformedMessage("this connection was introduced before")
        self._used.add(connection.index)
        heapq.heappush(self._smallest, connection.index)
        if len(self._smallest) > REMEMBERED:
            self._floor = heapq.heappop(self._smallest)
            self._used.discard(self._floor)
        return message
