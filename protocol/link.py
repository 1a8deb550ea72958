"""A client's way to one engine that outlives the engine's deaths: one connection after the other.

Knows nothing of what is asked over it: who owns a link is told when a connection is lost, and sends again
what matters once there is a new one.
"""

from __future__ import annotations

import asyncio
import fcntl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from protocol.codec import encode
from protocol.connection import SILENCE_SECONDS, Connection, open_connection
from protocol.errors import ConnectionLost, EngineGone, ProtocolError, RequestFailed
from protocol.keys import Address
from protocol.messages import Welcome
from protocol.sockets import HWM

ATTEMPT_SECONDS = 2.0  # for one Hello: it is lost with an engine that dies before it has answered
DROPS = 3  # times that an engine may have forgotten this client while it lived on itself
DROPS_SECONDS = 600.0  # within which those count
DEATHS = 3  # of an engine, in a row, that a request may have been under way in without getting any further


class Link:
    """The connection to an engine, and with `retry` another one to the same address whenever it is lost."""

    def __init__(
        self,
        address: Address,
        name: str,
        timeout: float,
        retry: float,
        *,
        paused: Callable[[ProtocolError], None],
        resumed: Callable[[], Awaitable[None]],
        receive_hwm: int = HWM,
        known: Welcome | None = None,
    ) -> None:
        """`timeout`: seconds until somebody must have answered at first; `retry`: seconds for which a lost
        engine is waited for, 0: not at all. `paused` is called with the reason as soon as a connection is
        lost, and `resumed` awaited once there is another; what they raise is raised by `receive`. `known`:
        the engine that must be found, if not any."""
        self._address, self._name, self._timeout, self._retry = address, name, timeout, retry
        self._paused, self._resumed = paused, resumed
        self._receive_hwm = receive_hwm
        self._known = known
        self._connection: Connection | None = None
        self._drops: list[float] = []  # when this client was forgotten

    @property
    def up(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._connection is not None

    @property
    def welcome(self) -> Welcome:
        """The engine's, the latest; there from `open` on."""
        assert self._known is not None
        return self._known

    async def open(self) -> None:
        """Connect for the first time; an engine that is `known` may have died, and is waited for like one
        that dies later. Raises what `open_connection` does, EngineGone for another model."""
        try:
            await self._open(self._timeout)
        except ConnectionLost as nobody:
            if self._known is None or self._retry <= 0:
                raise
            await self._wait_for_engine(nobody)

    async def _open(self, timeout: float) -> None:
        connection = await open_connection(self._address, self._name, timeout, receive_hwm=self._receive_hwm)
        known, welcome = self._known, connection.welcome
        if known is not None and _model(known) != _model(welcome):
            await connection.close(deliver=False)
            raise EngineGone(
                f"another engine is at {self._address.endpoint} now: {' '.join(_model(welcome))}, "
                f"where {' '.join(_model(known))} was"
            )
        self._connection, self._known = connection, welcome

    async def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close(deliver=True)

    def send(self, message: object) -> None:
        """Queue a message. Between two connections it is only checked: `resumed` sends it, if need be. Raises
        MalformedMessage, and RequestFailed where too many are queued."""
        if self._connection is None:
            encode(message)
        else:
            self._connection.send(message)

    async def send_again(self, message: object) -> None:
        """For `resumed`: send as soon as there is room. Raises MalformedMessage; ConnectionLost where there
        is none for too long."""
        deadline = time.monotonic() + SILENCE_SECONDS
        while True:
            try:
                return self.send(message)
            except RequestFailed as e:
                if time.monotonic() > deadline:
                    raise ConnectionLost(str(e)) from None
                await asyncio.sleep(0.01)

    def cancel(self, request: int) -> None:
        """Queue a Cancel, where somebody is there to take it."""
        if self._connection is not None:
            self._connection.cancel(request)

    async def receive(self) -> object:
        """The next message that is no heartbeat, however many engines it takes. Raises EngineGone where the
        engine is given up, and what a connection's `receive` and `open_connection` raise otherwise."""
        while True:
            assert self._connection is not None
            try:
                return await self._connection.receive()
            except ConnectionLost as lost:
                await self._replace(lost)

    async def _replace(self, lost: ConnectionLost) -> None:
        while True:
            if self._retry <= 0:
                raise EngineGone(str(lost))
            self._judge(lost)
            if self._connection is not None:
                connection, self._connection = self._connection, None
                await connection.close(deliver=False)
            self._paused(lost)
            await self._wait_for_engine(lost)
            try:
                return await self._resumed()
            except ConnectionLost as again:
                lost = again

    def _judge(self, lost: ConnectionLost) -> None:
        """An engine that lives and has forgotten this client found it silent, or cut it off for what it did;
        the client may have been suspended, but who comes back again and again is no guest."""
        if lost.dropped:
            now = time.monotonic()
            self._drops = [t for t in self._drops if now - t < DROPS_SECONDS] + [now]
            if len(self._drops) > DROPS:
                raise EngineGone(
                    f"the engine dropped this client {len(self._drops)} times in a short while; "
                    "it did not read, was silent, or sent too much"
                )

    async def _wait_for_engine(self, lost: ConnectionLost) -> None:
        deadline = time.monotonic() + self._retry
        while (left := deadline - time.monotonic()) > 0:
            if self._stopped():
                raise EngineGone(f"{lost} (it has ended)")
            try:
                return await self._open(min(left, ATTEMPT_SECONDS))
            except ConnectionLost:
                continue
        raise EngineGone(f"{lost} (none came in its place within {self._retry:g} s)")

    def _stopped(self) -> bool:
        """Whether the engine itself is gone, and not only its coordinator: its directory was removed, as by
        one that ends in order, or nobody holds the lock in it any more."""
        scheme, _, path = self._address.endpoint.partition("://")
        if scheme != "ipc":
            return False
        lock = Path(path).parent / "lock"
        try:
            with lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return not lock.parent.is_dir()  # an endpoint of another kind may have no lock at all
        except OSError:
            return False
        return True


class RetryBudget:
    """How often a request was under way when an engine died, since it last got any further."""

    def __init__(self) -> None:
        self._deaths = 0
        self._progress = -1

    def lost(self, progress: int) -> RequestFailed | None:
        """The engine has died, and this much of the answer has come. Returns what to end the request with,
        where it may be what kills the engine."""
        self._deaths = self._deaths + 1 if progress == self._progress else 1
        self._progress = progress
        if self._deaths < DEATHS:
            return None
        return RequestFailed(
            f"the engine died {DEATHS} times while this request got no further; it is not sent again"
        )


def _model(welcome: Welcome) -> tuple[str, ...]:
    """What must be the same for an answer to go on."""
    return welcome.model, welcome.fingerprint[:16], welcome.format, welcome.backbone_dtype
