"""One client socket of a coordinator: handshake, heartbeats, and the judgement that the engine is gone.

Knows nothing of requests; `client.py` builds those on it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import cast

import zmq
import zmq.asyncio

from protocol.codec import decode, encode, wire_version
from protocol.errors import EngineGone, MalformedMessage, RequestFailed, VersionMismatch
from protocol.messages import VERSION, Cancel, Error, Heartbeat, Hello, Welcome
from protocol.sockets import HWM, connect_dealer

HEARTBEAT_SECONDS = 0.5
SILENCE_SECONDS = 2.5
_WAITS = 10  # a silence is this many waits in a row without a message


class Connection:
    """A DEALER that has been welcomed. Made by `open_connection`; used by one task at a time."""

    def __init__(self, socket: zmq.asyncio.Socket, endpoint: str) -> None:
        self._socket = socket
        self._endpoint = endpoint
        self.welcome: Welcome

    def send(self, message: object) -> None:
        """Queue a message, at once. Raises MalformedMessage for one that cannot be encoded, RequestFailed
        where the queue towards the engine is full."""
        try:
            # Not waiting, this has happened when it returns, and the future only carries how it went.
            sent = self._socket.send_multipart(encode(message), flags=zmq.NOBLOCK)
            cast("asyncio.Future[None]", sent).result()
        except zmq.Again:
            raise RequestFailed(f"{HWM} messages already wait to be taken by the engine; ask later") from None

    def cancel(self, request: int) -> None:
        """Queue a Cancel. Where the queue is full nobody is there to take it, and nothing to be ended."""
        with suppress(RequestFailed):
            self.send(Cancel(request))

    async def receive(self) -> object:
        """The next message that is no heartbeat. Raises EngineGone after 2.5 s of waiting without any.

        Only time spent waiting here counts as the engine's silence, in short waits: what a busy program
        did not read, or could not read while its event loop was held up, is not held against the engine.
        """
        silent_waits = 0
        while silent_waits < _WAITS:
            try:
                frames = await self._socket.recv_multipart()  # for at most the socket's receive timeout
            except zmq.Again:
                silent_waits += 1
                continue
            silent_waits = 0
            # Receiving what is already there does not suspend: without this a stream that is always ahead
            # of its reader would keep every other task from running, the heartbeats too.
            await asyncio.sleep(0)
            message = decode(frames)
            if isinstance(message, Error) and message.request == -1:
                raise EngineGone(f"the engine ended this connection: {message.text}")
            if not isinstance(message, Heartbeat):
                return message
        raise EngineGone(f"the engine at {self._endpoint} has been silent for {SILENCE_SECONDS} s")

    async def shake_hands(self, name: str) -> None:
        """Hello and Welcome. Raises VersionMismatch; waits without a limit of its own."""
        self.send(Hello(VERSION, name))
        frames = [b""]
        try:
            while True:
                with suppress(zmq.Again):
                    frames = await self._socket.recv_multipart()
                    match decode(frames):
                        case Welcome() as welcome:
                            self.welcome = welcome
                            break
                        case Error(text=text):
                            raise VersionMismatch(f"the engine refused this client: {text}")
            theirs: int | None = welcome.version
        except MalformedMessage:
            theirs = wire_version(frames)
            if theirs in (None, VERSION):
                raise
        if theirs != VERSION:
            raise VersionMismatch(
                f"the engine speaks protocol version {theirs}, this client version {VERSION}; "
                "use the client that was installed with the engine"
            )

    async def beat(self) -> None:
        """Send heartbeats until cancelled."""
        while True:
            with suppress(RequestFailed):  # a full queue: the engine will see life enough in it
                self.send(Heartbeat(time.monotonic()))
            await asyncio.sleep(HEARTBEAT_SECONDS)


@asynccontextmanager
async def open_connection(
    endpoint: str, name: str, timeout: float, *, receive_hwm: int = HWM
) -> AsyncIterator[Connection]:
    """A welcomed connection, with heartbeats for as long as the block lasts.

    Raises EngineGone where nobody answers within `timeout` seconds, VersionMismatch, and ProtocolError for
    an unusable endpoint.
    """
    socket = connect_dealer(zmq.asyncio.Context.instance(), endpoint, receive_hwm=receive_hwm)
    try:
        socket.setsockopt(zmq.RCVTIMEO, int(SILENCE_SECONDS / _WAITS * 1000))
        connection = Connection(socket, endpoint)
        try:
            async with asyncio.timeout(timeout):
                await connection.shake_hands(name)
        except TimeoutError:
            socket.close(linger=0)
            raise EngineGone(f"no engine at {endpoint} within {timeout:g} s; is it running?") from None
        heart = asyncio.create_task(connection.beat(), name=f"heartbeats to {endpoint}")
        try:
            yield connection
        finally:
            await end_task(heart)
    finally:
        socket.close()


async def end_task(task: asyncio.Task[None]) -> None:
    """Cancel a task of ours and wait for it; if it had failed on its own, that is raised here."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
