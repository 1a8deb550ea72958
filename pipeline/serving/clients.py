"""The coordinator's client connections: the socket, handshakes, message dispatch, outgoing queues,
disconnects.

Runs in the event loop. A client is connected from its Hello until it is silent for too long. Each has its own
outgoing queue and task, so a client that does not read delays no other. Every message is answered, or counted
and dropped: no message ends `serve`.

All clients are programs of the user, so they are limited where one with a bug would harm the engine. A client
that sends too many refused messages in a second, or does not read, is cut off: its requests end, and its
messages are dropped for a while. Connections without a Welcome share a few answers a second, and leave no
state.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from time import thread_time
from typing import Any, cast

import zmq
import zmq.asyncio
from msgspec.structs import replace

from pipeline.fairness import RateLimiter, SparseLog, TimeShare
from protocol.codec import decode, encode
from protocol.connection import HEARTBEAT_SECONDS
from protocol.errors import MalformedMessage
from protocol.messages import HEADER_LIMIT, SAY_HELLO, VERSION, Done, Error, Heartbeat, Hello, Welcome
from protocol.sockets import CLIENT_IDENTITY, bind_router, is_client_identity

log = logging.getLogger(__name__)

SEND_HWM = 64  # messages in a client's socket; the rest wait in its Client, where they are counted
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
MOST_CLIENTS = 512
SILENCE_LIMIT = 10.0  # seconds without a message, or without reading one, that disconnect a client
CONGESTED_BYTES = 64 << 20  # queued for one client, beyond which its requests pause
QUEUE_LIMIT = 32768  # messages queued for one client, which sends requests and does not read
QUEUED_BYTES = 1 << 30  # for all clients together; beyond, the client with the longest queue is cut off
LARGEST_HELLO = 8192  # bytes of a message that is decoded before the Hello
REFUSED_LIMIT = 20  # refused messages of a client in a second
COSTLY = 200_000  # bytes of a refused message that count as another
CUT_OFF_SECONDS = 10.0  # for which messages of a client that was cut off are dropped
CUT_OFF_MOST = 256  # clients that are cut off at once; the oldest is forgotten

Frames = list[bytes | memoryview]
_sparse_log = SparseLog(log)


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

    async def serve(self, handle: Callable[[bytes, list[bytes]], None]) -> None:
        """Call `handle` with each message, as `receive` returns it, until cancelled."""
        share = TimeShare(SHARE, SHARE_BURST)
        while True:
            sender, frames = await self.receive()
            began = thread_time()
            handle(sender, frames)
            share.spend(thread_time() - began + MESSAGE_SECONDS + BYTE_SECONDS * sum(map(len, frames)))
            # Receiving a message that has arrived does not suspend: without this, a client that floods the
            # socket would block every other task, the heartbeats too. Clients are read in turn, so
            # during a pause each waits for at most one message of each other client.
            await asyncio.sleep(share.wait)

    async def receive(self) -> tuple[bytes, list[bytes]]:
        """Returns the next message: its sender's routing id, and its frames, MOST_FRAMES + 1 of them at most.
        Messages of senders without an identity of their own are dropped, and a few answered: a made one can
        be guessed, and an answer sent to it intercepted."""
        while True:
            sender = await self._socket.recv()
            frames = self._more_frames(MOST_FRAMES + 1)
            while self._frames.getsockopt(zmq.RCVMORE):  # a ROUTER reads no other message before the end
                self._more_frames(SLICE)
                await asyncio.sleep(0)
            if is_client_identity(sender):
                return sender, frames
            if self.refusals.spend():
                with suppress(zmq.ZMQError):
                    self.send(sender, encode(Error(-1, NO_IDENTITY)))
            await asyncio.sleep(0)  # receiving a message that has arrived does not suspend

    def _more_frames(self, most: int) -> list[bytes]:
        """Returns the next frames of a message whose first one was received; they have arrived together."""
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


class Client:
    """A client from its Hello on: the queue of its messages, so that one that does not read delays no
    other."""

    def __init__(self, send: Callable[[Frames], None]) -> None:
        """`send` raises zmq.Again where the socket is full, another ZMQError after a disconnect."""
        self.refusals = RateLimiter(REFUSED_LIMIT)
        self.last_message = time.monotonic()
        self.sender: asyncio.Task[None] | None = None
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


class Clients:
    """All clients, by their routing ids. `on_message(client, message)` is called for each message of a
    connected client but heartbeats; `on_gone(client)` when a client has disconnected."""

    def __init__(
        self,
        endpoint: str,
        welcome: Callable[[], Welcome],
        on_message: Callable[[bytes, object], None],
        on_gone: Callable[[bytes], None],
    ) -> None:
        """Raises ProtocolError where the endpoint cannot be bound."""
        self._socket = ClientSocket(endpoint)
        self._welcome = welcome
        self._on_message = on_message
        self._on_gone = on_gone
        self._clients: dict[bytes, Client] = {}
        self._cut_off_until: dict[bytes, float] = {}
        self._group: asyncio.TaskGroup | None = None
        self._log = SparseLog(log)
        self.malformed = 0
        self.cut_offs = 0  # clients that did not read, or sent too much
        self.unheard = 0  # dropped messages of clients that were cut off

    async def serve(self) -> None:
        """Serve all clients, until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            self._group.create_task(self._send_heartbeats())
            self._group.create_task(self._socket.serve(self._receive_safely))

    def send(self, client: bytes, message: object) -> None:
        """Queue a message; it is dropped where the client has disconnected."""
        known = self._clients.get(client)
        if known is not None:
            known.put(message)
            if len(known) > QUEUE_LIMIT:
                self.cut_off(client, f"{QUEUE_LIMIT} messages wait for it")

    def broadcast(self, message: object, but: bytes) -> None:
        """Send to every client but one."""
        for client in list(self._clients):  # a copy: `send` may cut off a client that does not read
            if client != but:
                self.send(client, message)

    def congested(self, client: bytes) -> bool:
        """Returns whether more than CONGESTED_BYTES are queued for this client. Any thread may call it."""
        known = self._clients.get(client)
        return known is not None and known.queued_bytes > CONGESTED_BYTES

    async def flush(self, limit: float) -> None:
        """Wait until all queues are handed to the socket, at most `limit` seconds."""
        waits = [asyncio.create_task(c.empty()) for c in self._clients.values()]
        if waits:
            _, late = await asyncio.wait(waits, timeout=limit)
            for task in late:
                task.cancel()

    def close(self) -> None:
        """Close, after up to the socket's linger time for messages under way."""
        self._socket.close()

    def cut_off(self, name: bytes, reason: str) -> None:
        """Disconnect a client that harms the engine, and drop its messages for a while."""
        while len(self._cut_off_until) >= CUT_OFF_MOST:
            del self._cut_off_until[next(iter(self._cut_off_until))]
        self._cut_off_until[name] = time.monotonic() + CUT_OFF_SECONDS
        self._log.warning(f"a client was cut off: {reason}")
        self.cut_offs += 1
        self._answer(name, Error(-1, f"cut off: {reason}"))
        self._forget(name)

    def refuse(self, sender: bytes, reason: str, cost: int = 1) -> None:
        """Refuse a message with an Error, within the sender's limit of refusals. `cost`: the number of small
        messages that take as long to refuse."""
        client = self._clients.get(sender)
        if client is None:
            if self._socket.refusals.spend():
                self._answer(sender, Error(-1, reason))
        elif client.refusals.spend(cost):
            self._answer(sender, Error(-1, reason))
        else:
            self.cut_off(sender, f"more than {REFUSED_LIMIT} messages in a second had to be refused")

    def counts(self) -> dict[str, int]:
        """Returns the counters of clients, for the engine's stats."""
        return {
            "connected": len(self._clients),
            "malformed": self.malformed,
            "cut_off": self.cut_offs,
            "unheard": self.unheard,
        }

    def _receive_safely(self, sender: bytes, frames: list[bytes]) -> None:
        try:
            self._receive(sender, frames)
        except Exception as e:
            # A bug of the engine, triggered by one client, must not affect the others.
            self._log.warning(f"a client's message could not be handled: {e!r}", failed=True)
            self.cut_off(sender, "the engine failed on its message")

    def _receive(self, sender: bytes, frames: list[bytes]) -> None:
        if self._is_cut_off(sender):
            self.unheard += 1
            return
        client = self._clients.get(sender)
        size = sum(map(len, frames))
        if client is None and (size > LARGEST_HELLO or len(frames) > MOST_FRAMES):
            self.malformed += 1
            self.refuse(sender, SAY_HELLO)
            return
        if len(frames) > MOST_FRAMES:
            self.malformed += 1
            self.cut_off(sender, f"a message of more than {MOST_FRAMES} frames")
            return
        try:
            message: Any = decode(frames)
        except MalformedMessage as e:
            self.malformed += 1
            self.refuse(sender, f"malformed message: {e}", cost=1 + size // COSTLY)
            return
        if isinstance(message, Hello):
            self._greet(sender, message)
        elif client is None:
            self.refuse(sender, SAY_HELLO)
        else:
            client.last_message = time.monotonic()
            if not isinstance(message, Heartbeat):
                self._on_message(sender, message)

    def _is_cut_off(self, client: bytes) -> bool:
        until = self._cut_off_until.get(client, 0.0)
        if until and until < time.monotonic():
            del self._cut_off_until[client]
            return False
        return until > 0.0

    def _greet(self, sender: bytes, hello: Hello) -> None:
        client = self._clients.get(sender)
        if hello.version != VERSION:
            self.refuse(sender, f"this engine speaks version {VERSION}, not {hello.version}")
        elif client is not None and not client.refusals.spend():
            self.cut_off(sender, "it repeats its Hello")
        elif client is None and len(self._clients) >= MOST_CLIENTS:
            self.refuse(sender, f"{len(self._clients)} clients are connected already; try again later")
        else:
            if client is None:
                self._connect(sender)
            self.send(sender, self._welcome())

    def _connect(self, name: bytes) -> None:
        client = self._clients[name] = Client(lambda frames: self._socket.send(name, frames))
        assert self._group is not None
        client.sender = self._group.create_task(self._pump(name, client))

    def _answer(self, sender: bytes, message: object) -> None:
        """Send at once, past the queue; where the socket is full the answer is dropped."""
        try:
            self._socket.send(sender, frames_of(message))
        except zmq.ZMQError as e:
            log.debug("an answer could not be sent: %s", e)

    async def _pump(self, name: bytes, client: Client) -> None:
        await client.pump()
        self._forget(name)

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            now = time.monotonic()
            for name, client in list(self._clients.items()):
                if now - client.last_message > SILENCE_LIMIT:
                    self._forget(name)
                elif client.full_since is not None and now - client.full_since > SILENCE_LIMIT:
                    self.cut_off(name, f"it read no message for {SILENCE_LIMIT:.0f} s")
                elif not len(client):
                    self.send(name, Heartbeat(now))
            self._limit_queues()

    def _limit_queues(self) -> None:
        while sum(client.queued_bytes for client in self._clients.values()) > QUEUED_BYTES:
            longest = max(self._clients, key=lambda name: self._clients[name].queued_bytes)
            self.cut_off(longest, "too many unread messages are queued for it")

    def _forget(self, name: bytes) -> None:
        client = self._clients.pop(name, None)
        if client is not None:
            self._on_gone(name)
            if client.sender is not None and client.sender is not asyncio.current_task():
                client.sender.cancel()
