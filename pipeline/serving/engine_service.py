"""One engine and its requests: alternates between clients' messages from the inbox and rounds of the
scheduler, in the engine's thread. Answers are posted to the event loop."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.errors import NumberInUse, PrefetcherLost, PromptTooLong, UsageError
from pipeline.fairness import MOST_WAITING, Held, TimeShare, Turns, held_bytes
from pipeline.memory.needs import CHUNK_MAX
from pipeline.policies.view import PolicyRequest
from pipeline.scheduling.job_factory import JobFactory
from pipeline.scheduling.scheduler import Scheduler
from pipeline.serving.calibration_service import CalibrationService
from pipeline.serving.engine_parts import TRIAL_TOKENS, EngineParts, measure_chunks
from pipeline.serving.engine_status import EngineStatus
from pipeline.serving.policy_switch import PolicySwitch
from pipeline.serving.text_queue import TextMessages
from pipeline.text.grammar import MaskDropped, MaskRequest
from pipeline.text.tokenizer import eos_ids
from pipeline.traces.recorder import recorder_of
from protocol.messages import Calibrate, Cancel, Done, Error, Generate, PolicyChanged, Score, SetPolicy
from shm.errors import ShmError
from workers.cuda import CudaError

# ----------------------------------------------------------------------------------------------------------
# Messages between the event loop and the engine's thread: clients' messages one way, events the other.


@dataclass(frozen=True)
class ClientGone:
    """The client has disconnected: its requests end, and its kept KV is released."""


EngineMessage = Generate | Score | Calibrate | SetPolicy | Cancel | ClientGone


class EngineInbox:
    """Clients' messages that wait for the engine's thread. Clients are served in turn, each client's messages
    in their order. Thread-safe: the event loop calls `put` and `drop`, the engine's thread `get`."""

    def __init__(self) -> None:
        # by client, none of them empty: messages, each with its size in bytes
        self._queues: dict[bytes, deque[tuple[EngineMessage, int]]] = {}
        self._turns = Turns()
        self._gone: deque[bytes] = deque()  # clients that have disconnected
        self._held = Held()
        self._changed = threading.Condition()
        self._stopped = self._woken = False

    @property
    def stopped(self) -> bool:
        """`stop` was called. Messages may still be waiting."""
        return self._stopped

    def put(self, client: bytes, message: EngineMessage) -> bool:
        """Queue a message. Returns False after `stop`, and where the waiting messages of this client are too
        many, or those of this client or all clients too large (that never refuses a Cancel)."""
        size = 0 if isinstance(message, Cancel) else held_bytes(message)
        with self._changed:
            waiting = len(self._queues.get(client, ()))
            if self._stopped or waiting >= MOST_WAITING or not self._held.take(client, size):
                return False
            self._queues.setdefault(client, deque()).append((message, size))
            self._changed.notify()
        return True

    def drop(self, client: bytes) -> None:
        """Drop the messages of a client that has disconnected; the next `get` returns a ClientGone."""
        with self._changed:
            for _, size in self._queues.pop(client, ()):
                self._held.give_back(client, size)
            if not self._stopped:
                self._gone.append(client)
                self._changed.notify()

    def get(self, wait: float) -> tuple[bytes, EngineMessage] | None:
        """Take the next client's oldest message. Returns None after `wait` seconds or a `wake`, and after
        `stop` once none is left."""
        with self._changed:
            if not (self._queues or self._gone or self._stopped or self._woken) and wait:
                self._changed.wait(wait)
            self._woken = False
            if self._gone:
                return self._gone.popleft(), ClientGone()
            if not self._queues:
                return None
            client = self._turns.next(self._queues)
            message, size = self._queues[client].popleft()
            if not self._queues[client]:
                del self._queues[client]
            self._held.give_back(client, size)
            return client, message

    def wake(self) -> None:
        """End the present wait of the engine's thread, or its next one: what it waits for is elsewhere."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def stop(self) -> None:
        """Refuse further messages, and wake the engine's thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()


