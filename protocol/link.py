"""A client's link to one engine: a connection, and with `retry` a new one after each restart of the engine.

Knows no requests: the owner of a link gets a callback when a connection is lost, and sends its unfinished
requests again in a callback after the reconnection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from protocol.codec import encode
from protocol.connection import Connection, ConnectOptions, engine_end, open_connection
from protocol.errors import ConnectionLost, EngineGone, ProtocolError, RequestFailed
from protocol.messages import Welcome

ATTEMPT_SECONDS = 2.0  # for one Hello, which is lost if the engine exits before it answers
MAX_DROPS = 3  # times that a running engine may drop this client, within
DROPS_SECONDS = 600.0
MAX_EXITS = 3  # of an engine, in a row and without progress of a request, after which that request fails


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
        self._drops: list[float] = []  # times at which a running engine had dropped this client

    @property
    def up(self) -> bool:
        """Whether a connection is open, as far as this side knows."""
        return self._connection is not None

    @property
    def welcome(self) -> Welcome:
        """The latest engine's; set by `open`."""
        assert self._known is not None
        return self._known

    async def open(self) -> None:
        """Connect for the first time; a `known` engine may be restarting, so this waits for it as after a
        loss. Raises what `open_connection` does, EngineGone for another model."""
        try:
            await self._open(self._options.timeout)
        except ConnectionLost as failure:
            if self._known is None or self._options.retry <= 0:
                raise
            await self._wait_for_engine(failure)

    async def _open(self, timeout: float) -> None:
        connection = await open_connection(self._options, timeout)
        known, welcome = self._known, connection.welcome
        if known is not None and _model(known) != _model(welcome):
            await connection.close(deliver=False)
            raise EngineGone(
                f"another engine is at {self._options.endpoint} now: {' '.join(_model(welcome))}, "
                f"where {' '.join(_model(known))} was"
            )
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
        """Queue a Cancel, if connected."""
        if self._connection is not None:
            self._connection.cancel(request)

    async def receive(self) -> object:
        """The next message other than a heartbeat, across reconnections. Raises EngineGone when the link
        gives the engine up, and what a connection's `receive` and `open_connection` raise otherwise."""
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
            self._count_drop(lost)
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

    def _count_drop(self, lost: ConnectionLost) -> None:
        """A running engine drops a client that was silent (it may have been suspended) or sent too much.
        Raises EngineGone if that happens often: the client must not reconnect for ever."""
        if lost.dropped:
            now = time.monotonic()
            self._drops = [t for t in self._drops if now - t < DROPS_SECONDS] + [now]
            if len(self._drops) > MAX_DROPS:
                raise EngineGone(
                    f"the engine dropped this client {len(self._drops)} times in a short while; "
                    "it did not read, was silent, or sent too much"
                )

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


class RetryBudget:
    """Counts the engine exits during one request since its last progress."""

    def __init__(self) -> None:
        self._exits = 0
        self._progress = -1

    def count_loss(self, progress: int) -> RequestFailed | None:
        """Count an engine exit after `progress` tokens or rows of the answer. Returns the error to end the
        request with if the request itself may crash the engine."""
        self._exits = self._exits + 1 if progress == self._progress else 1
        self._progress = progress
        if self._exits < MAX_EXITS:
            return None
        return RequestFailed(
            f"the engine exited {MAX_EXITS} times without progress of this request; it is not sent again"
        )


def _model(welcome: Welcome) -> tuple[str, ...]:
    """The properties that must be equal for an answer to continue."""
    return welcome.model, welcome.fingerprint[:16], welcome.format, welcome.backbone_dtype
