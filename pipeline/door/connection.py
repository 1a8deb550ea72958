"""One connection of a client over tcp.

Its bytes are pumped to a socket of its own, a DEALER that plays CURVE's server, so no client meets another in
ZeroMQ: there are no identities to guess or to take. That socket is made when the first bytes are those of
ZeroMQ's protocol. Messages of a client with an admitted key are forwarded to the coordinator through another
DEALER, whose identity proves that it is the door's. Every queue on both ways is bounded: while one is full,
the side that fills it is not read.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import zmq
import zmq.asyncio

from pipeline.serving.client_sockets import LARGEST, MOST_FRAMES, more_frames
from protocol.codec import decode, encode
from protocol.errors import MalformedMessage
from protocol.keys import Admitted, EngineKeys
from protocol.messages import TAGS, Error, RemoteClient, RemoteGone
from protocol.sockets import Identity, connect_curve_server, connect_dealer, ipc_endpoint

SIGNATURE = 10  # bytes that a connection of ZMTP 2 or later begins with: 0xff, eight of any value, 0x7f
CHUNK = 65536  # bytes read at once, and kept in each direction
QUEUED = 8  # messages in each ZeroMQ queue towards the client and from the coordinator
UNREAD = 2  # messages of the client in the queue from it, of up to 4 MB each
HANDSHAKE = 4096  # bytes that a client sends before its key is known; ours send less than 600
FRAMING = 128  # bytes that encryption and framing add to a frame, and more
LAST_MESSAGES = 0.5  # seconds to forward the last messages at the end of a connection, each way
log = logging.getLogger(__name__)

BROKEN = (OSError, RuntimeError)  # of a transport that the other end has broken: uvloop raises either
_ERROR = next(tag for tag, message in TAGS.items() if message is Error).to_bytes()


@dataclass(frozen=True)
class Engine:
    """What connections need to know of their engine."""

    runtime: Path
    key: bytes  # with which its processes prove their identity
    incarnation: int  # of the door
    numbers: Iterator[int] = field(default_factory=itertools.count)  # of connections to the coordinator


class Pump:
    """Bytes of one direction, from when to when."""

    def __init__(self) -> None:
        self.last = time.monotonic()  # time at which the latest bytes came
        self.full_since: float | None = None  # time since which its receiver takes none

    async def run(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: Callable[[int], None]
    ) -> None:
        """Until the reader's end, or until one side breaks."""
        with suppress(*BROKEN):
            while data := await reader.read(CHUNK):
                self.last = time.monotonic()
                count(len(data))
                writer.write(data)
                self.full_since = self.last
                await writer.drain()
                self.full_since = None