@dataclass(frozen=True)
class ToClients:
    """Messages and their clients: those of a step together, so that the event loop wakes once for them."""

    messages: Sequence[tuple[bytes, object]]


@dataclass(frozen=True)
class ToOtherClients:
    excluded: bytes
    message: object


@dataclass(frozen=True)
class ToSupervisor:
    message: object


@dataclass(frozen=True)
class EngineReady:
    status: EngineStatus
    texts: TextMessages
    notes: tuple[str, ...]  # lines about the engine for a person


@dataclass(frozen=True)
class EngineFailed:
    """The engine cannot start, or cannot continue."""

    reason: str
    usage: bool  # the user's input is at fault


EngineEvent = (
    ToClients | ToOtherClients | ToSupervisor | MaskRequest | MaskDropped | EngineReady | EngineFailed
)
Post = Callable[[EngineEvent], None]


log = logging.getLogger(__name__)

IDLE_WAIT = 0.5  # seconds that an idle engine waits for a message before it checks its children
MOVING_WAIT = 0.01  # the same while tiles move in the background
CONGESTED_WAIT = 0.005  # seconds until the next round when every request waits for its client to read
INBOX_SECONDS = 0.01  # for messages between two rounds: a flood of messages must not stop the rounds
INBOX_SHARE = 0.1  # of the time while requests run
LAST_INBOX_SECONDS = 0.5  # for the messages that wait when the engine is stopped

CALIBRATING = "the engine is being calibrated; set the policy when that has ended"


