"""A client's connections to an engine: handshake, heartbeats, detection of a lost engine, and with `retry` a
new connection after each restart of the engine.

Knows no requests: the owner of a link gets a callback when a connection is lost, and sends its unfinished
requests again in a callback after the reconnection.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import zmq
import zmq.asyncio

from protocol.codec import decode, encode, wire_version
from protocol.errors import (
    ConnectionLost,
    EngineGone,
    MalformedMessage,
    NotPrivate,
    ProtocolError,
    RequestFailed,
    VersionMismatch,
)
from protocol.files import open_regular
from protocol.messages import SAY_HELLO, VERSION, Cancel, Error, Heartbeat, Hello, Welcome
from protocol.sockets import HWM, check_engine, client_dealer, connect_checked

HEARTBEAT_SECONDS = 0.5
SILENCE_SECONDS = 2.5
_WAITS = 10  # in a row without a message make an engine silent
ATTEMPT_SECONDS = 2.0  # for one Hello, which is lost if the engine exits before it answers


@dataclass(frozen=True)
class ConnectOptions:
    """Connections of a client to an engine."""

    endpoint: str
    name: str  # of the client
    timeout: float  # seconds for the first answer
    retry: float  # seconds to wait for a restart of the engine; 0: not at all
    silence: float = SILENCE_SECONDS  # seconds without a message after which the engine counts as lost
    receive_hwm: int = HWM


class Connection:
    """A DEALER and its handshake; used by one task at a time."""

    def __init__(self, socket: zmq.asyncio.Socket, endpoint: str, silence: float) -> None:
        """`socket`: a `client_dealer`, which this object connects."""
        self._socket = socket
        self._endpoint = endpoint
        self._silence = silence
        socket.setsockopt(zmq.RCVTIMEO, int(silence / _WAITS * 1000))
        self._heart: asyncio.Task[None] | None = None
        # Gets a message when the transport breaks, for instance when the process at the other end exits, and
        # when the socket finds no process there.
        self._breaks = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        self.welcome: Welcome

    def send(self, message: object) -> None:
        """Queue a message without waiting. Raises MalformedMessage if it cannot be encoded, RequestFailed if
        the queue to the engine is full."""
        try:
            # With NOBLOCK the send is done when this returns; the future only carries its outcome.
            sent = self._socket.send_multipart(encode(message), flags=zmq.NOBLOCK)
            cast("asyncio.Future[None]", sent).result()
        except zmq.Again:
            raise RequestFailed(f"{HWM} messages are queued for the engine; try again later") from None

    async def receive(self) -> object:
        """The next message other than a heartbeat. Raises ConnectionLost after `silence` seconds of waiting
        without any message, earlier if the engine was stopped, and if the engine does not know this client;
        EngineGone if the engine ended the connection for another reason.

        Only time spent waiting here counts as the engine's silence, in short waits: messages that a busy
        program did not read, or could not read while its event loop was blocked, are no silence.
        """
        silent_waits = 0
        while silent_waits < _WAITS:
            try:
                frames = await self._socket.recv_multipart()  # for at most the socket's receive timeout
            except zmq.Again:
                silent_waits += 1
                if how := engine_end(self._endpoint):
                    raise ConnectionLost(f"the engine at {self._endpoint} {how}") from None
                await self._mend()
                continue
            silent_waits = 0
            # Receiving a waiting message does not suspend: without this a stream faster than its reader
            # would keep every other task from running, heartbeats included.
            await asyncio.sleep(0)
            message = decode(frames)
            if isinstance(message, Error) and message.request == -1:
                text = f"the engine ended this connection: {message.text}"
                if message.text == SAY_HELLO:
                    raise ConnectionLost(text)
                raise EngineGone(text)
            if not isinstance(message, Heartbeat):
                return message
        raise ConnectionLost(f"the engine at {self._endpoint} has been silent for {self._silence:g} s")

    async def _mend(self) -> bool:
        """Connect again if the transport has broken since the last call, and return whether. Raises
        EngineGone where another user has taken the endpoint's place."""
        broken = False
        while cast(int, self._breaks.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            await self._breaks.recv_multipart()
            broken = True
        if broken:
            self._connect()
        return broken

    def _connect(self) -> None:
        try:
            connect_checked(self._socket, self._endpoint)
        except NotPrivate as e:
            raise EngineGone(f"the engine at {self._endpoint} was stopped: {e}") from None

    async def shake_hands(self, name: str) -> None:
        """Exchange Hello and Welcome, then start heartbeats. Raises VersionMismatch, and EngineGone where
        another user has taken the endpoint's place; has no time limit."""
        self._connect()
        self.send(Hello(VERSION, name))
        frames = [b""]
        try:
            while True:
                try:
                    frames = await self._socket.recv_multipart()
                except zmq.Again:
                    if await self._mend():
                        self.send(Hello(VERSION, name))
                else:
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
            with suppress(RequestFailed):  # messages in a full queue serve as heartbeats, too
                self.send(Heartbeat(time.monotonic()))
            await asyncio.sleep(self._silence * HEARTBEAT_SECONDS / SILENCE_SECONDS)

    async def close(self, *, deliver: bool) -> None:
        """Close the connection; `deliver`: send what is still queued, within the socket's linger time."""
        try:
            if self._heart is not None:
                heart, self._heart = self._heart, None
                await end_task(heart)
        finally:
            self._socket.disable_monitor()
            self._breaks.close(linger=0)
            self._socket.close(linger=None if deliver else 0)


class Link:
    """The connection to an engine, and with `retry` another one to the same address whenever it is lost."""

    def __init__(
        self,
        options: ConnectOptions,
        on_lost: Callable[[ProtocolError], None],
        on_reconnected: Callable[[], Awaitable[None]],
        known: Welcome | None = None,
    ) -> None:
        """`on_lost` is called with the reason as soon as a connection is lost, and `on_reconnected` awaited
        after the next one is open; `receive` raises what they raise. `known`: the only engine to accept;
        None: any."""
        self._options = options
        self._on_lost, self._on_reconnected = on_lost, on_reconnected
        self._known = known
        self._connection: Connection | None = None

    @property
    def up(self) -> bool:
        """Returns whether a connection is open, as far as this side knows."""
        return self._connection is not None

    @property
    def welcome(self) -> Welcome:
        """Returns the Welcome of the latest engine; set by `open`."""
        assert self._known is not None
        return self._known

    async def open(self) -> None:
        """Connect for the first time; a `known` engine may be restarting, so this waits for it as after a
        loss. Raises what `_open` does, EngineGone for another model."""
        try:
            await self._open(self._options.timeout)
        except ConnectionLost as failure:
            if self._known is None or self._options.retry <= 0:
                raise
            await self._wait_for_engine(failure)

    async def _open(self, timeout: float) -> None:
        """Raises ConnectionLost if no engine answers within `timeout` seconds, VersionMismatch, EngineGone
        for another model and another user's, and ProtocolError for an unusable endpoint."""
        endpoint, known = self._options.endpoint, self._known
        socket = None
        try:
            socket = client_dealer(zmq.asyncio.Context.instance(), endpoint, self._options.receive_hwm)
            connection = Connection(socket, endpoint, self._options.silence)
        except zmq.ZMQError as e:  # no free descriptor, maybe only for a moment
            if socket is not None:
                socket.close(linger=0)
            raise EngineGone(f"no connection to {endpoint} can be opened: {e.strerror}") from None
        try:
            async with asyncio.timeout(timeout):
                await connection.shake_hands(self._options.name)
            welcome = connection.welcome
            if known is not None and _model(known) != _model(welcome):
                raise EngineGone(
                    f"another engine is at {endpoint} now: {' '.join(_model(welcome))}, where"
                    f" {' '.join(_model(known))} was"
                )
        except TimeoutError:
            await connection.close(deliver=False)
            raise ConnectionLost(f"no engine at {endpoint} within {timeout:g} s; is it running?") from None
        except BaseException:
            await connection.close(deliver=False)
            raise
        self._connection, self._known = connection, welcome

    async def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close(deliver=True)

    def send(self, message: object) -> None:
        """Queue a message. Without a connection the message is only checked, and `on_reconnected` sends it.
        Raises MalformedMessage, and RequestFailed if too many are queued."""
        if self._connection is None:
            encode(message)
        else:
            self._connection.send(message)

    async def send_when_possible(self, message: object) -> None:
        """Send as soon as the queue takes it. Raises MalformedMessage; ConnectionLost if it stays full."""
        deadline = time.monotonic() + self._options.silence
        while True:
            try:
                return self.send(message)
            except RequestFailed as e:
                if time.monotonic() > deadline:
                    raise ConnectionLost(str(e)) from None
                await asyncio.sleep(0.01)

    def cancel(self, request: int) -> None:
        """Queue a Cancel, if connected. A full queue means that no engine reads it, so nothing is left to
        cancel."""
        if self._connection is not None:
            with suppress(RequestFailed):
                self._connection.send(Cancel(request))

    async def receive(self) -> object:
        """The next message other than a heartbeat, across reconnections. Raises EngineGone when the link
        gives the engine up, and what a connection's `receive` and `_open` raise otherwise."""
        while True:
            assert self._connection is not None
            try:
                return await self._connection.receive()
            except ConnectionLost as lost:
                await self._reconnect(lost)

    async def _reconnect(self, lost: ConnectionLost) -> None:
        while True:
            if self._options.retry <= 0:
                raise EngineGone(str(lost))
            if self._connection is not None:
                connection, self._connection = self._connection, None
                await connection.close(deliver=False)
            self._check_ended()  # before `on_lost`, after which a wait is announced
            self._on_lost(lost)
            await self._wait_for_engine(lost)
            try:
                return await self._on_reconnected()
            except ConnectionLost as again:
                lost = again

    async def _wait_for_engine(self, lost: ConnectionLost) -> None:
        deadline = time.monotonic() + self._options.retry
        while (rest := deadline - time.monotonic()) > 0:
            self._check_ended()
            try:
                return await self._open(min(rest, ATTEMPT_SECONDS))
            except ConnectionLost:
                continue
        raise EngineGone(f"{lost} (no other engine was ready within {self._options.retry:g} s)")

    def _check_ended(self) -> None:
        """Raises EngineGone if the whole engine has ended, and not only its coordinator."""
        if how := engine_end(self._options.endpoint):
            raise EngineGone(f"the engine at {self._options.endpoint} {how}")


def _model(welcome: Welcome) -> tuple[str, ...]:
    """The properties that must be equal for an answer to continue."""
    return welcome.model, welcome.fingerprint[:16], welcome.format, welcome.backbone_dtype


def engine_end(endpoint: str) -> str:
    """Returns how the whole engine at this endpoint has ended, for a sentence about it: an orderly stop
    removes its directory, and after a crash of all of it no process holds the lock in it. "" while it runs,
    with or without a coordinator. What another user has put there is not our engine."""
    lock = Path(endpoint.removeprefix("ipc://")).parent / "lock"
    try:
        check_engine(endpoint)
        with os.fdopen(open_regular(lock, flags=os.O_NOFOLLOW), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except NotPrivate as e:
        return f"was stopped: {e}"
    except FileNotFoundError:  # an endpoint of another kind may have no lock at all
        return "" if lock.parent.is_dir() else "was stopped"
    except OSError:
        return ""
    return "has ended without being stopped"


async def end_task(task: asyncio.Task[None]) -> None:
    """Cancel this task and wait for it. Raises its exception if it had failed before."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
