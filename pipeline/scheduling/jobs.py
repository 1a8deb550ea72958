"""What is being served: a Generate or a Score with its state, as pieces for the engine's steps.

A job knows its own tokens, its sequence's KV and how to answer its client; when it runs is the scheduler's
business. Used by the engine's thread alone.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipeline.arrays import FloatArray, Phase
from pipeline.backbone.batch import TokenSpan
from pipeline.backbone.kv_cache import SequenceKV
from pipeline.backbone.step_input import StepInput
from pipeline.text.logits import log_softmax, two_best
from pipeline.text.sampler import Sampler
from pipeline.text.text_stream import TextStream
from protocol.messages import Done, Queued, Scores, Token

TELL_AGAIN = 10.0  # seconds after which a position that has not changed is told again, as a sign of life
BLOCK_BYTES = 4 << 20  # log-probabilities of one Scores message
Emit = Callable[[object], None]


class Job(ABC):
    """One request. `kv` is there while it is admitted; `reason` once it has ended."""

    grows = False  # its tokens become more while it runs, and it can make way and come back
    conversation: str | None = None

    def __init__(self, client: bytes, request: int, tokens: list[int], prompt: int, emit: Emit) -> None:
        """`tokens`: all that are known; the first `prompt` of them are prefilled."""
        self.client = client
        self.request = request
        self.tokens = tokens
        self.prompt = prompt
        self.goal = prompt  # KV tokens at which prefilling is over
        self.kv: SequenceKV | None = None
        self.reason: str | None = None
        self.arrival = time.perf_counter()
        self.admission = -1  # a number that grows from one first admission to the next
        self.reused = 0  # tokens of the prompt that an earlier request had computed
        self.preemptions = 0
        self.before: dict[str, Any] = {}  # the engine's counters at the first admission
        self._seconds: dict[Phase, float] = {"prefill": 0.0, "decode": 0.0}
        self._computed: dict[Phase, int] = {"prefill": 0, "decode": 0}
        self._emit = emit
        self._position = 0  # in the queue, as last told
        self._told = 0.0  # when that was
        self._queued = 0.0  # seconds until the first admission
        self._first: float | None = None

    @property
    def prefilling(self) -> bool:
        return self.filled < self.goal

    @property
    def filled(self) -> int:
        """Tokens whose KV is there."""
        return 0 if self.kv is None else self.kv.length

    @property
    @abstractmethod
    def room(self) -> int:
        """Tokens of KV that it may need in the end."""

    @abstractmethod
    def piece(self, chunk: int) -> StepInput:
        """What to run next; at most `chunk` tokens of a prefill."""

    @abstractmethod
    def accept(self, logits: FloatArray) -> None:
        """Take the wanted logits [n, vocabulary] of the piece that was just run; may set `reason`."""

    def admit(self, kv: SequenceKV, number: int, counters: dict[str, Any]) -> None:
        """It begins with what is in `kv`, or goes on after having made way."""
        self.kv = kv
        kv.serve(len(self.tokens))
        if self.admission < 0:
            self.admission, self.before, self.reused = number, counters, kv.length
            self._queued = time.perf_counter() - self.arrival

    def make_way(self) -> SequenceKV:
        """Give up what was computed; all known tokens will be prefilled again, and nothing is told twice."""
        assert self.kv is not None
        kv, self.kv = self.kv, None
        self.goal = len(self.tokens)
        self.preemptions += 1
        self._position = 0
        return kv

    def tell_position(self, position: int) -> None:
        """Tell the client where in the queue it is, unless it was told so a moment ago."""
        now = time.perf_counter()
        if position != self._position or now - self._told > TELL_AGAIN:
            self._position, self._told = position, now
            self._emit(Queued(self.request, position))

    def book(self, phase: Phase, tokens: int, seconds: float) -> None:
        """A step with `tokens` of this job's took so long."""
        self._computed[phase] += tokens
        self._seconds[phase] += seconds

    def finish(self, reason: str, stats: dict[str, Any], error: str = "", text: str = "") -> None:
        """Send the one terminal message; `text` is what was still held back."""
        self.reason = reason
        self._emit(Done(self.request, reason, error, text, {**self._times(), **stats}))

    def _times(self) -> dict[str, Any]:
        prefill, decode = self._seconds["prefill"], self._seconds["decode"]
        prefilled, decoded = self._computed["prefill"], self._computed["decode"]
        return {
            "prompt_tokens": self.prompt,
            "kv_reused_tokens": self.reused,
            "decode_tokens": decoded,
            "queued_s": self._queued,
            "prefill_s": prefill,
            "decode_s": decode,
            "prefill_tok_s": prefilled / prefill if prefill else 0.0,
            "decode_tok_s": decoded / decode if decode else 0.0,
            "first_token_s": 0.0 if self._first is None else self._first - self.arrival,
            "preemptions": self.preemptions,
        }

    def _slice(self, count: int) -> TokenSpan:
        """The next tokens whose KV is missing, at most `count`, and within a prefill none behind its end."""
        assert self.kv is not None
        start = self.kv.length
        end = start + count
        return TokenSpan(self.kv, self.tokens[start : min(end, self.goal) if self.prefilling else end])

    def _answered(self) -> None:
        if self._first is None:
            self._first = time.perf_counter()


