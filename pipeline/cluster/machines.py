"""The coordinator's side of expert hosts on other machines: asks them for lanes, and sees to it that each
answers, or that another machine does which holds the lane.

A `Question` is a layer's remote lanes for some rows. Each lane is asked of the first ready machine that holds
it; of another one too as soon as that one is silent; and again where a host says that it does not have it.
The first answer counts: whoever computes a lane, its sum has the same bits. Where no machine that answers
computes it, it is computed here from a copy, if there is one; else the question waits, and a line says for
what.

The engine's thread does all of this; ZeroMQ has an I/O thread for each machine, which encrypts and carries
the bytes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from pipeline.arrays import FloatArray
from pipeline.cluster.lanes import Pieces
from pipeline.cluster.rows import WireX
from pipeline.config import Machine, MachineList
from pipeline.counters import Elsewhere
from pipeline.errors import PeerLost, ShardFailed, StepInterrupted
from pipeline.experts.peers import COPY_BELOW, ExitEvents
from pipeline.fairness import SparseLog
from protocol.codec import decode, encode
from protocol.errors import MalformedMessage, ProtocolError
from protocol.machines import (
    LOADING,
    READY,
    REFUSED,
    HostHello,
    HostWelcome,
    LaneAbandon,
    LaneFailed,
    LaneSums,
    LaneWork,
    Ping,
    Pong,
    host_dealer,
)

HELLO_SECONDS = 0.25  # between two HostHellos to a host that is not ready
PING_SECONDS, IDLE_PING_SECONDS = 0.05, 1.0  # between two Pings to one that owes an answer, to another
HEDGE_SECONDS = 0.3  # of silence, after which a machine that owes an answer counts as silent
LOST_SECONDS = 1.0  # the same, after which its step may be interrupted: before that it may only be busy
SMOOTH = 1 / 16  # weight of an answer in a mean
LOOK_SECONDS = 0.02  # between two looks for what is late
SLICE_MS = 10  # of a wait
SAY_SECONDS, SAY_AGAIN_SECONDS = 2.0, 30.0  # of a wait, until a line says for what; and again
WAIT_LIMIT = 3600.0  # seconds for a lane that nobody holds: the step fails
# A handshake that was begun and not ended: the kernel answers for a process that is stopped, too.
NO_HANDSHAKE = "it is reached, and hangs, or one of the two does not have the key that the other was told"
_REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)
_FAILED = sum(_REFUSALS) | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECTED
AWAY = "away"  # state: there is no connection
SILENT = "silent"

log = logging.getLogger(__name__)

ComputeHere = Callable[[Mapping[int, Pieces]], dict[int, FloatArray]]


@dataclass(eq=False)
class Asked:
    """A machine that was asked for a lane."""

    link: Link
    incarnation: str
    pings: int  # that it had been sent
    at: float  # monotonic seconds


@dataclass(eq=False)
class Question:
    """Lanes of a layer for some rows, which other machines compute."""

    seq: int
    rows: int
    pieces: Mapping[int, Pieces]  # by lane
    x: WireX
    asked: dict[int, list[Asked]] = field(default_factory=dict)  # by lane that has no answer, the latest last
    answers: dict[int, FloatArray] = field(default_factory=dict)  # by lane: float32 [R, H]
    last: Link | None = None  # whose answer made it complete
    waits: bool = False  # what arrives now is waited for
    elsewhere: dict[str, Elsewhere] = field(default_factory=dict)  # by machine
    failure: str = ""

    @property
    def complete(self) -> bool:
        return len(self.answers) == len(self.pieces)


class Link:
    """One machine's host: its socket, and what is known of it."""

    def __init__(self, machine: Machine, socket: zmq.Socket[bytes]) -> None:
        self.machine = machine
        self.socket = socket
        self._events = socket.get_monitor_socket(_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._shaken = False  # hands, on the present connection
        self.state, self.why = AWAY, "there is no connection, perhaps for a firewall"
        self.incarnation = ""
        self.from_disk = False
        self.pings = self.works = self.asked_again = 0
        self.heard_at = self.pinged_at = self.helloed_at = 0.0  # monotonic seconds
        self.unheard_since = 0.0  # of the first Ping that no message has followed; 0: there is none
        self.round_trip = self.computing = 0.0  # seconds, of the latest answers, smoothed
        self.waited = 0.0  # seconds that the engine has waited for its answers alone
        self.sent = self.received = 0  # bytes

    @property
    def able(self) -> bool:
        """It can be asked for lanes."""
        return self.state == READY

    @property
    def silent(self) -> bool:
        """It has not answered for a while."""
        return self.unheard(HEDGE_SECONDS)

    def unheard(self, seconds: float) -> bool:
        """It owes an answer, and has sent nothing for so long."""
        return self.unheard_since > 0 and time.monotonic() - self.unheard_since > seconds

    def look(self) -> None:
        """Notice why there is no connection."""
        while self._events.poll(0):
            event = recv_monitor_message(self._events, zmq.NOBLOCK)["event"]
            if event != zmq.EVENT_DISCONNECTED:
                self._shaken = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if event in _REFUSALS or (event == zmq.EVENT_DISCONNECTED and not self._shaken):
                self.why = NO_HANDSHAKE

    def close(self) -> None:
        """Close the socket without waiting for what was not sent."""
        self.socket.disable_monitor()
        self._events.close(linger=0)
        self.socket.close(linger=0)

    def send(self, message: object) -> bool:
        """Send a message; returns False where there is no connection, or its queue is full."""
        frames = encode(message)
        size = sum(map(len, frames))
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=size < COPY_BELOW)
        except zmq.Again:
            return False
        self.sent += size
        return True

    def receive(self) -> object:
        """Returns a message that has arrived. Raises MalformedMessage."""
        frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        self.received += sum(map(len, frames))
        return decode(frames)

    def count(self, question: Question, lanes: Sequence[int], busy: float) -> None:
        """It has answered lanes, for which it was asked, after computing for so many seconds."""
        times = [one.at for lane in lanes for one in question.asked.get(lane, ()) if one.link is self]
        if not times:
            return
        took, weight = time.monotonic() - min(times), SMOOTH if self.round_trip else 1
        self.round_trip += (took - self.round_trip) * weight
        self.computing += (busy - self.computing) * weight
        before = question.elsewhere.get(self.machine.name)
        busy += 0.0 if before is None else before.busy
        share = Elsewhere(busy, max(0.0, took - busy) if question.waits else None)
        question.elsewhere[self.machine.name] = share

    def lost(self, state: str, why: str) -> None:
        """It cannot be asked any more, until it says that it can."""
        if self.able or (state == REFUSED and self.why != why):
            log.warning(f"machine {self.machine.name} ({self.machine.endpoint}): {why}")
        self.state, self.why, self.incarnation, self.unheard_since = state, why, "", 0.0


