"""Which requests run in the next step: continuous batching with chunked prefill.

One round is a prefill chunk of the oldest request that has prompt left, then one decode step of all that
are past theirs. A request is admitted when its whole sequence fits the KV cache; the others wait in
order. Every request ends with exactly one Done. Used by the engine's thread alone.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from pipeline.accounting import difference
from pipeline.engine import Engine
from pipeline.errors import PipelineError, RequestError
from pipeline.jobs import GenerateJob, Job, ScoreJob
from pipeline.kv_cache import KVCache
from pipeline.policies.view import Phase
from pipeline.sampler import Sampler, validate
from pipeline.tokenizer import Tokenizer
from protocol.messages import Generate, Score

Send = Callable[[bytes, object], None]


class Scheduler:
    """The requests of all clients."""

    def __init__(
        self,
        engine: Engine,
        kv: KVCache,
        tokenizer: Tokenizer | None,
        eos: frozenset[int],
        *,
        context: int,
        max_sequences: int,
        chunk: int,
        seed: int,
        send: Send,
        congested: Callable[[bytes], bool],
    ) -> None:
        """`send` delivers a message to a client; a client that is `congested` has not taken what it was sent,
        and its requests pause."""
        self.engine = engine
        self.kv = kv
        self.chunk = chunk
        self._tokenizer = tokenizer
        self._eos = eos
        self._context = context
        self._max_sequences = max_sequences
        self._seeds = itertools.count(seed)
        self._send = send
        self._congested = congested
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    def submit(self, client: bytes, message: Generate | Score) -> None:
        """Queue a request. Raises RequestError, one line, for one that can never be served."""
        if any(j.client == client and j.request == message.request for j in self._jobs()):
            raise RequestError(f"request {message.request} is already being served")
        if isinstance(message, Generate):
            self._waiting.append(self._generate_job(client, message))
        else:
            self._waiting.append(self._score_job(client, message))

    def cancel(self, client: bytes, request: int | None = None) -> None:
        """End a client's request, or with None all of them: it is gone."""
        for job in self._jobs():
            if job.client == client and request in (None, job.request):
                self._end(job, "cancelled")

    def cancel_all(self) -> None:
        """The engine shuts down."""
        for job in self._jobs():
            self._end(job, "cancelled")

    def fail_all(self, error: str) -> None:
        """The engine cannot go on: end every request with this text."""
        for job in self._jobs():
            self._end(job, "error", error)

    def round(self) -> bool:
        """Admit what fits; one prefill chunk, one decode step. False where nothing could run: every request
        waits for its client to take what it was sent."""
        while self._waiting and len(self._running) < self._max_sequences:
            job = self._waiting[0]
            if not self.kv.fits(job.room):
                break
            self._waiting.popleft()
            job.kv = self.kv.allocate(job.room)
            job.before = self.engine.accounting.snapshot()
            self._running.append(job)
        ready = [job for job in self._running if not self._congested(job.client)]
        self._step([job for job in ready if job.prefilling][:1], "prefill")
        self._step([job for job in ready if not job.prefilling and job.reason is None], "decode")
        return bool(ready)

    def stats(self) -> dict[str, Any]:
        return {
            "waiting": len(self._waiting),
            "running": len(self._running),
            "kv_tokens_used": self.kv.used,
            "kv_tokens": self.kv.budget,
            "prefill_chunk": self.chunk,
        }

    def _jobs(self) -> list[Job]:
        return [*self._running, *self._waiting]

    def _step(self, jobs: list[Job], phase: Phase) -> None:
        if not jobs:
            return
        started = time.perf_counter()
        answers = self.engine.step([job.piece(self.chunk) for job in jobs], phase)
        failed: dict[Job, str] = {}
        for job, logits in zip(jobs, answers, strict=True):
            try:
                job.accept(logits)
            except PipelineError as e:  # its numbers are at fault (not finite, say); the others go on
                failed[job] = str(e)
        seconds = time.perf_counter() - started
        for job in jobs:
            job.seconds[phase] += seconds
            if job in failed:
                self._end(job, "error", failed[job])
            elif job.reason is not None:
                self._end(job, job.reason)

    def _end(self, job: Job, reason: str, error: str = "") -> None:
        policy = self.engine.policy
        stats: dict[str, Any] = {"policy": policy.name, "fidelity": {"exact": policy.exact}}
        if job in self._running:
            self._running.remove(job)
            self.kv.release(job.kv)
            stats["engine"] = difference(self.engine.accounting.snapshot(), job.before)
        else:
            self._waiting.remove(job)
        job.finish(reason, stats, error)

    def _generate_job(self, client: bytes, message: Generate) -> Job:
        if message.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, it is {message.max_tokens}")
        validate(message.sampling)
        prompt = self._prompt_of(message)
        if len(prompt) >= self._context:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, the context is {self._context} with the answer;"
                " shorten it or start the engine with a larger --context"
            )
        if message.stop and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model has none")
        seed = message.sampling.seed
        return GenerateJob(
            client,
            message.request,
            prompt,
            lambda m: self._send(client, m),
            max_tokens=min(message.max_tokens, self._context - len(prompt)),
            sampler=Sampler(message.sampling, next(self._seeds) if seed is None else seed),
            text=None if self._tokenizer is None else self._tokenizer.stream(message.stop),
            eos=frozenset() if message.ignore_eos else self._eos,
        )

    def _prompt_of(self, message: Generate) -> list[int]:
        given = [message.prompt is not None, message.token_ids is not None, message.messages is not None]
        if sum(given) != 1:
            raise RequestError("give exactly one of prompt, token_ids and messages")
        if message.messages is not None:
            return self._checked(self._need_tokenizer("messages").render_chat(message.messages))
        return self._ids(message.prompt, message.token_ids)

    def _score_job(self, client: bytes, message: Score) -> Job:
        if (message.text is None) == (message.token_ids is None):
            raise RequestError("give exactly one of text and token_ids")
        tokens = self._ids(message.text, message.token_ids)
        if len(tokens) > self._context:
            raise RequestError(
                f"the text has {len(tokens)} tokens, the context is {self._context};"
                " shorten it or start the engine with a larger --context"
            )
        if not 1 <= message.prefill <= len(tokens):
            raise RequestError(f"prefill must be in 1..{len(tokens)}, it is {message.prefill}")
        prefill = message.prefill if message.stepwise else len(tokens)
        return ScoreJob(
            client,
            message.request,
            tokens,
            lambda m: self._send(client, m),
            prefill=prefill,
            full=message.full,
        )

    def _ids(self, text: str | None, given: tuple[int, ...] | None) -> list[int]:
        if given is not None:
            return self._checked(list(given))
        return self._checked(self._need_tokenizer("text").encode(text or ""))

    def _checked(self, tokens: list[int]) -> list[int]:
        size = self.engine.backbone.spec.vocabulary
        wrong = [t for t in tokens if not 0 <= t < size]
        if wrong:
            raise RequestError(f"token id {wrong[0]} is outside the vocabulary of {size}")
        if not tokens:
            raise RequestError("the prompt has no tokens")
        return tokens

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(f"{what} needs a tokenizer, and this model has none; give token ids")
        return self._tokenizer
