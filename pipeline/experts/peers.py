"""Serves a socket to the coordinator's workers or to its prefetcher: child states, messages both ways, and
how long a child that has work has made no progress.

A child is identified by its index. Of each index only the newest generation counts; messages of earlier ones
are dropped. A child's start and its exit are delivered in order among its messages, as its Ready and as
WorkerDied. Used by the engine's thread alone, except the two statistics; `ExitEvents` by any thread.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from pipeline.errors import PeerLost
from pipeline.fairness import SparseLog
from protocol.codec import decode, encode
from protocol.errors import MalformedMessage
from protocol.messages import HEADER_LIMIT, VERSION, Hung, Ready, SetMachines, WorkerDied, WorkerUp
from protocol.sockets import CHILD_HWM, Identity, bind_router, ipc_endpoint, parse_identity

log = logging.getLogger(__name__)

SEND_LIMIT = 30.0  # seconds for a child with a full queue to take a message
SLICE_MS = 10  # of a wait, between two checks of the exit events
COPY_BELOW = 65536  # bytes; copying less is cheaper than tracking the buffer
DRAIN_SECONDS = 0.001  # for the messages that have arrived: a flood of foreign ones must not hold `receive`
RECOVERIES = 256  # of the latest ones, in the statistics
STALL_SLICE = 0.1  # seconds that one reading may count: this process may have been stopped itself

SendToSupervisor = Callable[[object], None]


class ProgressWatch:
    """Measures the seconds without progress of a child that has work. Only time between close readings
    counts."""

    clock = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self._ticks = -1
        self._stalled = 0.0
        self._read_at = 0.0

    def stalled(self, ticks: int) -> float:
        """Return the seconds without progress, as far as they were observed; `ticks` is the child's counter
        now."""
        now = self.clock()
        if ticks != self._ticks:
            self._ticks, self._stalled = ticks, 0.0
        else:
            self._stalled += min(now - self._read_at, STALL_SLICE)
        self._read_at = now
        return self._stalled

    def reset(self) -> None:
        """Restart the count: the child has no work, or has just answered."""
        self._ticks = -1


@dataclass
class ChildState:
    """A child's present generation."""

    name: bytes
    generation: int
    pid: int
    up: bool = False  # it computes or copies: see `mark_up`
    hung: bool = False  # reported to the supervisor, which kills it


class ExitEvents:
    """What the supervisor reports to the engine's thread: exits, by role, which machines hold lanes now, and
    the end of all waiting. For any thread."""

    def __init__(self) -> None:
        roles = "worker", "prefetcher", "reader"
        self._exits: dict[str, deque[WorkerDied]] = {role: deque() for role in roles}
        self.machines: deque[SetMachines] = deque()
        self.given_up = ""

    def give_up(self, reason: str) -> None:
        """End all waiting for children: every wait from now on raises PeerLost with this reason."""
        self.given_up = reason

    def put(self, exit: WorkerDied) -> None:
        """Add an exit; those of other roles are dropped."""
        if exit.role in self._exits:
            self._exits[exit.role].append(exit)

    def of(self, role: str) -> deque[WorkerDied]:
        """A role's exits that were not yet taken, the oldest first."""
        return self._exits[role]


