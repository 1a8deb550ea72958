"""The socket for clients, which is read within a share of the time, and the queue of messages to one client.
Runs in the event loop."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from time import thread_time
from typing import cast

import zmq
import zmq.asyncio
from msgspec.structs import replace

from pipeline.rate_limit import RateLimiter, SparseLog, TimeShare
from protocol.codec import encode
from protocol.errors import MalformedMessage
from protocol.messages import HEADER_LIMIT, Done, Error
from protocol.sockets import CLIENT_IDENTITY, bind_router, is_client_identity

SEND_HWM = 64  # messages in a client's socket; the rest wait in its Outbox, where they are counted
RECEIVE_HWM = 4  # unread messages of a client, of up to 4 MB each
LARGEST = HEADER_LIMIT + 4096  # bytes of a frame: clients send headers and no arrays
MOST_FRAMES = 16  # of a message; clients send 2
SLICE = 256  # frames that are dropped at once: less than a millisecond
ANONYMOUS_REFUSALS = 50  # refusals a second that are sent to connections without a Welcome
NO_IDENTITY = f"set a ZeroMQ identity of {CLIENT_IDENTITY} random bytes; the first must not be zero"
SHARE = 0.15  # of one core's time, for all clients' messages: the engine's thread needs the interpreter, too
SHARE_BURST = 0.01  # seconds of it at once
MESSAGE_SECONDS = 60e-6  # to receive a message and to send its answer, beside the time to handle it
BYTE_SECONDS = 2e-9  # to receive a byte
RETRY = 0.005  # seconds until a full socket is tried again
OVERHEAD = 4096  # bytes counted for a message beside its own: 16384 small messages are a congestion
LONGEST_ERROR = 1000  # characters

Frames = list[bytes | memoryview]
log = logging.getLogger(__name__)


class ClientSocket:
    """A bound ROUTER in a context of its own, so with its own I/O thread: a flood on it delays no worker."""

    def __init__(self, endpoint: str) -> None:
        """Raises ProtocolError where the endpoint cannot be bound."""
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
        # Each connection is a descriptor, and without free ones a process can open no file.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    async def serve(self, handle: Callable[[bytes, list[bytes], int], None]) -> None:
        """Call `handle` with each message, as `receive` returns it, until cancelled."""
        share = TimeShare(SHARE, SHARE_BURST)
        while True:
            sender, frames, dropped = await self.receive()
            began = thread_time()
            handle(sender, frames, dropped)
            share.spend(thread_time() - began + MESSAGE_SECONDS + BYTE_SECONDS * sum(map(len, frames)))
            # Receiving a message that has arrived does not suspend: without this, a client that floods the
            # socket would block every other task, the heartbeats too. Clients are read in turn, so
            # during a pause each waits for at most one message of each other client.
            await asyncio.sleep(share.wait)

    async def receive(self) -> tuple[bytes, list[bytes], int]:
        """The next message: its sender's routing id, its first frames, and the number of frames beyond
        MOST_FRAMES, which were dropped. Of senders without an identity of their own messages
        are dropped, and a few answered: a made one can be guessed, and an answer sent to it intercepted."""
        while True:
            sender = await self._socket.recv()
            frames = self._more_frames(MOST_FRAMES)
            dropped = 0
            while self._frames.getsockopt(zmq.RCVMORE):  # a ROUTER reads no other message before the end
                dropped += len(self._more_frames(SLICE))
                await asyncio.sleep(0)
            if is_client_identity(sender):
                return sender, frames, dropped
            if self.refusals.spend():
                with suppress(zmq.ZMQError):
                    self.send(sender, encode(Error(-1, NO_IDENTITY)))
            await asyncio.sleep(0)  # receiving a message that has arrived does not suspend

    def _more_frames(self, most: int) -> list[bytes]:
        """The next frames of a message whose first one was received; they have arrived together."""
        frames: list[bytes] = []
        while len(frames) < most and self._frames.getsockopt(zmq.RCVMORE):
            frames.append(self._frames.recv())
        return frames

    def send(self, receiver: bytes, frames: Frames) -> None:
        """Hand a message to the socket without waiting. Raises zmq.Again where its receiver's queue is full,
        another zmq.ZMQError where the receiver has disconnected."""
        # With NOBLOCK the message is sent when this returns; the future only carries the outcome.
        sent = self._socket.send_multipart([receiver, *frames], flags=zmq.NOBLOCK)
        cast("asyncio.Future[None]", sent).result()

    def close(self) -> None:
        """Close, after up to the socket's linger time for messages under way."""
        self._socket.close()
        self._context.term()


class Outbox:
    """A queue of messages and the task that sends it, so that a client that does not read delays no other."""

    def __init__(self, send: Callable[[Frames], None]) -> None:
        """`send` raises zmq.Again where the socket is full, another ZMQError after a disconnect."""
        self.queued_bytes = 0
        self.full_since: float | None = None  # time at which the socket became full
        self._send = send
        self._queue: asyncio.Queue[tuple[Frames, int]] = asyncio.Queue()  # messages and their sizes

    def __len__(self) -> int:
        return self._queue.qsize()

    def put(self, message: object) -> None:
        """Queue a message."""
        frames = frames_of(message)
        size = OVERHEAD + sum(memoryview(frame).nbytes for frame in frames)
        self.queued_bytes += size
        self._queue.put_nowait((frames, size))

    async def pump(self) -> None:
        """Send the queue, trying again while the socket is full, until the client has disconnected."""
        while True:
            frames, size = await self._queue.get()
            while True:
                try:
                    self._send(frames)
                except zmq.Again:
                    self.full_since = self.full_since or time.monotonic()
                    await asyncio.sleep(RETRY)
                    continue
                except zmq.ZMQError:
                    return
                self.full_since = None
                break
            self.queued_bytes -= size
            self._queue.task_done()

    async def empty(self) -> None:
        """Wait until all queued messages were handed to the socket."""
        await self._queue.join()


def frames_of(message: object) -> Frames:
    """Encode a message to a client; where that fails, an Error for the same request. Errors quote the
    client's own text, which may be megabytes, so they are cut."""
    if isinstance(message, Error) and len(message.text) > LONGEST_ERROR:
        message = replace(message, text=message.text[:LONGEST_ERROR] + "...")
    elif isinstance(message, Done) and len(message.error) > LONGEST_ERROR:
        message = replace(message, error=message.error[:LONGEST_ERROR] + "...")
    try:
        return encode(message)
    except MalformedMessage as e:
        _sparse_log.warning(f"an answer could not be encoded: {e}")
        return encode(Error(getattr(message, "request", -1), f"the engine's answer cannot be sent: {e}"))


_sparse_log = SparseLog(log)
