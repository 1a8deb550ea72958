"""One client socket of a coordinator: handshake, heartbeats, and the judgement that the engine is gone.

Knows nothing of requests, nor of other connections before and after it; `link.py` knows those.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import cast

import zmq
import zmq.asyncio

from protocol.codec import decode, encode, wire_version
from protocol.errors import (
    ConnectionLost,
    EngineGone,
    MalformedMessage,
    RequestFailed,
    VersionMismatch,
)
from protocol.keys import Address
from protocol.messages import SAY_HELLO, VERSION, Cancel, Error, Heartbeat, Hello, Welcome
from protocol.sockets import HWM, connect_dealer

HEARTBEAT_SECONDS = 0.5
SILENCE_SECONDS = 2.5
_WAITS = 10  # a silence is this many waits in a row without a message


class Connection:
    """A DEALER that has been welcomed. Made by `open_connection`; used by one task at a time."""

    def __init__(self, socket: zmq.asyncio.Socket, endpoint: str) -> None:
        self._socket = socket
        self._endpoint = endpoint
        self._heart: asyncio.Task[None] | None = None
        # Gets a message when the transport breaks, as it does where the process at the other end dies.
        self._breaks = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
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
        """The next message that is no heartbeat. Raises ConnectionLost after 2.5 s of waiting without any,
        and where the engine does not know this client; EngineGone where it has another reason to end this.

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
                text = f"the engine ended this connection: {message.text}"
                if message.text == SAY_HELLO:
                    raise ConnectionLost(text, dropped=not self._has_broken())
                raise EngineGone(text)
            if not isinstance(message, Heartbeat):
                return message
        raise ConnectionLost(f"the engine at {self._endpoint} has been silent for {SILENCE_SECONDS} s")

    def _has_broken(self) -> bool:
        """Whether somebody else may be at the other end now, to whom ZeroMQ has connected by itself."""
        return bool(cast(int, self._breaks.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    async def shake_hands(self, name: str) -> None:
        """Hello and Welcome, and heartbeats from then on. Raises VersionMismatch; waits without a limit of
        its own."""
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
        self._heart = asyncio.create_task(self._beat(), name=f"heartbeats to {self._endpoint}")

    async def _beat(self) -> None:
        """Send heartbeats until cancelled."""
        while True:
            with suppress(RequestFailed):  # a full queue: the engine will see life enough in it
                self.send(Heartbeat(time.monotonic()))
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def close(self, *, deliver: bool) -> None:
        """End it; `deliver`: what is still queued goes out, within the socket's linger time."""
        try:
            if self._heart is not None:
                heart, self._heart = self._heart, None
                await end_task(heart)
        finally:
            self._socket.disable_monitor()
            self._breaks.close(linger=0)
            self._socket.close(linger=None if deliver else 0)


async def open_connection(
    address: Address, name: str, timeout: float, *, receive_hwm: int = HWM
) -> Connection:
    """A welcomed connection that sends heartbeats until it is closed.

    Raises ConnectionLost where nobody answers within `timeout` seconds, VersionMismatch, and ProtocolError
    for an unusable endpoint.
    """
    context = zmq.asyncio.Context.instance()
    socket = connect_dealer(context, address.endpoint, receive_hwm=receive_hwm, keys=address.keys)
    socket.setsockopt(zmq.RCVTIMEO, int(SILENCE_SECONDS / _WAITS * 1000))
    connection = Connection(socket, address.endpoint)
    try:
        async with asyncio.timeout(timeout):
            await connection.shake_hands(name)
    except TimeoutError:
        await connection.close(deliver=False)
        key = " Does it know this client's key?" if address.keys is not None else ""
        where = f"no engine at {address.endpoint} within {timeout:g} s; is it running?{key}"
        raise ConnectionLost(where) from None
    except BaseException:
        await connection.close(deliver=False)
        raise
    return connection


async def end_task(task: asyncio.Task[None]) -> None:
    """Cancel a task of ours and wait for it; if it had failed on its own, that is raised here."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
