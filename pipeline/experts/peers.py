"""The coordinator's end of a socket to its workers or its prefetcher: who is there, messages both ways.

A peer is known by its index; behind an index only its newest life is heard, and what a dead one still had
under way is dropped. That a peer came or died is told in order among its messages, as its Ready and as
WorkerDied. Used by the engine's thread alone, but for `give_up` and `stats`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from pipeline.errors import PeerLost
from pipeline.experts.recovery import Recovery
from pipeline.rate_limit import SparseLog
from protocol.checks import DEFAULT
from protocol.codec import decode, encode
from protocol.errors import MalformedMessage
from protocol.messages import VERSION, Hung, Ready, WorkerDied, WorkerUp
from protocol.sockets import Identity, bind_router, ipc_endpoint, parse_identity

log = logging.getLogger(__name__)

SEND_LIMIT = 30.0  # seconds for a peer whose queue is full to take something
SLICE_MS = 10  # of a wait, between two looks at who has died
COPY_BELOW = 65536  # bytes; copying less is cheaper than tracking the buffer
TAKE_SECONDS = 0.001  # for what is here, so that a flood of strangers' messages is no endless loop
RECEIVE_HWM = 64  # messages of one peer that may wait to be read: a stranger's too
STALL_SLICE = 0.1  # seconds without progress that one look may find: we may have stood still ourselves

Tell = Callable[[object], None]


@dataclass
class ChildState:
    """A peer's present life."""

    name: bytes
    incarnation: int
    pid: int
    up: bool = False  # it does its work
    hung: bool = False  # its end was asked for


class ExitEvents:
    """What the supervisor saw die, by role. From any thread."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[WorkerDied]] = {"worker": deque(), "prefetcher": deque()}

    def put(self, death: WorkerDied) -> None:
        """Note a death; one of another role is nobody's."""
        if death.role in self._seen:
            self._seen[death.role].append(death)

    def of(self, role: str) -> deque[WorkerDied]:
        """Those of a role that were not yet taken, the oldest first."""
        return self._seen[role]


