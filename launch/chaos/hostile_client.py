"""A client that sends hostile messages to an engine's sockets, in bursts. Every burst uses a new connection,
with a random identity: a client's, noise, or a child's without its proof."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import islice
from pathlib import Path
from random import Random

import zmq

from launch.chaos.frames import HostileFrames
from protocol.codec import decode, encode
from protocol.messages import VERSION, Hello
from protocol.sockets import connect_dealer, ipc_endpoint

SOCKETS = ("client.sock", "work.sock", "fetch.sock", "control.sock", "text.sock")
ROLES = ("worker", "prefetcher", "coordinator", "loader", "text", "gateway")
STALL_LIMIT = 5.0  # seconds for which a socket may accept nothing
LINGER_MS = 5000  # for the last messages of a burst
BATCH = 32  # messages sent before other tasks of this process may run
RETRY = 0.002  # seconds until the next attempt on a full socket


class HostileClient:
    """One seed's bursts on the sockets of one engine. For one task, which must call `close`."""

    def __init__(self, runtime: Path, seed: int) -> None:
        self.sent: Counter[str] = Counter()  # messages, by socket
        self.answered = 0  # messages received
        self.stalled = 0  # bursts that ended early because the socket accepted nothing
        self._runtime = runtime
        self._random = Random(seed)
        self._messages = HostileFrames(seed)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None  # until the first burst

    def sockets(self) -> list[str]:
        """Names of the sockets that exist; an engine without a prefetcher has no fetch.sock."""
        return [name for name in SOCKETS if (self._runtime / name).is_socket()]

    async def burst(self, socket: str, count: int) -> int:
        """Send `count` messages to one socket, as fast as it accepts them. Returns the number accepted.
        Answers are read and must be valid: raises MalformedMessage."""
        if self._context is None:
            self._context = zmq.Context()
        endpoint = ipc_endpoint(self._runtime, socket)
        dealer = connect_dealer(self._context, endpoint, identity=self._identity())
        dealer.setsockopt(zmq.LINGER, LINGER_MS)
        taken = 0
        try:
            if self._random.random() < 0.5:  # with a handshake the client socket processes what follows
                dealer.send_multipart(encode(Hello(VERSION, "hostile")), zmq.NOBLOCK)
            for message in islice(self._messages, count):
                if not await self._send(dealer, message.frames):
                    self.stalled += 1
                    break
                taken += 1
                if taken % BATCH == 0:
                    self._drain(dealer)
                    await asyncio.sleep(0)
            self._drain(dealer)
        finally:
            self.sent[socket] += taken
            dealer.close()
        return taken

    async def close(self) -> None:
        """Wait until all messages have left, at most LINGER_MS."""
        if self._context is not None:
            await asyncio.to_thread(self._context.term)

    def _identity(self) -> bytes:
        """For an empty one `connect_dealer` makes a client's."""
        match self._random.randrange(4):
            case 0:
                return b"\x01" + self._random.randbytes(self._random.randrange(255))
            case 1:
                role = self._random.choice(ROLES)
                proof = self._random.randbytes(8).hex()
                return f"{role}-{self._random.randrange(3)}-{self._random.randrange(3)}-{proof}".encode()
            case _:
                return b""

    async def _send(self, dealer: zmq.Socket[bytes], frames: list[bytes]) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + STALL_LIMIT
        while True:
            try:
                dealer.send_multipart(frames, zmq.NOBLOCK)
                return True
            except zmq.Again:
                if loop.time() > deadline:
                    return False
            self._drain(dealer)  # the engine may be blocked on its answers to this client
            await asyncio.sleep(RETRY)

    def _drain(self, dealer: zmq.Socket[bytes]) -> None:
        while True:
            try:
                decode(dealer.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            self.answered += 1