class Connection:
    """Created for an accepted socket; `serve` runs as a task of its own until the connection has ended."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        tcp: socket.socket,
        number: int,
        engine: Engine,
        address: str,
        most_unread: int,
    ) -> None:
        """`address`: of the client's machine; `most_unread`: the limit of `unread`, which ends the
        connection."""
        self.number = number
        self.address = address
        self.machine = machine(address)
        self.fault = ""  # of the client, which ended the connection
        self.began = time.monotonic()
        self.client: Admitted | None = None  # once its key is known
        self.refusal = ""  # why the client's Hello will be refused
        self.unread = 0  # bytes of the client that are no whole message yet, or were not forwarded
        self.greeted = False  # the client has sent a message
        self._answered = False  # the coordinator has
        self._most_unread = most_unread
        self._context = context
        self._tcp = tcp
        self._engine = engine
        self._in, self._out = Pump(), Pump()
        self._forwarding = False  # a message is on its way to the coordinator
        self._coordinator: zmq.asyncio.Socket | None = None  # once the client has sent a message
        self._answering: asyncio.Task[None] | None = None  # from the coordinator to the client
        self._sockets: list[zmq.asyncio.Socket] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._serving: asyncio.Task[object] | None = None

    def close(self) -> None:
        """End the connection now."""
        for writer in self._writers:
            writer.transport.abort()
        if self._serving is not None:
            self._serving.cancel()
        else:  # `serve` has not begun, or never will
            self._tcp.close()

    def stalled(self, silence: float) -> bool:
        """Whether a client sends nothing for so long, not even heartbeats, or takes nothing."""
        now = time.monotonic()
        silent = self._answered and self._in.full_since is None and now - self._in.last > silence
        return silent or (self._out.full_since is not None and now - self._out.full_since > silence)

    async def serve(self, keys: EngineKeys) -> None:
        """Until the client or the coordinator ends the connection, or `close`."""
        self._serving = asyncio.current_task()
        if self._tcp.fileno() < 0:
            return
        try:
            with suppress(*BROKEN, asyncio.IncompleteReadError):
                await self._serve(keys)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for zmq_socket in self._sockets:
                zmq_socket.close()
            for writer in self._writers:
                writer.transport.abort()
            if not self._writers:
                self._tcp.close()

    async def _serve(self, keys: EngineKeys) -> None:
        reader, writer = await self._streams(self._tcp)
        signature = await reader.readexactly(SIGNATURE)
        if signature[0] != 0xFF or not signature[-1] & 1:
            return
        client, inner = await self._curve_server(keys)
        inner_reader, inner_writer = await self._streams(inner)
        inner_writer.write(signature)
        self._start(self._from_client(reader, inner_writer))
        self._start(self._to_coordinator(client))
        # ZeroMQ closes its end after the client's, or when `client` was closed and its last message is sent.
        await self._out.run(inner_reader, writer, lambda size: None)
        await self._forward_last(client)
        writer.transport.set_write_buffer_limits(0)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_MESSAGES):
                await writer.drain()

    async def _curve_server(self, keys: EngineKeys) -> tuple[zmq.asyncio.Socket, socket.socket]:
        """The socket that the client's bytes are for, and the other end of its connection."""
        endpoint = ipc_endpoint(self._engine.runtime, f"tcp{self.number}")
        path = endpoint.removeprefix("ipc://")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.setblocking(False)
            listener.bind(path)
            try:
                listener.listen(1)
                client = connect_curve_server(
                    self._context,
                    endpoint,
                    keys,
                    domain=str(self.number).encode(),
                    send_hwm=QUEUED,
                    receive_hwm=UNREAD,
                    largest=LARGEST,
                )
                self._sockets.append(client)
                inner, _ = await asyncio.get_running_loop().sock_accept(listener)
            finally:
                os.unlink(path)
        return client, inner

    async def _streams(self, end: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(sock=end, limit=CHUNK)
        self._writers.append(writer)
        return reader, writer

    async def _from_client(self, reader: asyncio.StreamReader, inner: asyncio.StreamWriter) -> None:
        await self._in.run(reader, inner, self._count)
        with suppress(*BROKEN):
            inner.write_eof()

    def _count(self, size: int) -> None:
        self.unread += size
        if self.client is None and self.unread > HANDSHAKE:  # ZeroMQ would keep and read all of it
            self.close()
        elif self.unread > self._most_unread:
            self.fault = f"more than {self._most_unread >> 20} MB of it are unread"
            self.close()

    async def _to_coordinator(self, client: zmq.asyncio.Socket) -> None:
        shadow: zmq.Socket[bytes] = zmq.Socket.shadow(client.underlying)
        while True:
            frames = [await client.recv(), *more_frames(shadow, MOST_FRAMES - 1)]
            if shadow.getsockopt(zmq.RCVMORE):  # receiving the others would take seconds
                self.fault = f"a message of it has more than {MOST_FRAMES} frames"
                self.close()
                return
            self._forwarding = self.greeted = True
            if self._coordinator is None:
                if self.refusal or self.client is None:
                    await client.send_multipart(encode(Error(-1, self.refusal)))
                    client.close()
                    return
                self._coordinator = await self._introduce(self.client)
                self._answering = self._start(self._to_client(self._coordinator, client))
            await self._coordinator.send_multipart(frames)
            self.unread = max(0, self.unread - sum(len(frame) + FRAMING for frame in frames))
            self._forwarding = False
            await asyncio.sleep(0)  # receiving a message that has arrived does not suspend

    async def _introduce(self, client: Admitted) -> zmq.asyncio.Socket:
        """A new connection to the coordinator, with the client's RemoteClient."""
        engine = self._engine
        name = Identity("remote", next(engine.numbers), engine.incarnation).prove(engine.key)
        remote = ipc_endpoint(engine.runtime, "remote.sock")
        coordinator = connect_dealer(
            self._context, remote, identity=name, send_hwm=QUEUED, receive_hwm=QUEUED
        )
        self._sockets.append(coordinator)
        introduction = RemoteClient(client.key.decode(), client.right, self.address)
        await coordinator.send_multipart(encode(introduction))
        return coordinator

    async def _to_client(self, coordinator: zmq.asyncio.Socket, client: zmq.asyncio.Socket) -> None:
        while True:
            frames = await coordinator.recv_multipart()
            if not self._answered:
                self._in.last = time.monotonic()
                self._answered = True
            await client.send_multipart(frames)
            if _ends_connection(frames):
                client.close()  # after its last message
                return
            await asyncio.sleep(0)

    async def _forward_last(self, client: zmq.asyncio.Socket) -> None:
        """Until the coordinator has handled the client's last messages."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_MESSAGES):
                while not client.closed:
                    if not self._forwarding and not cast(int, client.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                        break
                    await asyncio.sleep(0.005)
                if self._coordinator is None or self._answering is None or self._answering.done():
                    return
                self._answering.cancel()  # it may wait for the client to read
                await asyncio.wait([self._answering])
                await self._coordinator.send_multipart(encode(RemoteGone()))
                while not _ends_connection(await self._coordinator.recv_multipart()):
                    pass

    def _start(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        task.add_done_callback(self._on_task_end)
        self._tasks.append(task)
        return task

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("a connection failed: %r", error)
            self.close()


def machine(address: str) -> str:
    """What all addresses of one machine have in common: of IPv6 the first 64 bits, of IPv4 all."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is None:
        return found.exploded[: len("2001:0db8:0000:0000")]
    return address


def _ends_connection(frames: list[bytes]) -> bool:
    if frames[0][:1] != _ERROR:
        return False
    try:
        message = decode(frames)
    except MalformedMessage:
        return True
    return isinstance(message, Error) and message.request == -1
