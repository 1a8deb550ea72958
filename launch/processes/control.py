"""The supervisor's end of the control socket: children report here, and receive Shutdown."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import cast

import zmq
import zmq.asyncio

from pipeline.fairness import SparseLog
from protocol.codec import decode, encode
from protocol.errors import MalformedMessage
from protocol.messages import HEADER_LIMIT
from protocol.sockets import CHILD_HWM, Identity, bind_router, parse_identity

log = logging.getLogger(__name__)

TURN_SECONDS = 0.002  # of receiving without giving other tasks a turn


class Control:
    """A bound ROUTER. With `key`, the engine's, children prove their identity."""

    def __init__(self, endpoint: str) -> None:
        """Raises ProtocolError where the endpoint cannot be bound."""
        self.key = secrets.token_bytes(32)
        self._log = SparseLog(log)
        self._context = zmq.asyncio.Context()
        self._socket = bind_router(self._context, endpoint, receive_hwm=CHILD_HWM, largest=HEADER_LIMIT)
        self._turn = 0.0  # when this task's turn in the event loop began

    async def receive(self) -> tuple[Identity, object]:
        """The next message and its sender. Malformed ones are dropped, and a few of them logged."""
        while True:
            name, *frames = await self._frames()
            try:
                return parse_identity(name, self.key), decode(frames)
            except MalformedMessage as e:
                self._log.warning(f"dropped a malformed message on the control socket: {e}")

    async def _frames(self) -> list[bytes]:
        """Does not wait where a message is there, but a flood does not keep every other task from running."""
        if time.perf_counter() - self._turn > TURN_SECONDS:
            await asyncio.sleep(0)
            self._turn = time.perf_counter()
        try:
            return cast("asyncio.Future[list[bytes]]", self._socket.recv_multipart(zmq.NOBLOCK)).result()
        except zmq.Again:
            frames: list[bytes] = await self._socket.recv_multipart()
            self._turn = time.perf_counter()
            return frames

    async def send(self, child: Identity, message: object) -> bool:
        """Send a message; False where this child never connected, has exited, or does not read."""
        try:
            await self._socket.send_multipart([child.prove(self.key), *encode(message)], flags=zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Without waiting for unsent messages: a child that has no Shutdown by now was sent a signal."""
        self._socket.close(linger=0)
        self._context.term()
