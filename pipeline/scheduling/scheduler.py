"""The scheduler: decides which requests run in each step, by continuous batching with chunked prefill.

One round is a prefill chunk of one request that is still prefilling (clients take turns), then one decode
step of all other running requests, perhaps with guesses of their next tokens (`Speculation`). After a chunk
its client's next one waits until others' decode steps have taken as long: so a prompt without end leaves them
half of their speed at least. A request is admitted when its prompt and a few more tokens fit the KV cache;
the others wait in the `WaitingQueue`. A sequence grows while it is decoded.
A request begins with the longest prefix of its prompt that is computed (`PrefixCache`), and waits for another
one that is computing more of it. When the cache is full, what no request uses is evicted first; then the
request that was admitted last is preempted: it waits again, its tokens are prefilled again, and it continues
where it was. Requests whose clients do not read pause; they are preempted first, and admitted last. Every
request ends with exactly one Done. Used by the engine's thread alone."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from pipeline.arrays import FloatArray, Phase
from pipeline.backbone.batch import StepInput
from pipeline.backbone.kv_cache import KVCache
from pipeline.config import KV_BLOCK, SpeculateName
from pipeline.counters import difference, fidelity
from pipeline.engine.drafter import Drafter
from pipeline.engine.engine import Engine
from pipeline.errors import DOUBTFUL, NumberInUse, OutOfDeviceMemory, PipelineError, RequestError, StepFailed
from pipeline.fairness import Debts, Held, Turns
from pipeline.scheduling.job_factory import JobFactory
from pipeline.scheduling.jobs import Job
from pipeline.scheduling.prefix_cache import PrefixCache
from pipeline.scheduling.speculation import Speculation
from pipeline.scheduling.suspects import Suspects
from pipeline.scheduling.waiting_queue import WaitingQueue, to_preempt
from protocol.messages import Generate, Score, Waiting

Send = Callable[[list[tuple[bytes, object]]], None]  # messages and their clients


class Scheduler:
    """The requests of all clients."""

    def __init__(
        self,
        engine: Engine,
        kv: KVCache,
        jobs: JobFactory,
        *,
        max_sequences: int,
        chunk: int,
        send: Send,
        congested: Callable[[bytes], bool],
        suspects: Suspects,
        speculate: SpeculateName | int = "off",
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`chunk`: prefill tokens of a step. `send` delivers messages to clients, those of a step
        together; while a client is `congested`, because it does not read its messages, its requests pause.
        `speculate`, `drafter`: as of Speculation; `clock`: in seconds, by which prefill chunks and others'
        decode steps share the time."""
        self.engine = engine
        self.kv = kv
        self.chunk = self.chunk_alone = chunk
        self._jobs = jobs
        self._max_sequences = max_sequences
        self._send = send
        self._step_answers: list[tuple[bytes, object]] | None = None  # during a step's end
        self._congested = congested
        self._suspects = suspects
        self.speculation = Speculation(engine, kv, speculate, drafter)
        self._waiting = WaitingQueue()
        self._running: list[Job] = []  # in the order of their latest admission
        self._live: dict[tuple[bytes, int], Job] = {}  # waiting and running, by client and request
        self.prefixes = PrefixCache(kv)
        self._admissions = itertools.count()
        self._prefill_turns = Turns()
        self._debts = Debts(clock)  # for prefill chunks, paid by others' decode steps
        self._held = Held()  # by waiting and running requests
        self._preemptions = 0
        self._ended = 0  # requests

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    def enqueue(self, client: bytes, message: Generate | Score) -> None:
        """Queue a request. Raises RequestError, one line, for one that can never be served, or not now."""
        if (client, message.request) in self._live:
            raise NumberInUse(f"request {message.request} is already being served")
        job = self._jobs.make(client, message, functools.partial(self._answer, client))
        if not self._held.take(client, job.size):
            raise RequestError("too many requests are already queued; try again later")
        self._suspects.add(job, message)
        job.shares &= self.engine.backbone.chunks  # what goes on behind a prefix is a chunk
        self._live[client, message.request] = job
        self._waiting.add(job)

    def cancel(self, client: bytes, request: int) -> None:
        """End a client's request."""
        if (job := self._live.get((client, request))) is not None:
            self._end(job, "cancelled")

    def forget(self, client: bytes) -> None:
        """End the requests of a client that has disconnected, and what is kept of them."""
        for job in list(self._live.values()):
            if job.client == client:
                self._end(job, "cancelled")
        self.prefixes.forget(client)
        self._debts.forget(client)

    def cancel_all(self) -> None:
        """End every request as cancelled: the engine shuts down."""
        for job in list(self._live.values()):
            self._end(job, "cancelled")

    def tell_waiting(self, why: str) -> None:
        """Tell the clients of all requests what the present step waits for; "": it goes on."""
        self._send([(client, Waiting(request, why)) for client, request in self._live])

    def round(self) -> bool:
        """Admit, run a prefill chunk and a decode step. False where all requests wait for their clients."""
        self.prefixes.follow(self.engine.policy, self._running)
        self._admit()
        self._waiting.report(self._running, self._congested)
        for job in list(self._running):
            self._resume(job)
        ready = [job for job in self._running if job.ready and not self._congested(job.client)]
        for job in self._with_capacity(self._next_prefill(ready)):
            with self._suspects.computing([job]), self._debts.owing(job.client):
                self._step([job], "prefill")
        decoding = [job for job in ready if job.ready and not job.prefilling and job.reason is None]
        for jobs in self._suspects.apart(self._with_capacity(decoding)):
            with self._suspects.computing(jobs):  # perhaps by a layer that drafts, too
                self._guess(jobs)
                with self._debts.paying({job.client for job in jobs}):
                    self._step(jobs, "decode")
        return bool(ready)

    def _next_prefill(self, ready: list[Job]) -> list[Job]:
        """Returns the job to prefill next, if any: the first one of the client whose turn it is."""
        decoding = {job.client for job in ready if not job.prefilling}
        first: dict[bytes, Job] = {}
        for job in ready:
            if job.prefilling and self._debts.may(job.client, decoding):
                first.setdefault(job.client, job)
        return [first[self._prefill_turns.next(first)]] if first else []

    def stats(self) -> dict[str, Any]:
        return {
            "waiting": len(self._waiting),
            "running": len(self._running),
            "max_running": self._max_sequences,
            **self.prefixes.stats(),
            "preemptions": self._preemptions,
            "ended": self._ended,
            "prefill_chunk": self.chunk,
            "prefill_chunk_alone": self.chunk_alone,
            "context": self._jobs.context,
        }

    # --- admission and capacity --------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit in the queue's order. A client with many requests does not block others: one slot is reserved
        for clients without a running request, and where that slot or the capacity is taken, a request of the
        client with most is preempted. For a request that can run, paused ones are preempted before. Those
        that wait for another one's prefill are left out."""
        paused = functools.cache(self._congested)  # one answer for the whole loop, so that it ends
        while (job := self._waiting.next(self._running, self.prefixes.awaits, paused)) is not None:
            running = {j.client for j in self._running}
            slots = self._max_sequences + (job.client not in running)
            try:
                kv = self.prefixes.begin(job, self._running) if len(self._running) < slots else None
            except OutOfDeviceMemory as e:
                self._end(job, "error", e)
                continue
            if kv is not None:
                self._waiting.admit(job)
                job.admit(kv, next(self._admissions), self.engine.counters.snapshot())
                self._running.append(job)
            elif paused(job.client):
                return
            elif held := [j for j in self._running if paused(j.client)]:
                self._preempt(held[-1])
            elif job.client in running or (heavy := to_preempt(self._running)) is None:
                return
            else:
                self._preempt(heavy)

    def _with_capacity(self, jobs: list[Job]) -> list[Job]:
        """Give each sequence room for the next tokens, preempting others if needed. Returns those that can
        step."""
        for job in jobs:
            wanted = job.prefill_end if job.prefilling else job.filled + 1
            while job.kv is not None and not self.prefixes.grow(job.kv, wanted):
                paused = [j for j in self._running if self._congested(j.client) and j not in jobs]
                self._preempt((paused or [j for j in self._running if j.grows])[-1])
        return [job for job in jobs if job.kv is not None]

    def _guess(self, jobs: list[Job]) -> None:
        """Let the speculation guess next tokens, where there is room for them without a preemption."""
        self.speculation.plan(jobs)
        for job in jobs:
            if job.guesses and job.kv is not None:
                room = self.prefixes.grow(job.kv, job.filled + 1 + len(job.guesses))
                job.guesses = job.guesses if room else []

    def _preempt(self, job: Job) -> None:
        self._running.remove(job)
        self.speculation.forget(job)
        self.prefixes.end(job, job.preempt())
        self._waiting.add(job)
        self._preemptions += 1

    def _resume(self, job: Job) -> None:
        """Let a job go on, or end, that the last step has left waiting."""
        try:
            job.resume()
        except PipelineError as e:
            self._end(job, "error", e)
            return
        if job.reason is not None:
            self._end(job, job.reason)

    # --- steps -------------------------------------------------------------------------------------------

    def _step(self, jobs: list[Job], phase: Phase) -> None:
        """Run the next tokens of these jobs through the engine, and give each its logits."""
        if len(jobs) > 1 and not self.engine.backbone.several:
            self._step_each(jobs, phase)
            return
        started = time.perf_counter()
        # A request that is alone delays no other's next token, and long chunks are faster. Score wants every
        # row's logits, which are large for a long chunk.
        alone = len(self._live) == 1 and jobs[0].grows
        inputs = [job.step_input(self.chunk_alone if alone else self.chunk) for job in jobs]
        try:
            # a preempted request is live too: it will go on
            live = [job.sequence for job in self._live.values() if job.sequence is not None]
            logits = self.engine.step(inputs, phase, live)
        except StepFailed as e:
            if e.begins_again:
                return
            if len(jobs) == 1 and not jobs[0].guesses:
                self._end(jobs[0], "error", e)
            else:  # so that only the job that causes the failure ends, and none for a guess
                for job in jobs:
                    job.guesses = []
                self._step_each(jobs, phase)
            return
        answers: list[tuple[bytes, object]] = []
        self._step_answers = answers
        try:
            self._end_step(jobs, inputs, logits, phase, started)
        finally:
            self._step_answers = None
            if answers:
                self._send(answers)

    def _step_each(self, jobs: list[Job], phase: Phase) -> None:
        """Run each job by itself."""
        for job in jobs:
            with self._suspects.computing([job]):
                self._step([job], phase)

    def _end_step(
        self, jobs: list[Job], inputs: list[StepInput], logits: list[FloatArray], phase: Phase, started: float
    ) -> None:
        """Give the jobs of a step its logits, and end those that are complete or have failed."""
        failed: dict[Job, PipelineError] = {}
        before = [(job.accepted, job.filled) for job in jobs]
        for job in jobs:
            if phase == "prefill" or job.filled // KV_BLOCK != job.published:
                self.prefixes.publish(job)
        for job, rows in zip(jobs, logits, strict=True):
            try:
                job.take_logits(rows)
            except PipelineError as e:  # for example, this job's logits are not finite; the others continue
                failed[job] = e
        seconds = time.perf_counter() - started
        accepted = [job.accepted - then for job, (then, _) in zip(jobs, before, strict=True)]
        if (hidden := self.engine.hidden) is not None:
            self._keep(hidden, jobs, inputs, [filled for _, filled in before])
        if phase == "decode":
            self.speculation.note(jobs, [item.span.drafted for item in inputs], accepted, seconds)
            seconds += self.speculation.drafting
        for job, step_input in zip(jobs, inputs, strict=True):
            span = step_input.span
            job.count_step(phase, len(span.tokens) - span.drafted, seconds)
            self._suspects.count_step(job)
            if job in failed:
                self._end(job, "error", failed[job])
            elif job.reason is not None:
                self._end(job, job.reason)

    def _keep(self, hidden: Tensor, jobs: list[Job], inputs: list[StepInput], certain: list[int]) -> None:
        """Have the speculation keep the step's hidden states. `certain`: tokens that each job had before
        guesses came true."""
        row = 0
        for job, item, filled in zip(jobs, inputs, certain, strict=True):
            rows, drafted = len(item.span.tokens), item.span.drafted
            first = filled - (rows - drafted)
            if job.reason is None and job.filled >= filled:
                self.speculation.keep(job, first, hidden[row : row + job.filled - first])
            row += rows

    def _answer(self, client: bytes, message: object) -> None:
        """Send a message, or keep it for the end of the step that is being ended."""
        if self._step_answers is None:
            self._send([(client, message)])
        else:
            self._step_answers.append((client, message))

    def _end(self, job: Job, reason: str, error: PipelineError | None = None) -> None:
        """Remove a job and send its Done. Its KV is kept, unless a failure made it doubtful."""
        del self._live[job.client, job.request]
        self.speculation.forget(job)
        self._held.give_back(job.client, job.size)
        engine, policy = self.engine, self.engine.policy
        stats: dict[str, Any] = {"policy": policy.name, "fidelity": {"exact": engine.exact}}
        if job.admission >= 0:
            counted = difference(engine.counters.snapshot(), job.counters_before)
            stats |= {"engine": counted, "fidelity": fidelity(policy.exact, counted, engine.kv_cache)}
        if job.kv is None:
            self._waiting.remove(job)
        else:
            self._running.remove(job)
            self.prefixes.end(job, job.kv, doubtful=isinstance(error, DOUBTFUL))
        self._ended += job.counted
        job.finish(reason, stats, "" if error is None else str(error))