class ChildServerSocket:
    """A bound ROUTER for all peers of one role."""

    def __init__(
        self,
        runtime: Path,
        socket: str,
        role: str,
        fingerprint: str,
        key: bytes,
        deaths: ExitEvents,
        tell: Tell,
        *,
        largest: int = 0,
    ) -> None:
        """`key`: the engine's, which proves who its children are; `tell` sends to the supervisor; `largest`:
        bytes of the largest array that a peer sends."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = bind_router(
            self._context,
            ipc_endpoint(runtime, socket),
            receive_hwm=RECEIVE_HWM,
            largest=max(largest, DEFAULT.header),
        )
        self.role = role
        self._fingerprint = fingerprint
        self._key = key
        self._deaths = deaths.of(role)
        self._tell = tell
        self._live: dict[int, ChildState] = {}
        self._given_up = ""
        self._log = SparseLog(log)
        self._proven: dict[bytes, Identity] = {}  # those who live, by name: a proof is looked at once
        self._early: list[tuple[int, object]] = []  # what came while a send had to wait
        self.recovery = Recovery()
        self.malformed = 0
        self.behind = False  # there is more to take in

    @property
    def live(self) -> list[int]:
        """The indices of the peers that are there."""
        return list(self._live)

    def wait_ready(self, count: int, limit: float) -> None:
        """Wait for `count` peers to announce themselves; what they say meanwhile is received later. Raises
        PeerLost after `limit` seconds."""
        deadline = time.monotonic() + limit
        while len(self._live) < count:
            if time.monotonic() > deadline:
                raise PeerLost(f"{len(self._live)} of {count} {self.role}s were ready after {limit:.0f} s")
            self._early.extend(self._take(100))

    def give_up(self, reason: str) -> None:
        """No peer will answer any more: every wait from now on raises PeerLost with this reason. From any
        thread."""
        self._given_up = reason

    def up(self, index: int) -> None:
        """This peer does its work from now on."""
        life = self._live[index]
        if not life.up:
            life.up = True
            self.recovery.whole(index)
            self._tell(WorkerUp(self.role, index, life.incarnation))

    def hung(self, index: int) -> None:
        """This peer has work and makes no progress: have it killed."""
        life = self._live.get(index)
        if life is not None and not life.hung:
            life.hung = True
            self._tell(Hung(self.role, index, life.incarnation))

    def send(self, index: int, message: object) -> None:
        """Send to a peer. Large tensors are not copied: they must not change until its answer. To one that is
        dying or dead nothing is sent: its death is received, or was. Raises PeerLost where a living one takes
        no message for too long."""
        life = self._live.get(index)
        if life is None:
            return
        frames = encode(message)
        small = sum(map(len, frames)) < COPY_BELOW
        deadline = time.monotonic() + SEND_LIMIT
        while True:
            try:
                self._socket.send_multipart([life.name, *frames], zmq.NOBLOCK, copy=small)
                return
            except zmq.Again:
                # It may wait for us to take what it sends, so take it.
                self._early.extend(self._take(10))
                if self._live.get(index) is not life:
                    return
                if time.monotonic() > deadline:
                    raise PeerLost(f"{self.role} {index} took no message for {SEND_LIMIT:.0f} s") from None
            except zmq.ZMQError as e:
                if e.errno != zmq.EHOSTUNREACH:
                    raise PeerLost(f"{self.role} {index} cannot be reached: {e}") from None
                return

    def receive(self, wait_ms: int) -> list[tuple[int, object]]:
        """Messages that are here, as (index, message); waits at most `wait_ms` for the first. Among them are
        the Ready of who has come and the WorkerDied of who is gone. Raises PeerLost when all were given
        up."""
        early, self._early = self._early, []
        return early + self._take(0 if early else wait_ms)

    def stats(self) -> list[dict[str, Any]]:
        """Who is there, for a person. From any thread."""
        return [
            {"role": self.role, "index": i, "incarnation": life.incarnation, "pid": life.pid, "up": life.up}
            for i, life in sorted(list(self._live.items()))
        ]

    def _take(self, wait_ms: int) -> list[tuple[int, object]]:
        messages: list[tuple[int, object]] = []
        while True:
            slice_ms = min(wait_ms, SLICE_MS)
            here = self._socket.poll(slice_ms)
            if self._given_up:
                raise PeerLost(self._given_up)
            while self._deaths:
                self._bury(self._deaths.popleft(), messages)
            if here:
                self._drain(messages)
            wait_ms -= slice_ms
            if messages or wait_ms <= 0:
                return messages

    def _drain(self, messages: list[tuple[int, object]]) -> None:
        until = time.perf_counter() + TAKE_SECONDS
        self.behind = True
        while time.perf_counter() < until:
            try:
                sender, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self.behind = False
                return
            try:
                peer = self._proven.get(sender) or parse_identity(sender, self._key)
                message = decode(frames)
            except MalformedMessage as e:
                self._complain(str(e))
                continue
            life = self._live.get(peer.index)
            if peer.role != self.role:
                self._complain(f"a {peer.role} speaks as a {self.role}")
            elif isinstance(message, Ready):
                self._welcome(sender, peer, message, messages)
            elif life is not None and life.incarnation == peer.incarnation:
                messages.append((peer.index, message))

    def _complain(self, text: str) -> None:
        self.malformed += 1
        self._log.warning(f"dropped a malformed message on the {self.role} socket: {text}")

    def _welcome(self, name: bytes, peer: Identity, ready: Ready, messages: list[tuple[int, object]]) -> None:
        if ready.version != VERSION or ready.fingerprint != self._fingerprint:
            self._complain(f"{peer.role} {peer.index} has another version or store")
            return
        known = self._live.get(peer.index)
        if known is not None and known.incarnation >= peer.incarnation:
            return  # said twice, or by a former life
        if known is not None:  # its successor came before the news of its death
            self._bury(WorkerDied(peer.role, peer.index, known.incarnation, False, -1), messages)
        self._live[peer.index] = ChildState(name, peer.incarnation, ready.pid)
        self._proven[name] = peer
        self.recovery.ready(peer.index)
        messages.append((peer.index, ready))

    def _bury(self, death: WorkerDied, messages: list[tuple[int, object]]) -> None:
        life = self._live.get(death.index)
        if life is not None and life.incarnation == death.incarnation:
            del self._live[death.index]
            del self._proven[life.name]
            self.recovery.died(death.index)
            messages.append((death.index, death))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class Watch:
    """Whether a peer that has work makes progress. Time in which we did not look does not count."""

    def __init__(self) -> None:
        self._ticks = -1
        self._still = 0.0
        self._looked = 0.0

    def stalled(self, ticks: int) -> float:
        """Seconds without progress, as far as they were seen; `ticks` is the peer's counter now."""
        now = time.monotonic()
        if ticks != self._ticks:
            self._ticks, self._still = ticks, 0.0
        else:
            self._still += min(now - self._looked, STALL_SLICE)
        self._looked = now
        return self._still

    def rest(self) -> None:
        """It has no work: nothing is expected of it."""
        self._ticks = -1
