"""Accepts clients over tcp, admits those with a known key, and closes what exceeds a limit."""

from __future__ import annotations

import asyncio
import logging
import socket
import time

import zmq
import zmq.asyncio

from pipeline.door.connection import Connection, Engine, machine
from pipeline.door.key_file import KeyFile
from pipeline.door.limits import CLOSING, DoorLimits
from pipeline.rate_limit import RateLimiter, SparseLog
from protocol.errors import ProtocolError
from protocol.keys import ENGINE_FILE, binary_key
from protocol.sockets import TCP_PROBE_S, TCP_PROBES, check_tcp

log = logging.getLogger(__name__)

CHECK_SECONDS = 0.25  # between two looks at the connections' times and at the key file
RETRY_SECONDS = 0.1  # until the next accept, where the system refuses one
BACKLOG = 128
ACCEPTED_A_SECOND = 200  # each takes one to two milliseconds of a core
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION, _ADMITTED, _REFUSED = b"1.0", b"200", b"400"


def listen(endpoint: str) -> socket.socket:
    """A socket that listens at tcp://ADDRESS:PORT, or with * at all addresses. Raises ProtocolError."""
    host, port = check_tcp(endpoint)
    family = socket.AF_INET6 if ":" in host or host == "*" else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setblocking(False)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        found.bind(("::" if host == "*" else host, port))
        found.listen(BACKLOG)
    except OSError as e:
        found.close()
        raise ProtocolError(f"cannot bind {endpoint}: {e.strerror}") from None
    return found


class Door:
    """All connections of clients over tcp. Runs in the event loop, and owns `listening`."""

    def __init__(
        self, listening: socket.socket, keys: KeyFile, engine: Engine, limits: DoorLimits | None = None
    ) -> None:
        self._listening = listening
        self._keys = keys
        self._engine = engine
        self._limits = limits or DoorLimits()
        self._context = zmq.asyncio.Context()
        self._most = self._limits.clients + self._limits.strangers + CLOSING
        self._context.set(zmq.MAX_SOCKETS, 2 * self._most + 16)
        self._authenticator = self._context.socket(zmq.REP)  # before any client can connect
        self._authenticator.bind(_ZAP_ENDPOINT)
        self._connections: dict[int, Connection] = {}  # by number: the oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = SparseLog(log)
        self._accepted = 0
        self.refused = 0  # connections with an unknown key

    @property
    def clients(self) -> list[Connection]:
        """The connections with an admitted key."""
        return [connection for connection in self._connections.values() if connection.client is not None]

    @property
    def strangers(self) -> list[Connection]:
        """The others, the oldest first."""
        return [connection for connection in self._connections.values() if connection.client is None]

    async def serve(self) -> None:
        """Until cancelled; then all connections are closed."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._accept())
                group.create_task(self._authenticate())
                group.create_task(self._watch())
        finally:
            self._listening.close()
            for connection in self._connections.values():
                connection.close()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._authenticator.close(linger=0)
            self._context.destroy(linger=0)

    async def _accept(self) -> None:
        loop, rate = asyncio.get_running_loop(), RateLimiter(ACCEPTED_A_SECOND)
        while True:
            if not rate.spend():  # the rest waits in the system's queue
                await asyncio.sleep(RETRY_SECONDS)
            try:
                accepted, peer = await loop.sock_accept(self._listening)
            except OSError as e:  # no descriptor is free, or the client has gone
                log.debug("a connection could not be accepted: %s", e)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            try:
                self._admit(accepted, peer[0])
            except OSError:
                accepted.close()
            await asyncio.sleep(0)  # a flood of connections must not keep every other task from running

    def _admit(self, accepted: socket.socket, host: str) -> None:
        probe_peer(accepted)
        self._make_place(machine(host))
        if len(self._tasks) >= self._most:
            accepted.close()
            return
        self._accepted += 1
        connection = Connection(
            self._context, accepted, self._accepted, self._engine, host, self._limits.unread
        )
        self._connections[connection.number] = connection
        task = asyncio.create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _make_place(self, where: str) -> None:
        """Close the oldest stranger of this machine, or of all, where they are too many."""
        strangers = self.strangers
        neighbours = [other for other in strangers if other.machine == where]
        if len(neighbours) >= self._limits.strangers_of_machine:
            self._close(neighbours[0])
        elif len(strangers) >= self._limits.strangers:
            self._close(strangers[0])

    async def _serve(self, connection: Connection) -> None:
        try:
            await connection.serve(self._keys.keys)
        except (ProtocolError, zmq.ZMQError) as e:
            self._log.warning(f"a connection could not be served: {e}")
        finally:
            self._connections.pop(connection.number, None)
            if connection.fault:
                self._log.warning(f"a client at {connection.address} was cut off: {connection.fault}")

    def _close(self, connection: Connection) -> None:
        self._connections.pop(connection.number, None)
        connection.close()

    async def _authenticate(self) -> None:
        """Admit clients with a known key (RFC 27)."""
        while True:
            frames = await self._authenticator.recv_multipart()
            _, request, domain, _, _, mechanism, *credentials = frames
            connection = self._connections.get(int(domain))
            known = mechanism == b"CURVE" and len(credentials) == 1 and self._keys.admitted(credentials[0])
            if known and connection is not None:
                connection.refusal = self._refusal(known.key)
                connection.client = None if connection.refusal else known
            elif connection is not None:
                self.refused += 1
                self._log.warning(
                    f"a client at {connection.address} was refused: its key is not in {ENGINE_FILE}"
                )
            status = _ADMITTED if known and connection is not None else _REFUSED
            await self._authenticator.send_multipart([_ZAP_VERSION, request, status, b"", b"", b""])

    def _refusal(self, key: bytes) -> str:
        """Why no further client with this key can connect; "" where one can."""
        keys = [other.client.key for other in self.clients if other.client is not None]
        if keys.count(key) >= self._limits.clients_of_key:
            return f"{keys.count(key)} clients with this key are connected already; try again later"
        if len(keys) >= self._limits.clients:
            return f"{len(keys)} remote clients are connected already; try again later"
        return ""

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            now = time.monotonic()
            for connection in list(self._connections.values()):
                late = not connection.greeted and now - connection.began > self._limits.hello
                if late or connection.stalled(self._limits.silence):
                    self._close(connection)
            while sum(other.unread for other in self.clients) > self._limits.unread_in_all:
                largest = max(self.clients, key=lambda other: other.unread)
                largest.fault = "too much of all clients is unread, and most of it"
                self._close(largest)
            if self._keys.changed():
                self._revoke()

    def _revoke(self) -> None:
        """Close the connections of keys that are not admitted any more, or have another right now."""
        for connection in self.clients:
            assert connection.client is not None
            now = self._keys.admitted(binary_key(connection.client.key))
            if now is None or now.right != connection.client.right:
                what = "is revoked" if now is None else "has another right"
                log.warning("a client at %s was disconnected: its key %s", connection.address, what)
                self._close(connection)


def probe_peer(accepted: socket.socket) -> None:
    """Detect peers on a machine that was switched off: unlike an exiting process, it closes no connection."""
    accepted.setblocking(False)
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, TCP_PROBE_S)
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, TCP_PROBE_S)
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, TCP_PROBES)
    # the same for unacknowledged data
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_PROBE_S * TCP_PROBES * 1000)
