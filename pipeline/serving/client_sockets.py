"""The sockets that clients connect to: the local one, and where configured, one on tcp for clients with keys.

Each has its own ZeroMQ context, so its own I/O thread: a flood on tcp does not delay the local socket. Runs
in the event loop; handles frames, not messages."""

from __future__ import annotations

import asyncio
import logging
import resource
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import zmq
import zmq.asyncio

from pipeline.config import EngineConfig
from pipeline.rate_limit import RateLimiter, SparseLog
from protocol.checks import DEFAULT
from protocol.codec import encode
from protocol.keys import ENGINE_FILE, EngineKeys, binary_key, keys_folder, read_engine_keys
from protocol.messages import Error
from protocol.sockets import CLIENT_IDENTITY, bind_router, is_client_identity

log = logging.getLogger(__name__)

SEND_HWM = 64  # messages in a client's socket; the rest wait in its Outbox, where they are counted
RECEIVE_HWM = 4  # unread messages of a client, of up to 4 MB each
LARGEST = DEFAULT.header + 4096  # bytes of a frame: clients send headers and no arrays
ANONYMOUS_REFUSALS = 50  # refusals a second that are sent to connections without a Welcome
NO_IDENTITY = f"set a ZeroMQ identity of {CLIENT_IDENTITY} random bytes; the first must not be zero"

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION, _ADMITTED, _REFUSED = b"1.0", b"200", b"400"


@dataclass(frozen=True)
class TcpListener:
    """The endpoint for clients with keys, tcp://ADDRESS:PORT, and the engine's keys."""

    endpoint: str
    keys: EngineKeys

    @classmethod
    def configured(cls, config: EngineConfig) -> TcpListener | None:
        """None without `listen`. Raises ProtocolError where the engine's keys cannot be read."""
        if config.listen is None:
            return None
        return cls(config.listen, read_engine_keys(config.key or keys_folder() / ENGINE_FILE))


class ClientSocket:
    """A bound ROUTER. With `keys`, on tcp and encrypted; accepts no client before `authenticate` runs."""

    def __init__(self, endpoint: str, keys: EngineKeys | None = None) -> None:
        """Raises ProtocolError where the endpoint cannot be bound."""
        self._context = zmq.asyncio.Context()
        self._authenticator: zmq.asyncio.Socket | None = None
        self._known_keys = frozenset(binary_key(key) for key in keys.clients) if keys else frozenset()
        self._log = SparseLog(log)
        self.refused = 0  # connections with an unknown key
        try:
            if keys is not None:  # before any client can connect
                self._authenticator = self._context.socket(zmq.REP)
                self._authenticator.bind(_ZAP_ENDPOINT)
            self._socket = bind_router(
                self._context,
                endpoint,
                send_hwm=SEND_HWM,
                receive_hwm=RECEIVE_HWM,
                largest=LARGEST,
                keys=keys,
            )
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.refusals = RateLimiter(ANONYMOUS_REFUSALS)  # of connections without a Welcome
        _raise_descriptor_limit()

    async def receive(self) -> tuple[bytes, list[bytes]]:
        """The next message, and its sender's routing id. Of senders without an identity of their own messages
        are dropped, and a few answered: a made one can be guessed, and an answer sent to it intercepted."""
        while True:
            sender, *frames = await self._socket.recv_multipart()
            if is_client_identity(sender):
                return sender, frames
            if self.refusals.spend():
                with suppress(zmq.ZMQError):
                    self.send(sender, encode(Error(-1, NO_IDENTITY)))
            await asyncio.sleep(0)  # receiving a message that has arrived does not suspend

    def send(self, receiver: bytes, frames: list[bytes | memoryview]) -> None:
        """Hand a message to the socket without waiting. Raises zmq.Again where its receiver's queue is full,
        another zmq.ZMQError where the receiver has disconnected."""
        # With NOBLOCK the message is sent when this returns; the future only carries the outcome.
        sent = self._socket.send_multipart([receiver, *frames], flags=zmq.NOBLOCK)
        cast(asyncio.Future[None], sent).result()

    async def authenticate(self) -> None:
        """Admit clients with a known key (RFC 27) until cancelled; returns at once without keys."""
        while self._authenticator is not None:
            frames = await self._authenticator.recv_multipart()
            _, request, _, address, _, mechanism, *credentials = frames
            admitted = mechanism == b"CURVE" and len(credentials) == 1 and credentials[0] in self._known_keys
            if not admitted:
                self.refused += 1
                where = address.decode(errors="replace")
                self._log.warning(f"a client at {where} was refused: its key is not in {ENGINE_FILE}")
            answer = [_ZAP_VERSION, request, _ADMITTED if admitted else _REFUSED, b"", b"", b""]
            await self._authenticator.send_multipart(answer)

    def close(self) -> None:
        """Close, after up to the socket's linger time for messages under way."""
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.close(linger=0)
        self._context.term()


def _raise_descriptor_limit() -> None:
    """Each connection is a file descriptor, and without free ones this process cannot open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
