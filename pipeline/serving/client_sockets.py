"""The sockets that clients come to: the local one, and where it is asked for, one on tcp for those with keys.

Each has its own ZeroMQ context, so its own thread for input and output: whoever floods the one on tcp does
not hold up the local one's. Lives in the event loop; knows frames, no messages.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from dataclasses import dataclass
from typing import cast

import zmq
import zmq.asyncio

from pipeline.config import EngineConfig
from pipeline.rate_limit import RateLimiter, SparseLog
from protocol.checks import DEFAULT
from protocol.keys import ENGINE_FILE, EngineKeys, binary_key, keys_folder, read_engine_keys
from protocol.sockets import bind_router

log = logging.getLogger(__name__)

SEND_HWM = 64  # messages in a client's socket; what does not fit waits in its queue, where it is counted
RECEIVE_HWM = 4  # messages of a client that wait to be read, of up to 4 MB each
LARGEST = DEFAULT.header + 4096  # bytes of a frame: clients send headers and no arrays
STRANGERS_ANSWERED = 50  # peers without a Welcome that a second's refusals are said to

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION, _ADMITTED, _REFUSED = b"1.0", b"200", b"400"


@dataclass(frozen=True)
class Listening:
    """Where clients with keys are taken: tcp://ADDRESS:PORT, and the engine's keys."""

    endpoint: str
    keys: EngineKeys

    @classmethod
    def asked(cls, config: EngineConfig) -> Listening | None:
        """What the configuration asks for. Raises ProtocolError where the engine's keys cannot be read."""
        if config.listen is None:
            return None
        return cls(config.listen, read_engine_keys(config.key or keys_folder() / ENGINE_FILE))


class ClientSocket:
    """A bound ROUTER. With `keys` it is on tcp, encrypted, and `admit` decides who comes in: until that runs
    nobody does."""

    def __init__(self, endpoint: str, keys: EngineKeys | None = None) -> None:
        """Raises ProtocolError where the endpoint cannot be bound."""
        self._context = zmq.asyncio.Context()
        self._door: zmq.asyncio.Socket | None = None
        self._known = frozenset(binary_key(key) for key in keys.clients) if keys else frozenset()
        self._log = SparseLog(log)
        self.refused = 0  # connections with an unknown key
        try:
            if keys is not None:  # before anybody can connect
                self._door = self._context.socket(zmq.REP)
                self._door.bind(_ZAP_ENDPOINT)
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
        self.refusals = RateLimiter(STRANGERS_ANSWERED)  # that are said to peers who are no clients
        _allow_many_connections()

    async def receive(self) -> tuple[bytes, list[bytes]]:
        """The next message, and its sender's routing id."""
        sender, *frames = await self._socket.recv_multipart()
        return sender, frames

    def send(self, receiver: bytes, frames: list[bytes | memoryview]) -> None:
        """Hand a message to the socket, now. Raises zmq.Again where its receiver's queue is full, another
        zmq.ZMQError where there is no such receiver any more."""
        # Not waiting, this has happened when it returns, and the future only carries how it went.
        sent = self._socket.send_multipart([receiver, *frames], flags=zmq.NOBLOCK)
        cast(asyncio.Future[None], sent).result()

    async def admit(self) -> None:
        """Let in whose public key is known and nobody else (ZeroMQ's RFC 27), until cancelled; without keys
        there is nobody to be asked about."""
        while self._door is not None:
            frames = await self._door.recv_multipart()
            _, request, _, address, _, mechanism, *credentials = frames
            admitted = mechanism == b"CURVE" and len(credentials) == 1 and credentials[0] in self._known
            if not admitted:
                self.refused += 1
                where = address.decode(errors="replace")
                self._log.warning(f"a client at {where} was not let in: its key is not in {ENGINE_FILE}")
            answer = [_ZAP_VERSION, request, _ADMITTED if admitted else _REFUSED, b"", b"", b""]
            await self._door.send_multipart(answer)

    def close(self) -> None:
        """Deliver what is under way (for the socket's linger time) and close."""
        self._socket.close()
        if self._door is not None:
            self._door.close(linger=0)
        self._context.term()


def _allow_many_connections() -> None:
    """Each is a file descriptor; where there is none left, nothing else of this process gets one either."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