class EngineService:
    """One engine and its requests. Used by the engine's thread alone; `status` may be read by any."""

    def __init__(
        self, parts: EngineParts, inbox: EngineInbox, post: Post, congested: Callable[[bytes], bool]
    ) -> None:
        """`congested`: whether a client reads too slowly, so its requests pause. Raises as PolicySwitch."""
        self._parts = parts
        self._inbox = inbox
        self._post = post
        self._policies = PolicySwitch(parts)
        options, detokenizer = parts.config.options, parts.detokenizer
        jobs = JobFactory(
            detokenizer,
            eos_ids(parts.config.model) if detokenizer is None else detokenizer.eos_ids,
            post,
            vocabulary=parts.engine.backbone.facts.vocabulary,
            context=parts.context,
            longest=parts.engine.backbone.facts.max_positions,
            seed=options.seed,
            greedy=not parts.device.on_host,
        )
        self._scheduler = Scheduler(
            parts.engine,
            parts.kv,
            jobs,
            max_sequences=options.max_sequences,
            chunk=options.chunk or TRIAL_TOKENS,
            send=lambda messages: self._post(ToClients(messages)),
            congested=congested,
            suspects=parts.suspects,
        )
        self._calibrations = CalibrationService(
            parts, self._policies, self._scheduler, send=self._send, drain_inbox=self._drain_inbox
        )
        self._share = TimeShare(INBOX_SHARE, INBOX_SECONDS)
        self.status = EngineStatus(parts, self._policies, self._scheduler)

    def warm_up(self) -> None:
        """Measure the prefill chunk, open the trace file."""
        parts, scheduler, options = self._parts, self._scheduler, self._parts.config.options
        if options.chunk is None and parts.tier is not None:  # each chunk reads what memory lacks of a model
            scheduler.chunk = scheduler.chunk_alone = min(CHUNK_MAX, parts.context)
        elif options.chunk is None:
            chunks = measure_chunks(parts.engine, parts.kv, parts.context)
            scheduler.chunk, scheduler.chunk_alone = chunks
            parts.engine.forget_trials()
            self._policies.reset()
        if not parts.engine.backbone.chunks:
            scheduler.chunk = scheduler.chunk_alone = parts.context
        if options.record is not None:
            recorder = recorder_of(parts.config, parts.source, parts.engine, options.record)
            parts.closing.callback(recorder.close)
            parts.engine.observers.append(recorder)
        log.debug("prefill: %d tokens a chunk", scheduler.chunk)

    def serve(self) -> None:
        """Serve until the inbox is stopped; every request then ends as cancelled. A failure of the engine
        ends no request: clients resume their requests on the restarted engine."""
        scheduler, idle_wait = self._scheduler, IDLE_WAIT
        try:
            while self._drain_inbox(idle_wait if scheduler.idle else 0.0):
                if scheduler.idle:
                    idle_wait = MOVING_WAIT if self._on_idle() else IDLE_WAIT
                elif not scheduler.round():
                    self._drain_inbox(CONGESTED_WAIT)
        finally:
            if self._inbox.stopped:
                self._drain_inbox(seconds=LAST_INBOX_SECONDS)
                scheduler.cancel_all()

    def _drain_inbox(self, wait: float = 0.0, seconds: float = INBOX_SECONDS) -> bool:
        """Handle messages for up to `seconds`; wait for the first. False: the engine is stopped."""
        self._parts.tick()
        if self._share.wait and not self._scheduler.idle and not self._inbox.stopped:
            if wait:
                time.sleep(wait)
            return True
        item = self._inbox.get(wait)
        until = time.perf_counter() + seconds
        while item is not None:
            self._parts.tick()
            began = time.perf_counter()
            if (refusal := self._parts.suspects.refusal(item[1])) is not None:
                self._send(item[0], refusal)
            else:
                with self._parts.suspects.handling(item[1]):
                    self._handle(*item)
            if not isinstance(item[1], SetPolicy | Calibrate):  # those are work, and no flood
                self._share.spend(time.perf_counter() - began)
            item = self._inbox.get(0.0) if time.perf_counter() < until else None
        return not self._inbox.stopped

    def _handle(self, client: bytes, message: EngineMessage) -> None:
        match message:
            case Generate() | Score():
                self._enqueue(client, message)
            case Calibrate():
                self._calibrations.serve(client, message)
            case SetPolicy():
                self._set_policy(client, message)
            case Cancel():
                self._calibrations.cancel(client, message.request)
                self._scheduler.cancel(client, message.request)
            case ClientGone():
                self._calibrations.forget(client)
                self._scheduler.forget(client)

    def _enqueue(self, client: bytes, message: Generate | Score) -> None:
        try:
            self._scheduler.enqueue(client, message)
        except NumberInUse as e:  # an Error, because the Done of this number is the other request's
            self._send(client, Error(message.request, str(e)))
        except UsageError as e:
            stats = {"prompt_tokens": e.tokens} if isinstance(e, PromptTooLong) else {}
            self._send(client, Done(message.request, "error", str(e), stats=stats, usage=True))

    def _set_policy(self, client: bytes, message: SetPolicy) -> None:
        if self._calibrations.running:
            self._send(client, Error(message.request, CALIBRATING))
            return
        try:
            notes = self._policies.set(PolicyRequest(message.policy, message.options), message.counted)
        except (UsageError, ShmError, CudaError, PrefetcherLost) as e:
            self._send(client, Error(message.request, str(e)))
            return
        self._post(ToSupervisor(message))  # a restarted coordinator begins with this policy
        engine = self._parts.engine
        name, exact = engine.policy.name, engine.exact
        self._send(client, PolicyChanged(message.request, name, exact, notes))
        self._post(ToOtherClients(client, PolicyChanged(-1, name, exact, notes)))

    def _on_idle(self) -> bool:
        """Handle children's exits, fetch in the background, audit, keep counts. True while tiles move."""
        engine = self._parts.engine
        engine.poll_children()
        if engine.tier is not None:
            engine.tier.tidy()
        self._policies.keep_heat()
        idle = all(stage.memory.idle for stage in engine.stages)
        for stage in engine.stages if idle else ():
            stage.memory.audit()
            stage.rest()
        return not idle or any(socket.behind for socket in self._parts.sockets.values())

    def _send(self, client: bytes, message: object) -> None:
        self._post(ToClients([(client, message)]))
