"""Messages from and to clients: the socket, which is read within a share of the time, the queue for one
client, and limits of what messages hold. Runs in the event loop."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import thread_time
from typing import cast

import zmq
import zmq.asyncio
from msgspec.structs import replace

from pipeline.rate_limit import RateLimiter, SparseLog, TimeShare
from protocol.codec import decode, encode
from protocol.errors import MalformedMessage
from protocol.messages import HEADER_LIMIT, Calibrate, Done, Error, Generate, Score, SetPolicy, Tokenize
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
ROLE_LIMIT = 256  # characters of a turn's role
GRAMMAR_LIMIT = 1 << 18  # characters
OPTIONS_LIMIT = 64  # options of a policy
OPTION_LIMIT = 1024  # characters of a policy's name, and of an option's name and value
EXCERPTS_LIMIT = 1 << 16  # of a calibration

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


class RequestRefused(Exception):
    """A request that can never be served. `answer`: the message that says so."""

    def __init__(self, answer: Done | Error) -> None:
        super().__init__(answer)
        self.answer = answer


def read_message(frames: Sequence[bytes]) -> object:
    """Decode a client's message. Raises RequestRefused for a text that is larger than any request needs, and
    MalformedMessage as `decode`."""
    message = decode(frames)
    match message:
        case Generate() | Score() | Calibrate() | Tokenize():
            if reason := _too_much(message):
                raise RequestRefused(Done(message.request, "error", reason, usage=True))
        case SetPolicy():
            if reason := _too_many_options(message):
                raise RequestRefused(Error(message.request, reason))
    return message


def _too_much(message: Generate | Score | Calibrate | Tokenize) -> str:
    """Which text of a request is too long; "" where none is."""
    if isinstance(message, Calibrate):
        excerpts = len(message.starts)
        return f"starts has {excerpts} entries, at most {EXCERPTS_LIMIT} can be" * (excerpts > EXCERPTS_LIMIT)
    if isinstance(message, Score):
        return ""
    if isinstance(message, Generate) and len(message.shaping.grammar) > GRAMMAR_LIMIT:
        return f"a grammar has {GRAMMAR_LIMIT} characters at most"
    if any(len(turn.role) > ROLE_LIMIT for turn in message.messages or ()):
        return f"a turn's role has {ROLE_LIMIT} characters at most"
    return ""


def _too_many_options(message: SetPolicy) -> str:
    if len(message.options) > OPTIONS_LIMIT:
        return f"a policy has {OPTIONS_LIMIT} options at most"
    if any(len(text) > OPTION_LIMIT for pair in message.options.items() for text in pair):
        return f"an option of a policy has {OPTION_LIMIT} characters at most"
    if len(message.policy) > OPTION_LIMIT:
        return f"a policy's name has {OPTION_LIMIT} characters at most"
    return ""
