"""Somebody who connects to an engine's sockets and sends what nobody should: hostile messages, in bursts.

Every burst comes over a new connection, under a name of the stranger's own choice: none, noise, or a child's
without its proof.
"""

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

SOCKETS = ("client.sock", "work.sock", "fetch.sock", "control.sock")
STALL_LIMIT = 5.0  # seconds that a socket may take nothing
LINGER_MS = 5000  # for the last messages of a burst
SLICE = 32  # messages sent before other tasks of this process may run
RETRY = 0.002  # seconds until a full socket is tried again


class Stranger:
    """One seed's bursts on the sockets of the engine in this runtime directory. Used by one task; `close`
    ends it."""

    def __init__(self, runtime: Path, seed: int) -> None:
        self.sent: Counter[str] = Counter()  # messages, by socket
        self.kinds: Counter[str] = Counter()  # messages, by what is wrong with them
        self.answered = 0  # messages that came back
        self.stalled = 0  # bursts that ended early because the socket took nothing
        self._runtime = runtime
        self._random = Random(seed)
        self._frames = HostileFrames(seed)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None  # until the first burst

    def sockets(self) -> list[str]:
        """Those that are there; an engine without a prefetcher has no fetch.sock."""
        return [name for name in SOCKETS if (self._runtime / name).is_socket()]

    async def burst(self, socket: str, count: int) -> int:
        """Send `count` messages to one socket, as quickly as it takes them. Returns how many it took. What
        comes back is read and must be messages: raises MalformedMessage."""
        if self._context is None:
            self._context = zmq.Context()
        endpoint = ipc_endpoint(self._runtime, socket)
        dealer = connect_dealer(self._context, endpoint, identity=self._name())
        dealer.setsockopt(zmq.LINGER, LINGER_MS)
        taken = 0
        try:
            if self._random.random() < 0.5:  # half of them are let in by the first socket, to do harm inside
                dealer.send_multipart(encode(Hello(VERSION, "stranger")), zmq.NOBLOCK)
            for shot in islice(self._frames, count):
                if not await self._send(dealer, shot.frames):
                    self.stalled += 1
                    break
                self.kinds[shot.kind] += 1
                taken += 1
                if taken % SLICE == 0:
                    self._drain(dealer)
                    await asyncio.sleep(0)
            self._drain(dealer)
        finally:
            self.sent[socket] += taken
            dealer.close()
        return taken

    async def close(self) -> None:
        """Wait until what was sent has gone, a few seconds at most."""
        if self._context is not None:
            await asyncio.to_thread(self._context.term)

    def _name(self) -> bytes:
        """ZeroMQ chooses one for a DEALER without."""
        match self._random.randrange(4):
            case 0:
                return b"\x01" + self._random.randbytes(self._random.randrange(255))
            case 1:
                role = self._random.choice(("worker", "prefetcher", "coordinator", "loader"))
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
            self._drain(dealer)  # it may wait for us to take what it sends
            await asyncio.sleep(RETRY)

    def _drain(self, dealer: zmq.Socket[bytes]) -> None:
        while True:
            try:
                decode(dealer.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            self.answered += 1
