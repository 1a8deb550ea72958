"""Which requests run in the next step: continuous batching with chunked prefill.

One round is a prefill chunk of one request that has prompt left (clients take turns), then one decode step of
all that are past theirs. A request is admitted when its prompt and a little more fit the KV cache; the others
wait, in an order that `waiting.py` says. A sequence grows while it is decoded; when the cache is full, kept
conversations go first, and then the request that was admitted last makes way: it waits, has its tokens
prefilled again when it is admitted again, and goes on where it was. Every request ends with exactly one Done.
Used by the engine's thread alone.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from pipeline.arrays import Phase
from pipeline.backbone.kv_cache import BLOCK, GROWTH, KVCache, SequenceKV, room_for
from pipeline.counters import difference, fidelity
from pipeline.engine.engine import Engine
from pipeline.errors import NumberInUse, PipelineError, RequestError, ShardFailed
from pipeline.scheduling.fair_queue import FairQueue
from pipeline.scheduling.job_factory import JobFactory
from pipeline.scheduling.jobs import Job
from pipeline.scheduling.prefix_cache import PrefixCache
from protocol.messages import Generate, Score

Send = Callable[[bytes, object], None]

QUEUE_LIMIT = 1024  # requests of one client that may wait
TELL_INTERVAL = 0.5  # seconds between two times that those who wait are told their changed positions


class Scheduler:
    """The requests of all clients."""

    def __init__(
        self,
        engine: Engine,
        kv: KVCache,
        requests: JobFactory,
        *,
        max_sequences: int,
        chunk: int,
        send: Send,
        congested: Callable[[bytes], bool],
    ) -> None:
        """`send` delivers a message to a client; a client that is `congested` has not taken what it was sent,
        and its requests pause. `chunk`: prefill tokens of a step."""
        self.engine = engine
        self.kv = kv
        self.chunk = self.chunk_alone = chunk
        self._requests = requests
        self._max_sequences = max_sequences
        self._send = send
        self._congested = congested
        self._waiting = FairQueue()
        self._running: list[Job] = []  # by their latest admission, the oldest first
        self._live: dict[tuple[bytes, int], Job] = {}  # all of both, by client and request
        self._conversations = PrefixCache(kv)
        self._admissions = itertools.count()
        self._turns = itertools.count()
        self._last_turn: dict[bytes, int] = {}  # of running clients: when one last had a prefill chunk
        self._told = 0.0  # when those who wait were last told their positions
        self._reused = 0
        self._preemptions = 0

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    def submit(self, client: bytes, message: Generate | Score) -> None:
        """Queue a request. Raises RequestError, one line, for one that can never be served."""
        if (client, message.request) in self._live:
            raise NumberInUse(f"request {message.request} is already being served")
        if self._waiting.of(client) >= QUEUE_LIMIT:
            raise RequestError(f"{QUEUE_LIMIT} requests of this client wait already; ask later")

        def emit(answer: object) -> None:
            self._send(client, answer)

        job = (
            self._requests.generate(client, message, emit)
            if isinstance(message, Generate)
            else self._requests.score(client, message, emit)
        )
        self._live[client, message.request] = job
        self._waiting.add(job)

    def cancel(self, client: bytes, request: int) -> None:
        """End a client's request."""
        job = self._live.get((client, request))
        if job is not None:
            self._end(job, "cancelled")

    def forget(self, client: bytes) -> None:
        """A client is gone: end its requests, and keep nothing of it."""
        for job in list(self._live.values()):
            if job.client == client:
                self._end(job, "cancelled")
        self._conversations.forget(client)

    def cancel_all(self) -> None:
        """The engine shuts down."""
        for job in list(self._live.values()):
            self._end(job, "cancelled")

    def round(self) -> bool:
        """Admit what fits; one prefill chunk, one decode step. False where nothing could run: every request
        waits for its client to take what it was sent."""
        self._admit()
        ready = [job for job in self._running if not self._congested(job.client)]
        self._step(self._next_prefill(ready), "prefill")
        decoding = [job for job in ready if not job.prefilling and job.reason is None]
        self._step(self._with_room(decoding), "decode")
        return bool(ready)

    def stats(self) -> dict[str, Any]:
        kept = self._conversations.tokens
        return {
            "waiting": len(self._waiting),
            "running": len(self._running),
            "max_running": self._max_sequences,
            "kv_tokens_used": self.kv.used - kept,
            "kv_tokens_kept": kept,
            "kv_tokens": self.kv.budget,
            "kv_reused_tokens": self._reused,
            "conversations": len(self._conversations),
            "preemptions": self._preemptions,
            "prefill_chunk": self.chunk,
            "prefill_chunk_alone": self.chunk_alone,
            "context": self._requests.context,
        }

    # --- who runs ----------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit in order. Whose client has nothing running is not kept out by another's many requests: one
        slot is for those alone, and where that or the room is taken, the newest of the most makes way."""
        while self._waiting:
            job = next(self._waiting.in_order(self._running))
            busy = Counter(j.client for j in self._running)
            slots = self._max_sequences + (job.client not in busy)
            kv = self._admission_room(job) if len(self._running) < slots else None
            if kv is not None:
                self._begin(job, kv)
            elif job.client in busy or not self._thin_out(busy):
                break
        self._tell_positions()

    def _begin(self, job: Job, kv: SequenceKV) -> None:
        self._waiting.admit(job)
        first = job.admission < 0
        job.admit(kv, next(self._admissions), self.engine.accounting.snapshot())
        self._reused += kv.length if first else 0
        self._running.append(job)

    def _thin_out(self, busy: Counter[bytes]) -> bool:
        """Have the newest request of the client with most running ones make way; False where none has two.
        Only requests that grow can make way."""
        able = [job for job in self._running if job.grows and busy[job.client] >= 2]
        if not able:
            return False
        most = max(busy[job.client] for job in able)
        self._make_way([job for job in able if busy[job.client] == most][-1])
        return True

    def _admission_room(self, job: Job) -> SequenceKV | None:
        """A sequence with room for the job's tokens and a few more; None where that is not to be had beside
        what those who run may need next."""
        wanted = room_for(len(job.tokens) + 1, job.room) if job.grows else job.room
        soon = sum(min(BLOCK, j.room - j.kv.capacity) for j in self._running if j.grows and j.kv is not None)
        # What is kept of its own conversation is room that it will use, and is counted with the rest.
        if wanted + soon > self.kv.free + self._conversations.tokens:
            return None
        kept = None
        if job.conversation is not None and job.admission < 0:
            kept = self._conversations.take((job.client, job.conversation), job.tokens)
        if kept is None:
            self._conversations.make_room(wanted)
            return self.kv.allocate(wanted)
        self._conversations.make_room(wanted - kept.capacity)
        self.kv.resize(kept, wanted)
        return kept

    def _tell_positions(self) -> None:
        now = time.perf_counter()
        if not self._waiting or now - self._told < TELL_INTERVAL:
            return
        self._told = now
        for position, job in enumerate(self._waiting.in_order(self._running), start=1):
            if not self._congested(job.client):
                job.tell_position(position)

    def _next_prefill(self, ready: list[Job]) -> list[Job]:
        """The one whose chunk is next: of the client whose last chunk is longest ago, the oldest."""
        waiting = [job for job in ready if job.prefilling]
        if not waiting:
            return []
        job = min(waiting, key=lambda j: self._last_turn.get(j.client, -1))
        here = {j.client for j in self._running}
        self._last_turn = {c: turn for c, turn in self._last_turn.items() if c in here}
        self._last_turn[job.client] = next(self._turns)
        return [job]

    def _with_room(self, decoding: list[Job]) -> list[Job]:
        """Those of the jobs that can take a step, each with room for one more token; others made way."""
        for job in decoding:
            while job.kv is not None and job.filled == job.kv.capacity:
                grown = int(job.filled * GROWTH)
                if self._enlarge(job.kv, room_for(grown, job.room)):
                    continue
                if self._enlarge(job.kv, room_for(job.filled + 1, job.room)):
                    continue
                self._make_way([j for j in self._running if j.grows][-1])
        return [job for job in decoding if job.kv is not None]

    def _enlarge(self, kv: SequenceKV, capacity: int) -> bool:
        more = capacity - kv.capacity
        if more > 0:
            if not self._conversations.make_room(more):
                return False
            self.kv.resize(kv, capacity)
        return True

    def _make_way(self, job: Job) -> None:
        self._running.remove(job)
        self.kv.release(job.make_way())
        self._waiting.add(job)
        self._preemptions += 1

    # --- a step ------------------------------------------------------------------------------------------

    def _step(self, jobs: list[Job], phase: Phase) -> None:
        if not jobs:
            return
        started = time.perf_counter()
        # An only request delays nobody's next token, and long chunks are the quicker ones.
        alone = len(self._live) == 1 and jobs[0].grows  # what scores wants every row's logits: long is large
        chunk = self.chunk_alone if alone else self.chunk
        pieces = [job.piece(chunk) for job in jobs]
        try:
            answers = self.engine.step(pieces, phase)
        except ShardFailed as e:
            self._find_the_one(jobs, phase, str(e))
            return
        failed: dict[Job, str] = {}
        for job, logits in zip(jobs, answers, strict=True):
            try:
                job.accept(logits)
            except PipelineError as e:  # its numbers are at fault (not finite, say); the others go on
                failed[job] = str(e)
        seconds = time.perf_counter() - started
        for job, piece in zip(jobs, pieces, strict=True):
            job.book(phase, len(piece.slice.tokens), seconds)
            if job in failed:
                self._end(job, "error", failed[job])
            elif job.reason is not None:
                self._end(job, job.reason)

    def _find_the_one(self, jobs: list[Job], phase: Phase, error: str) -> None:
        """A step of these cannot be computed: the one whose rows are at fault ends, the others go on."""
        if len(jobs) == 1:
            self._end(jobs[0], "error", error)
            return
        for job in jobs:
            self._step([job], phase)

    def _end(self, job: Job, reason: str, error: str = "") -> None:
        del self._live[job.client, job.request]
        policy = self.engine.policy
        stats: dict[str, Any] = {"policy": policy.name, "fidelity": {"exact": policy.exact}}
        if job.admission >= 0:
            stats["engine"] = difference(self.engine.accounting.snapshot(), job.before)
            stats["fidelity"] = fidelity(policy.exact, stats["engine"])
        if job.kv is None:
            self._waiting.remove(job)
        else:
            self._running.remove(job)
            if job.conversation is not None and reason != "error" and job.filled:
                self._conversations.keep((job.client, job.conversation), job.tokens, job.kv)
            else:
                self.kv.release(job.kv)
        job.finish(reason, stats, error)