class Machines:
    """All other machines. Used by the engine's thread, but `stats`."""

    def __init__(
        self,
        given: MachineList,
        hello: HostHello,
        exits: ExitEvents,
        tick: Callable[[], None],
        copies: Sequence[int] = (),
    ) -> None:
        """`exits`: tells of other machines, and of the end of all waiting; `tick`: called at each slice of a
        wait; `copies`: lanes of the others' that this machine holds too."""
        self._given, self._hello, self._exits, self._tick = given, hello, exits, tick
        self._copies = frozenset(copies)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(max(1, len(given.machines)))
        self._poller = zmq.Poller()
        self._links: dict[zmq.Socket[bytes], Link] = {}
        self._open: dict[int, Question] = {}
        self._next = 1  # seq
        self._looked_at = 0.0
        self._log = SparseLog(log)
        self._waits_since = self._waited_at = self._say_at = 0.0  # of a wait, over its interruptions
        self._said = False  # for what it waits
        self._lost_seconds = 0.0  # of all waits for lost machines
        self.tell(lambda why: None, lambda: False)
        self._change(given.machines)

    def tell(self, on_wait: Callable[[str], None], interrupted: Callable[[], bool]) -> None:
        """From now on call `on_wait` with what a question waits for, and with "" once it goes on; and, while
        that is a lost machine, `interrupted`: whether its step is to end for now."""
        self._on_wait, self._interrupted = on_wait, interrupted

    def clock(self) -> float:
        """Returns seconds, without those in which a question has waited for a lost machine."""
        return time.monotonic() - self._lost_seconds

    def stats(self) -> list[dict[str, Any]]:
        """Returns what is known of each machine. From any thread."""
        return [
            {
                "name": link.machine.name,
                "endpoint": link.machine.endpoint,
                "lanes": list(link.machine.lanes),
                "state": SILENT if link.able and link.silent else link.state,
                "why": link.why,
                "works": link.works,
                "asked_again": link.asked_again,
                "round_trip_us": 1e6 * link.round_trip,
                "computing_us": 1e6 * link.computing,
                "waited_s": link.waited,
                "sent_bytes": link.sent,
                "received_bytes": link.received,
                "share": self._share(link.machine.lanes),
            }
            for link in list(self._links.values())
        ]

    def _share(self, lanes: Sequence[int]) -> float:
        """Returns the share of each expert that these lanes are."""
        bounds = self._hello.bounds
        return sum(bounds[lane + 1] - bounds[lane] for lane in lanes) / bounds[-1]

    # --- questions ---------------------------------------------------------------------------------------

    def ask(self, pieces: Mapping[int, Pieces], x: WireX, rows: int) -> Question:
        """Ask for lanes, and return at once."""
        question = Question(self._next, rows, pieces, x)
        self._next += 1
        self._open[question.seq] = question
        self._assign(question, list(pieces))
        return question

    def wait(self, question: Question, compute: ComputeHere | None = None) -> dict[int, FloatArray]:
        """Wait for the sum of each lane, float32 [R, H]. `compute`: computes those of which this machine has
        copies. Raises ShardFailed where a lane cannot be computed or nobody holds it for too long, PeerLost
        where the engine ends, StepInterrupted where it waits for a machine that is lost and is wanted for
        something else."""
        self.update(0)
        question.waits = True
        began = time.monotonic()
        if began - self._waited_at > SAY_SECONDS:
            self._waits_since, self._say_at = began, began + SAY_SECONDS
        self._waited_at = began
        self._say_at = min(self._say_at, began + SAY_SECONDS)  # to those who have interrupted it
        while not question.complete:
            if question.failure:
                self.abandon(question)
                raise ShardFailed(question.failure)
            self.update(SLICE_MS)
            if compute is not None and (here := self._left_here(question)):
                question.answers |= compute({lane: question.pieces[lane] for lane in here})
                if question.complete:
                    self.abandon(question)
            if not question.complete:
                self._while_waiting(question)
        self._waited_at = 0.0
        if self._said:
            self._said = False
            self._on_wait("")
        if question.last is not None:
            question.last.waited += time.monotonic() - began
        return question.answers

    def _while_waiting(self, question: Question) -> None:
        """Say now and then what a question waits for. Raises ShardFailed after too long a wait,
        StepInterrupted."""
        missing = [lane for lane in question.pieces if lane not in question.answers]
        lost = any(self._lost(question, lane, LOST_SECONDS) for lane in missing)
        before, now = self._waited_at, time.monotonic()
        self._waited_at = now
        self._lost_seconds += lost * (now - before)
        if now > self._say_at:
            self._say_at = now + SAY_AGAIN_SECONDS
            log.warning(f"waiting for {self._why(missing)}")
            self._said = True
            self._on_wait(self._why(missing, where=False))
        if now - self._waits_since > WAIT_LIMIT:  # nor does another step wait as long again
            self.abandon(question)
            why = self._why(missing, where=False)
            raise ShardFailed(f"for {WAIT_LIMIT:.0f} s there was no answer: {why}")
        if lost and self._interrupted():
            self.abandon(question)
            raise StepInterrupted(f"waiting for {self._why(missing)}")

    def abandon(self, question: Question) -> None:
        """Drop a question."""
        if self._open.pop(question.seq, None) is not None:
            for link in {asked.link for every in question.asked.values() for asked in every}:
                link.send(LaneAbandon((question.seq,)))

    def wait_ready(self, lanes: Sequence[int], limit: float) -> None:
        """Wait until each of these lanes has a machine that is ready, as long as those that are not come
        further within so many seconds. Raises PeerLost where that fails or all refuse, unless there is a copy
        here, or the engine ends."""
        until, say_at = time.monotonic() + limit, time.monotonic() + SAY_SECONDS
        seen: set[tuple[str, str, str]] = set()
        while missing := [lane for lane in lanes if not self._holders(lane)]:
            self.update(SLICE_MS)
            now, known = time.monotonic(), {(k.machine.name, k.state, k.why) for k in self._links.values()}
            if known - seen:
                seen, until = seen | known, now + limit
            late = [lane for lane in missing if now > until or self._refused(lane)]
            if needed := [lane for lane in late if lane not in self._copies]:
                raise PeerLost(self._why(needed))
            if late == missing:
                return
            if now > say_at:
                say_at = now + SAY_AGAIN_SECONDS
                log.warning(f"waiting for {self._why(missing)}")

    def _refused(self, lane: int) -> bool:
        every = [link.state for link in self._links.values() if lane in link.machine.lanes]
        return bool(every) and set(every) == {REFUSED}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the hosts' leases by a thread of its own while the block runs, which must not use this
        object."""
        ended = threading.Event()

        def keep() -> None:
            with suppress(PeerLost):  # which this thread's owner notices too
                while not ended.is_set():
                    self.update(SLICE_MS)

        thread = threading.Thread(target=keep, name="leases", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def update(self, wait_ms: int) -> None:
        """Take messages, waiting for the first; see to what is late. Raises PeerLost where the engine
        ends."""
        arrived = self._poller.poll(wait_ms) if self._links else ()
        if not self._links and wait_ms:
            time.sleep(wait_ms / 1000)
        self._tick()
        if self._exits.given_up:
            raise PeerLost(self._exits.given_up)
        for socket, _ in arrived:
            self._drain(self._links[socket])
        while self._exits.machines:
            new = self._exits.machines.popleft().machines
            self._change(tuple(Machine(m.name, m.endpoint, m.key, m.lanes, m.why) for m in new))
        if (now := time.monotonic()) - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._look(now)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._context.term()

    # --- machines ----------------------------------------------------------------------------------------

    def _change(self, machines: tuple[Machine, ...]) -> None:
        """Drop machines that are no longer there, connect to those that are new."""
        kept = {(m.endpoint, m.key): m for m in machines if m.endpoint}
        self._absent = [m for m in machines if not m.endpoint]
        for socket, link in list(self._links.items()):
            same = kept.pop((link.machine.endpoint, link.machine.key), None)
            if same is not None:
                link.machine = same
                continue
            link.lost(AWAY, "it is no longer one of the machines")
            del self._links[socket]
            self._poller.unregister(socket)
            link.close()
        for machine in kept.values():
            keys = machine.key, self._given.public_key, self._given.secret_key
            try:
                socket = host_dealer(self._context, machine.endpoint, *keys)
            except ProtocolError as e:
                self._log.warning(f"machine {machine.name}: {e}")
                continue
            self._links[socket] = Link(machine, socket)
            self._poller.register(socket, zmq.POLLIN)

    def _holders(self, lane: int) -> list[Link]:
        """Returns the machines that can be asked for a lane: those that answer first, of these those
        with the lane in memory, and of these the one whose own it is, so that replicas share the work."""
        able = [link for link in self._links.values() if lane in link.machine.lanes and link.able]
        if lane in self._copies:
            able = [link for link in able if not link.silent]
        return sorted(able, key=lambda each: (each.silent, each.from_disk, each.machine.lanes.index(lane)))

    def _why(self, lanes: Sequence[int], where: bool = True) -> str:
        """Returns what these lanes wait for; `where`: with the addresses."""
        lines = []
        for lane in lanes:
            holders = [link for link in self._links.values() if lane in link.machine.lanes]
            known = [
                f"{link.machine.name}{f' ({link.machine.endpoint})' * where} {_state_line(link)}"
                for link in holders
            ]
            known += [f"{m.name} has no expert host: {m.why}" for m in self._absent if lane in m.lanes]
            lines.append(f"lane {lane} of the experts: {'; '.join(known) or 'no machine holds it'}")
        return ", ".join(lines)

    # --- assignment --------------------------------------------------------------------------------------

    def _assign(self, question: Question, lanes: Sequence[int], beside: bool = False) -> None:
        """Ask for lanes, each of a machine that was not asked for it yet, if there is one, unless only of
        such (`beside`)."""
        to: dict[tuple[Link, int], list[int]] = {}
        for lane in lanes:
            before = {asked.link for asked in question.asked.get(lane, ())}
            holders = self._holders(lane)
            others = [link for link in holders if link not in before]
            if chosen := others or ([] if beside else holders):
                to.setdefault((chosen[0], id(question.pieces[lane])), []).append(lane)
        for (link, _), some in to.items():
            if not self._send(question, link, some):
                link.lost(AWAY, "the connection has ended")

    def _send(self, question: Question, link: Link, lanes: Sequence[int]) -> bool:
        pieces, x = question.pieces[lanes[0]], question.x
        lengths = tuple(len(one) for one in pieces)
        every = np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
        work = LaneWork(question.seq, tuple(lanes), lengths, every, x.compact, x.rows)
        if not link.send(work):
            return False
        now = time.monotonic()
        link.works += 1
        for lane in lanes:
            asked = Asked(link, link.incarnation, link.pings, now)
            question.asked.setdefault(lane, []).append(asked)
        return True

    # --- what is late ------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        owing = {asked.link for q in self._open.values() for every in q.asked.values() for asked in every}
        for link in list(self._links.values()):
            if not link.able:
                link.look()
                if now - link.helloed_at >= HELLO_SECONDS:
                    link.helloed_at = now
                    if not link.send(self._hello) and link.state == LOADING:
                        link.lost(AWAY, "the connection has ended")
            elif now - link.pinged_at >= (PING_SECONDS if link in owing else IDLE_PING_SECONDS):
                self._ping(link, now)
        for question in list(self._open.values()):
            self._look_after(question)

    def _ping(self, link: Link, now: float) -> None:
        link.pings, link.pinged_at = link.pings + 1, now
        link.unheard_since = link.unheard_since or now
        if not link.send(Ping(link.pings)):
            link.lost(AWAY, "the connection has ended")

    def _look_after(self, question: Question) -> None:
        """Ask again for lanes that nobody computes, and others where who was asked is silent."""
        orphans, late = [], []
        for lane in question.pieces:
            if lane in question.answers:
                continue
            alive = [asked for asked in question.asked.get(lane, ()) if self._has(asked)]
            question.asked[lane] = alive
            if not alive:
                orphans.append(lane)
            elif all(asked.link.silent for asked in alive):
                late.append(lane)
        if orphans:
            self._assign(question, orphans)
        if late:
            self._assign(question, late, beside=True)

    def _left_here(self, question: Question) -> list[int]:
        """Returns the lanes of which this machine has copies, and that nobody who answers computes."""
        missing = [lane for lane in self._copies & set(question.pieces) if lane not in question.answers]
        return [lane for lane in missing if self._lost(question, lane)]

    def _lost(self, question: Question, lane: int, seconds: float = HEDGE_SECONDS) -> bool:
        """Returns whether nobody who has answered for so long computes a lane."""
        return not any(self._has(a) and not a.link.unheard(seconds) for a in question.asked.get(lane, ()))

    def _has(self, asked: Asked) -> bool:
        """Returns whether the process that was asked is still the one that would answer."""
        link = asked.link
        return link.socket in self._links and link.able and link.incarnation == asked.incarnation

    # --- messages ----------------------------------------------------------------------------------------

    def _drain(self, link: Link) -> None:
        while int(link.socket.get(zmq.EVENTS)) & zmq.POLLIN:
            try:
                message = link.receive()
            except MalformedMessage as e:
                link.lost(REFUSED, f"it speaks another language: {e}")
                continue
            link.heard_at, link.unheard_since = time.monotonic(), 0.0
            self._on_message(link, message)

    def _on_message(self, link: Link, message: object) -> None:
        match message:
            case LaneSums():
                self._on_sums(link, message)
            case Pong():
                self._on_pong(link, message)
            case HostWelcome():
                self._on_welcome(link, message)
            case LaneFailed(seq=seq, text=text):
                if seq in self._open:
                    self._open[seq].failure = f"machine {link.machine.name} cannot compute it: {text}"
            case _:
                self._log.warning(f"an unexpected {type(message).__name__} of {link.machine.name}")

    def _on_sums(self, link: Link, sums: LaneSums) -> None:
        question = self._open.get(sums.seq)
        if question is None:
            return  # another machine was sooner, or it is no longer needed
        if len(sums.y) != len(sums.lanes) * question.rows or not set(sums.lanes) <= set(question.pieces):
            question.failure = f"machine {link.machine.name} answered something else"
            return
        link.count(question, sums.lanes, sums.busy)
        for number, lane in enumerate(sums.lanes):
            if lane not in question.answers:
                question.answers[lane] = sums.y[number * question.rows : (number + 1) * question.rows]
                question.asked.pop(lane, None)
        if question.complete:
            question.last = link
            del self._open[question.seq]

    def _on_welcome(self, link: Link, welcome: HostWelcome) -> None:
        if welcome.state == READY:
            if not link.able:
                how = ", read from disk" * welcome.from_disk
                log.info(f"machine {link.machine.name} is ready: lanes {list(welcome.lanes)}{how}")
            link.state, link.why, link.incarnation = READY, "", welcome.incarnation
            link.from_disk = welcome.from_disk
        elif welcome.state == REFUSED:
            link.lost(REFUSED, welcome.error)
        else:
            share = 100 * welcome.done // max(1, welcome.total)
            how = f"it loads its part: {share} %" if share else "it begins to load its part"
            link.state, link.why = LOADING, how

    def _on_pong(self, link: Link, pong: Pong) -> None:
        if not link.able:
            return
        if pong.incarnation != link.incarnation:
            link.lost(AWAY, "its process is another one")
            return
        for question in list(self._open.values()):
            for lane, every in question.asked.items():
                lost = [
                    asked
                    for asked in every
                    if asked.link is link and asked.pings < pong.number and question.seq not in pong.works
                ]
                if lost and lane not in question.answers:
                    link.asked_again += 1
                    question.asked[lane] = [asked for asked in every if asked not in lost]


def _state_line(link: Link) -> str:
    if link.able:
        return f"has not been heard of for {time.monotonic() - link.heard_at:.1f} s"
    return f"is {link.state}: {link.why}" if link.why else f"is {link.state}"