class ChildServerSocket:
    """A bound ROUTER for all children of one role."""

    def __init__(
        self,
        runtime: Path,
        socket: str,
        role: str,
        fingerprint: str,
        key: bytes,
        exits: ExitEvents,
        to_supervisor: SendToSupervisor,
        *,
        largest: int = 0,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """`key`: proves the children's identity; `largest`: bytes of the largest array that they send. `tick`
        is called at each slice of a wait: progress that the supervisor watches."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = bind_router(
            self._context,
            ipc_endpoint(runtime, socket),
            receive_hwm=CHILD_HWM,
            largest=max(largest, HEADER_LIMIT),
        )
        self.role = role
        self._fingerprint = fingerprint
        self._key = key
        self._events = exits
        self._to_supervisor = to_supervisor
        self._tick = tick
        self._children: dict[int, ChildState] = {}
        self._log = SparseLog(log)
        self._proven: dict[bytes, Identity] = {}  # of running children, by name: each proof is checked once
        self._early: list[tuple[int, object]] = []  # received while a send or `wait_ready` waited
        self._kept: dict[int, list[object]] = {}  # for `receive_of`
        self._exit_count = 0
        self._exited_at: dict[int, float] = {}  # by index, until the next generation is up
        self._up_seconds: deque[float] = deque(maxlen=RECOVERIES)
        self.malformed = 0
        self.behind = False  # the last `receive` ran out of time before all messages

    def is_up(self, index: int) -> bool:
        """The child runs and was marked up."""
        child = self._children.get(index)
        return child is not None and child.up

    def wait_ready(self, count: int, limit: float) -> None:
        """Wait until `count` children have announced themselves. Raises PeerLost after `limit` seconds."""
        deadline = time.monotonic() + limit
        while len(self._children) < count:
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"{len(self._children)} of {count} {self.role}s were ready after {limit:.0f} s"
                )
            self._early.extend(self._take(100))

    def mark_up(self, index: int, generation: int) -> None:
        """Mark this generation up, and report that to the supervisor, unless it has exited meanwhile."""
        child = self._children.get(index)
        if child is None or child.up or child.generation != generation:
            return
        child.up = True
        exited = self._exited_at.pop(index, None)
        if exited is not None:
            self._up_seconds.append(time.monotonic() - exited)
        self._to_supervisor(WorkerUp(self.role, index, generation))

    def generation(self, index: int) -> int:
        """Return the child's present generation; -1 where it has exited."""
        child = self._children.get(index)
        return -1 if child is None else child.generation

    def report_hung(self, index: int) -> None:
        """Report to the supervisor, which kills it, a child that has work and makes no progress."""
        child = self._children.get(index)
        if child is not None and not child.hung:
            child.hung = True
            self._to_supervisor(Hung(self.role, index, child.generation))

    def send(self, index: int, message: object) -> None:
        """Send to a child; dropped where it has exited (`receive` delivers that). Large tensors must not
        change until its answer. Raises PeerLost where a running child takes no message for too long."""
        child = self._children.get(index)
        if child is None:
            return
        frames = encode(message)
        small = sum(map(len, frames)) < COPY_BELOW
        deadline = time.monotonic() + SEND_LIMIT
        while True:
            try:
                self._socket.send_multipart([child.name, *frames], zmq.NOBLOCK, copy=small)
                return
            except zmq.Again:
                # The child may be waiting for this socket to receive its own messages.
                self._early.extend(self._take(10))
                if self._children.get(index) is not child:
                    return
                if time.monotonic() > deadline:
                    raise PeerLost(f"{self.role} {index} took no message for {SEND_LIMIT:.0f} s") from None
            except zmq.ZMQError as e:
                if e.errno != zmq.EHOSTUNREACH:
                    raise PeerLost(f"{self.role} {index} cannot be reached: {e}") from None
                return

    def receive(self, wait_ms: int) -> list[tuple[int, object]]:
        """Messages as (index, message), among them the Ready of each new child and the WorkerDied of each
        that exited; waits at most `wait_ms` for the first. Raises PeerLost after `ExitEvents.give_up`."""
        early, self._early = self._early, []
        return early + self._take(0 if early else wait_ms)

    def receive_of(self, index: int, wait_ms: int) -> list[object]:
        """The messages of one child, as `receive`; those of others are kept for them, and end the wait."""
        here = self._kept.pop(index, [])
        for other, message in self.receive(0 if here else wait_ms):
            self._kept.setdefault(other, []).append(message)
        return here + self._kept.pop(index, [])

    def stats(self) -> list[dict[str, Any]]:
        """The running children. From any thread."""
        return [
            {"role": self.role, "index": i, "generation": c.generation, "pid": c.pid, "up": c.up}
            for i, c in sorted(list(self._children.items()))
        ]

    def recovery_stats(self) -> dict[str, Any]:
        """The number of exits, and the median seconds from an exit until the next generation was up; None
        where no child was restarted. From any thread."""
        up = list(self._up_seconds)
        return {"deaths": self._exit_count, "whole_s": statistics.median(up) if up else None}

    def _take(self, wait_ms: int) -> list[tuple[int, object]]:
        messages: list[tuple[int, object]] = []
        exits = self._events.of(self.role)
        while True:
            slice_ms = min(wait_ms, SLICE_MS)
            arrived = self._socket.poll(slice_ms)
            self._tick()
            if self._events.given_up:
                raise PeerLost(self._events.given_up)
            while exits:
                self._on_exit(exits.popleft(), messages)
            if arrived:
                self._drain(messages)
            else:  # its time may have run out just after the last message
                self.behind = False
            wait_ms -= slice_ms
            if messages or wait_ms <= 0:
                return messages

    def _drain(self, messages: list[tuple[int, object]]) -> None:
        until = time.perf_counter() + DRAIN_SECONDS
        self.behind = True
        while time.perf_counter() < until:
            try:
                sender, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self.behind = False
                return
            try:
                identity = self._proven.get(sender) or parse_identity(sender, self._key)
                message = decode(frames)
            except MalformedMessage as e:
                self._reject(str(e))
                continue
            child = self._children.get(identity.index)
            if identity.role != self.role:
                self._reject(f"a {identity.role} sends on the socket of {self.role}s")
            elif isinstance(message, Ready):
                self._on_ready(sender, identity, message, messages)
            elif child is not None and child.generation == identity.generation:
                messages.append((identity.index, message))

    def _reject(self, reason: str) -> None:
        self.malformed += 1
        self._log.warning(f"dropped a malformed message on the {self.role} socket: {reason}")

    def _on_ready(
        self, name: bytes, identity: Identity, ready: Ready, messages: list[tuple[int, object]]
    ) -> None:
        index, generation = identity.index, identity.generation
        if ready.version != VERSION or ready.fingerprint != self._fingerprint:
            self._reject(f"{self.role} {index} has another version or store")
            return
        known = self._children.get(index)
        if known is not None and known.generation >= generation:
            return  # a second Ready, or one of an earlier generation
        if known is not None:  # the next generation's Ready arrived before the exit event
            self._on_exit(WorkerDied(self.role, index, known.generation, False, -1), messages)
        self._children[index] = ChildState(name, generation, ready.pid)
        self._proven[name] = identity
        messages.append((index, ready))

    def _on_exit(self, exit: WorkerDied, messages: list[tuple[int, object]]) -> None:
        child = self._children.get(exit.index)
        if child is not None and child.generation == exit.generation:
            del self._children[exit.index]
            del self._proven[child.name]
            self._exit_count += 1
            self._exited_at[exit.index] = time.monotonic()
            messages.append((exit.index, exit))

    def close(self) -> None:
        self._socket.close()
        self._context.term()
