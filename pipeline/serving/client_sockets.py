"""The sockets for clients: that of local ones, and that of the door, for remote ones. Runs in the event loop;
handles frames, not messages."""

from __future__ import annotations

import asyncio
import resource
from contextlib import suppress
from typing import cast

import zmq
import zmq.asyncio

from pipeline.rate_limit import RateLimiter
from protocol.codec import encode
from protocol.messages import HEADER_LIMIT, Error
from protocol.sockets import CLIENT_IDENTITY, bind_router, is_client_identity

SEND_HWM = 64  # messages in a client's socket; the rest wait in its Outbox, where they are counted
RECEIVE_HWM = 4  # unread messages of a client, of up to 4 MB each
LARGEST = HEADER_LIMIT + 4096  # bytes of a frame: clients send headers and no arrays
MOST_FRAMES = 16  # of a message; clients send 2
SLICE = 256  # frames that are dropped at once: less than a millisecond
ANONYMOUS_REFUSALS = 50  # refusals a second that are sent to connections without a Welcome
NO_IDENTITY = f"set a ZeroMQ identity of {CLIENT_IDENTITY} random bytes; the first must not be zero"


class ClientSocket:
    """A bound ROUTER in a context of its own, so with its own I/O thread: a flood on one delays no other."""

    def __init__(self, endpoint: str, *, silent: bool = False) -> None:
        """`silent`: senders without an identity of their own get no answer. Raises ProtocolError where the
        endpoint cannot be bound."""
        self._silent = silent
        self._context = zmq.asyncio.Context()
        try:
            self._socket = bind_router(
                self._context, endpoint, send_hwm=SEND_HWM, receive_hwm=RECEIVE_HWM, largest=LARGEST
            )
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._frames: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)
        self.refusals = RateLimiter(ANONYMOUS_REFUSALS)  # of connections without a Welcome
        most_descriptors()

    async def receive(self) -> tuple[bytes, list[bytes], int]:
        """The next message: its sender's routing id, its first frames, and the number of frames beyond
        MOST_FRAMES, which were dropped. Of senders without an identity of their own messages
        are dropped, and a few answered: a made one can be guessed, and an answer sent to it intercepted."""
        while True:
            sender = await self._socket.recv()
            frames = more_frames(self._frames, MOST_FRAMES)
            dropped = 0
            while self._frames.getsockopt(zmq.RCVMORE):  # a ROUTER reads no other message before the end
                dropped += len(more_frames(self._frames, SLICE))
                await asyncio.sleep(0)
            if is_client_identity(sender):
                return sender, frames, dropped
            if not self._silent and self.refusals.spend():
                with suppress(zmq.ZMQError):
                    self.send(sender, encode(Error(-1, NO_IDENTITY)))
            await asyncio.sleep(0)  # receiving a message that has arrived does not suspend

    def send(self, receiver: bytes, frames: list[bytes | memoryview]) -> None:
        """Hand a message to the socket without waiting. Raises zmq.Again where its receiver's queue is full,
        another zmq.ZMQError where the receiver has disconnected."""
        # With NOBLOCK the message is sent when this returns; the future only carries the outcome.
        sent = self._socket.send_multipart([receiver, *frames], flags=zmq.NOBLOCK)
        cast(asyncio.Future[None], sent).result()

    def close(self) -> None:
        """Close, after up to the socket's linger time for messages under way."""
        self._socket.close()
        self._context.term()


def more_frames(socket: zmq.Socket[bytes], most: int) -> list[bytes]:
    """The next frames of a message whose first ones were received; they have arrived together."""
    frames: list[bytes] = []
    while len(frames) < most and socket.getsockopt(zmq.RCVMORE):
        frames.append(socket.recv())
    return frames


def most_descriptors() -> int:
    """Raise this process's limit of file descriptors as far as it may; returns it. Each connection is one,
    and without free ones a process can open no file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
