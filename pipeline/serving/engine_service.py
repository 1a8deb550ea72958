"""One engine and its requests: alternates between clients' messages from the inbox and rounds of the
scheduler, in the engine's thread. Answers are posted to the event loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pipeline.errors import DiskFailed, NumberInUse, PrefetcherLost, PromptTooLong, UsageError
from pipeline.fairness import TimeShare
from pipeline.memory.needs import CHUNK_MAX
from pipeline.policies.view import PolicyRequest
from pipeline.scheduling.job_factory import JobFactory
from pipeline.scheduling.scheduler import Scheduler
from pipeline.serving.calibration_service import CalibrationService
from pipeline.serving.engine_inbox import (
    ClientGone,
    EngineInbox,
    EngineMessage,
    Post,
    ToClients,
    ToOtherClients,
    ToSupervisor,
)
from pipeline.serving.engine_parts import TRIAL_TOKENS, EngineParts, measure_chunks
from pipeline.serving.engine_status import EngineStatus
from pipeline.serving.policy_switch import PolicySwitch
from pipeline.text.tokenizer import eos_ids
from pipeline.traces.recorder import recorder_of
from protocol.messages import Calibrate, Cancel, Done, Error, Generate, PolicyChanged, Score, SetPolicy
from shm.errors import ShmError
from workers.cuda import CudaError

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
            # A recorded routing is of an answer's tokens alone.
            speculate="off" if options.record is not None else options.speculate,
            drafter=parts.drafter,
            # Nobody owes others the time in which all have waited for a lost machine.
            clock=time.perf_counter if parts.machines is None else parts.machines.clock,
        )
        self._calibrations = CalibrationService(
            parts, self._policies, self._scheduler, send=self._send, drain_inbox=self._drain_inbox
        )
        if parts.machines is not None:
            parts.machines.tell(self._scheduler.tell_waiting, self._interrupted)
        self._share = TimeShare(INBOX_SHARE, INBOX_SECONDS)
        self.status = EngineStatus(parts, self._policies, self._scheduler)

    def _interrupted(self) -> bool:
        """Returns whether a step that waits is to end: a message is there, or has ended the calibration."""
        if self._calibrations.running:
            return self._calibrations.ended()
        return self._inbox.waiting and self._parts.suspects.stepping

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
        except (UsageError, ShmError, CudaError, PrefetcherLost, DiskFailed) as e:
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
            engine.tier.update(0)
        self._policies.keep_heat()
        idle = all(stage.memory.idle for stage in engine.stages)
        for stage in engine.stages if idle else ():
            stage.memory.audit()
            stage.rest()
        return not idle or any(socket.behind for socket in self._parts.sockets.values())

    def _send(self, client: bytes, message: object) -> None:
        self._post(ToClients([(client, message)]))
