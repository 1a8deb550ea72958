"""The coordinator's end of a socket to its workers or its prefetcher: who is there, messages both ways.

A peer is known by its index; behind an index only its newest incarnation is heard, and what a dead one
still had under way is dropped. Used by the engine's thread alone; `bury` and `give_up` may be called from any
thread, and end its waits.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import zmq

from pipeline.errors import PeerLost
from protocol.codec import decode, encode
from protocol.errors import MalformedMessage
from protocol.messages import VERSION, Ready
from protocol.sockets import bind_router, identity, ipc_endpoint, parse_identity

log = logging.getLogger(__name__)

SEND_LIMIT = 30.0  # seconds for a peer whose queue is full to take something
COPY_BELOW = 65536  # bytes; copying less is cheaper than tracking the buffer


class PeerSocket:
    """A bound ROUTER for all peers of one role."""

    def __init__(self, runtime: Path, socket: str, role: str, fingerprint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = bind_router(self._context, ipc_endpoint(runtime, socket))
        self._role = role
        self._fingerprint = fingerprint
        self._live: dict[int, int] = {}  # index -> incarnation
        self._dead: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self._given_up = ""
        self._early: list[tuple[int, object]] = []  # what came while a send had to wait
        self.malformed = 0

    def wait_ready(self, count: int, limit: float) -> None:
        """Wait for `count` peers to announce themselves. Raises PeerLost after `limit` seconds."""
        deadline = time.monotonic() + limit
        while len(self._live) < count:
            if time.monotonic() > deadline:
                raise PeerLost(f"{len(self._live)} of {count} {self._role}s were ready after {limit:.0f} s")
            self.receive(100)

    def bury(self, index: int, incarnation: int) -> None:
        """The supervisor saw this incarnation die."""
        with self._lock:
            self._dead.add((index, incarnation))

    def give_up(self, reason: str) -> None:
        """No peer will answer any more: every wait from now on raises PeerLost with this reason."""
        self._given_up = reason

    def check_alive(self) -> None:
        """Raises PeerLost when a peer that was ready has died, or all were given up."""
        if self._given_up:
            raise PeerLost(self._given_up)
        with self._lock:
            for index, incarnation in self._live.items():
                if (index, incarnation) in self._dead:
                    raise PeerLost(f"{self._role} {index} died")

    def send(self, index: int, message: object) -> None:
        """Send to a peer. Large tensors are not copied: they must not change until its answer. Raises
        PeerLost where it is not connected, or takes no message for too long."""
        frames = encode(message)
        name = identity(self._role, index, self._live.get(index, 0))
        small = sum(map(len, frames)) < COPY_BELOW
        deadline = time.monotonic() + SEND_LIMIT
        while True:
            try:
                self._socket.send_multipart([name, *frames], zmq.NOBLOCK, copy=small)
                return
            except zmq.Again:
                # It may wait for us to take what it sends, so take it.
                self._early.extend(self._take(10))
                if time.monotonic() > deadline:
                    raise PeerLost(f"{self._role} {index} took no message for {SEND_LIMIT:.0f} s") from None
            except zmq.ZMQError as e:
                raise PeerLost(f"{self._role} {index} cannot be reached: {e}") from None

    def receive(self, wait_ms: int) -> list[tuple[int, object]]:
        """Messages that are here, as (index, message); waits at most `wait_ms` for the first. Ready is
        taken in here. Raises PeerLost where a peer speaks for another engine or version, or has died."""
        early, self._early = self._early, []
        return early + self._take(0 if early else wait_ms)

    def _take(self, wait_ms: int) -> list[tuple[int, object]]:
        if not self._socket.poll(wait_ms):
            self.check_alive()
            return []
        messages: list[tuple[int, object]] = []
        while True:
            try:
                sender, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                peer = parse_identity(sender)
                message = decode(frames)
            except MalformedMessage as e:
                self.malformed += 1
                log.warning("dropped a malformed message on the %s socket: %s", self._role, e)
                continue
            if isinstance(message, Ready):
                self._welcome(message)
            elif peer.role == self._role and self._live.get(peer.index) == peer.incarnation:
                messages.append((peer.index, message))

    def _welcome(self, ready: Ready) -> None:
        if ready.version != VERSION or ready.fingerprint != self._fingerprint:
            raise PeerLost(f"{ready.role} {ready.index} belongs to another engine or version")
        self._live[ready.index] = ready.incarnation

    def close(self) -> None:
        self._socket.close()
        self._context.term()
