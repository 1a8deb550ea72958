"""The supervisor's end of the control channel: children report here, and are told to end."""

from __future__ import annotations

import logging

import zmq
import zmq.asyncio

from protocol.codec import decode, encode
from protocol.errors import MalformedMessage
from protocol.sockets import Identity, bind_router, identity, parse_identity

log = logging.getLogger(__name__)


class Control:
    """A bound ROUTER; `peer` is what tells one life of one child from another."""

    def __init__(self, endpoint: str) -> None:
        """Raises ProtocolError where the endpoint cannot be bound."""
        self._context = zmq.asyncio.Context()
        self._socket = bind_router(self._context, endpoint)

    async def receive(self) -> tuple[Identity, object]:
        """The next message and its sender. What is none is logged and skipped."""
        while True:
            name, *frames = await self._socket.recv_multipart()
            try:
                return parse_identity(name), decode(frames)
            except MalformedMessage as e:
                log.warning("control channel: %s", e)

    async def send(self, peer: Identity, message: object) -> bool:
        """False where this child never connected, or is gone, or does not read."""
        name = identity(peer.role, peer.index, peer.incarnation)
        try:
            await self._socket.send_multipart([name, *encode(message)], flags=zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Nothing is awaited: a child that has not been told by now is ended by a signal."""
        self._socket.close(linger=0)
        self._context.term()
