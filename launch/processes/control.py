"""The supervisor's end of the control channel: children report here, and are told to end."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import cast

import zmq
import zmq.asyncio

from pipeline.rate_limit import SparseLog
from protocol.checks import DEFAULT
from protocol.codec import decode, encode
from protocol.errors import MalformedMessage
from protocol.sockets import Identity, bind_router, parse_identity

log = logging.getLogger(__name__)

RECEIVE_HWM = 64  # messages of one peer that may wait to be read: a stranger's too
TURN_SECONDS = 0.002  # of messages in a row


class Control:
    """A bound ROUTER; `peer` is what tells one life of one child from another. `key` is the engine's: what
    its children prove themselves with."""

    def __init__(self, endpoint: str) -> None:
        """Raises ProtocolError where the endpoint cannot be bound."""
        self.key = secrets.token_bytes(32)
        self._log = SparseLog(log)
        self._context = zmq.asyncio.Context()
        self._socket = bind_router(self._context, endpoint, receive_hwm=RECEIVE_HWM, largest=DEFAULT.header)
        self._turn = 0.0  # when this task's turn in the event loop began

    async def receive(self) -> tuple[Identity, object]:
        """The next message and its sender. What is none is skipped, and of many a few are logged."""
        while True:
            name, *frames = await self._frames()
            try:
                return parse_identity(name, self.key), decode(frames)
            except MalformedMessage as e:
                self._log.warning(f"dropped a malformed message on the control socket: {e}")

    async def _frames(self) -> list[bytes]:
        """What is already there is taken at once, but not for so long that a flood keeps every other task
        from running."""
        if time.perf_counter() - self._turn > TURN_SECONDS:
            await asyncio.sleep(0)
            self._turn = time.perf_counter()
        try:
            return cast("asyncio.Future[list[bytes]]", self._socket.recv_multipart(zmq.NOBLOCK)).result()
        except zmq.Again:
            frames: list[bytes] = await self._socket.recv_multipart()
            self._turn = time.perf_counter()
            return frames

    async def send(self, peer: Identity, message: object) -> bool:
        """False where this child never connected, or is gone, or does not read."""
        try:
            await self._socket.send_multipart([peer.prove(self.key), *encode(message)], flags=zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Nothing is awaited: a child that has not been told by now is ended by a signal."""
        self._socket.close(linger=0)
        self._context.term()