class GenerateJob(Job):
    """Samples token after token until a stop string, an end token, or enough of them."""

    grows = True

    def __init__(
        self,
        client: bytes,
        request: int,
        prompt: list[int],
        emit: Emit,
        *,
        resume: Sequence[int],
        max_tokens: int,
        sampler: Sampler,
        text: TextStream | None,
        eos: frozenset[int],
        conversation: str | None,
    ) -> None:
        """`resume`: the answer's first tokens, at most `max_tokens`, which the client has; `sampler` has
        drawn them, `text` is fresh."""
        super().__init__(client, request, [*prompt, *resume], len(prompt), emit)
        self.goal = len(self.tokens)
        self.conversation = conversation
        self._most = len(prompt) + max_tokens
        self._sampler = sampler
        self._text = text
        if text is not None:
            text.resume(resume)
        self._eos = eos
        self._end: dict[str, Any] = {}  # of an end token: what its Token message would say

    @property
    def room(self) -> int:
        return self._most

    def piece(self, chunk: int) -> StepInput:
        new = self._slice(chunk if self.prefilling else 1)
        return StepInput(new, "last" if self.filled + len(new.tokens) == len(self.tokens) else "none")

    def accept(self, logits: FloatArray) -> None:
        if len(logits) == 0:
            return  # a chunk within the prompt
        self._answered()
        self.reason = self._enough()
        if self.reason is not None:  # all of a resumed answer was there already, but for its end
            return
        token = self._sampler.next(logits[0], self.tokens)
        margin, runner_up = two_best(logits[0])
        if token in self._eos:
            self.reason = "stop"
            self._end = {"end": {"token": token, "margin": margin, "runner_up": runner_up}}
            return
        self.tokens.append(token)
        if self.kv is not None and not self.kv.serve(len(self.tokens)):
            self.goal = len(self.tokens)  # all of them are to be prefilled again
        shown = self._text.push(token) if self._text is not None else ""
        self._emit(Token(self.request, len(self.tokens) - self.prompt - 1, token, shown, margin, runner_up))
        self.reason = self._enough()

    def _enough(self) -> str | None:
        """Why no token follows those that are there; None where one does."""
        if self._text is not None and self._text.stopped:
            return "stop"
        return "length" if len(self.tokens) == self._most else None

    def finish(self, reason: str, stats: dict[str, Any], error: str = "", text: str = "") -> None:
        if self._text is not None:
            text = self._text.finish()
            if reason == "length" and self._text.stopped:
                reason = "stop"  # the text held back completed a stop string
        super().finish(reason, stats | self._end, error, text)


class ScoreJob(Job):
    """Log-probabilities of given tokens: a prefill, then (stepwise) one token at a time."""

    def __init__(
        self, client: bytes, request: int, tokens: list[int], emit: Emit, *, prefill: int, full: bool
    ) -> None:
        super().__init__(client, request, tokens, prefill, emit)
        self._full = full

    @property
    def room(self) -> int:
        return len(self.tokens)

    def piece(self, chunk: int) -> StepInput:
        return StepInput(self._slice(chunk if self.prefilling else 1), "all")

    def accept(self, logits: FloatArray) -> None:
        self._answered()
        start = self.filled - len(logits)
        rows = max(1, BLOCK_BYTES // logits[:1].nbytes)
        for first in range(0, len(logits), rows):
            self._send_block(start + first, log_softmax(logits[first : first + rows]))
        if self.filled == len(self.tokens):
            self.reason = "stop"

    def _send_block(self, start: int, logprobs: FloatArray) -> None:
        end = start + len(logprobs)
        following = np.array(self.tokens[start + 1 : end + 1], np.int64)
        chosen = logprobs[np.arange(len(following)), following]
        tokens = np.array(self.tokens[start:end], np.int32)
        full = logprobs if self._full else np.empty((0, 0), np.float32)
        self._emit(Scores(self.request, start, tokens, chosen, full))
