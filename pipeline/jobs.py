"""Requests in service: what each feeds to the engine next, and what it makes of the logits.

A job knows its tokens, its sequence's KV and how to answer its client; when it runs is the scheduler's
business. Used by the engine's thread alone.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from pipeline.engine import Piece
from pipeline.kv_cache import SequenceKV
from pipeline.models.backbone import Slice
from pipeline.policies.view import FloatArray, Phase
from pipeline.sampler import Sampler
from pipeline.text_stream import TextStream
from protocol.messages import Done, Scores, Token

BLOCK_BYTES = 4 << 20  # log-probabilities of one Scores message
Emit = Callable[[object], None]


class Job(ABC):
    """One admitted request. `kv` is set at admission; `reason` once it has ended."""

    kv: SequenceKV

    def __init__(self, client: bytes, request: int, prompt: list[int], room: int, emit: Emit) -> None:
        """`prompt`: the tokens to prefill; `room`: tokens of KV it may need."""
        self.client = client
        self.request = request
        self.prompt = prompt
        self.room = room
        self.reason: str | None = None
        self.seconds: dict[Phase, float] = {"prefill": 0.0, "decode": 0.0}
        self.before: dict[str, Any] = {}  # the engine's counters at admission
        self._emit = emit
        self._arrived = time.perf_counter()
        self._first: float | None = None

    @property
    def prefilling(self) -> bool:
        return self.kv.length < len(self.prompt)

    @abstractmethod
    def piece(self, chunk: int) -> Piece:
        """What to run next; at most `chunk` tokens of the prompt."""

    @abstractmethod
    def accept(self, logits: FloatArray) -> None:
        """Take the wanted logits [n, vocabulary] of the piece that was just run; may set `reason`."""

    def finish(self, reason: str, stats: dict[str, Any], error: str = "", text: str = "") -> None:
        """Send the one terminal message; `text` is what was still held back."""
        self.reason = reason
        self._emit(Done(self.request, reason, error, text, {**self._times(), **stats}))

    def _times(self) -> dict[str, Any]:
        fed = self.kv.length if hasattr(self, "kv") else 0
        prefilled = min(fed, len(self.prompt))
        prefill, decode = self.seconds["prefill"], self.seconds["decode"]
        return {
            "prompt_tokens": len(self.prompt),
            "decode_tokens": fed - prefilled,
            "prefill_s": prefill,
            "decode_s": decode,
            "prefill_tok_s": prefilled / prefill if prefill else 0.0,
            "decode_tok_s": (fed - prefilled) / decode if decode else 0.0,
            "first_token_s": 0.0 if self._first is None else self._first - self._arrived,
        }

    def _prompt_piece(self, chunk: int) -> list[int]:
        start = self.kv.length
        return self.prompt[start : start + chunk]

    def _answered(self) -> None:
        if self._first is None:
            self._first = time.perf_counter()


class GenerateJob(Job):
    """Samples token after token until a stop string, an end token, or enough of them."""

    def __init__(
        self,
        client: bytes,
        request: int,
        prompt: list[int],
        emit: Emit,
        *,
        max_tokens: int,
        sampler: Sampler,
        text: TextStream | None,
        eos: frozenset[int],
    ) -> None:
        super().__init__(client, request, prompt, len(prompt) + max_tokens, emit)
        self._max_tokens = max_tokens
        self._sampler = sampler
        self._text = text
        self._eos = eos
        self._new: list[int] = []

    def piece(self, chunk: int) -> Piece:
        if not self.prefilling:
            return Piece(Slice(self.kv, self._new[-1:]), "last")
        tokens = self._prompt_piece(chunk)
        ends = self.kv.length + len(tokens) == len(self.prompt)
        return Piece(Slice(self.kv, tokens), "last" if ends else "none")

    def accept(self, logits: FloatArray) -> None:
        if len(logits) == 0:
            return  # a chunk within the prompt
        self._answered()
        token = self._sampler.next(logits[0], self.prompt + self._new)
        if token in self._eos:
            self.reason = "stop"
            return
        self._new.append(token)
        shown = self._text.push(token) if self._text is not None else ""
        self._emit(Token(self.request, len(self._new) - 1, token, shown))
        if self._text is not None and self._text.stopped:
            self.reason = "stop"
        elif len(self._new) == self._max_tokens:
            self.reason = "length"

    def finish(self, reason: str, stats: dict[str, Any], error: str = "", text: str = "") -> None:
        if self._text is not None:
            text = self._text.finish()
            if reason == "length" and self._text.stopped:
                reason = "stop"  # the text held back completed a stop string
        super().finish(reason, stats, error, text)


class ScoreJob(Job):
    """Log-probabilities of given tokens: a prefill, then (stepwise) one token at a time."""

    def __init__(
        self, client: bytes, request: int, tokens: list[int], emit: Emit, *, prefill: int, full: bool
    ) -> None:
        super().__init__(client, request, tokens[:prefill], len(tokens), emit)
        self._tokens = tokens
        self._full = full

    def piece(self, chunk: int) -> Piece:
        if self.prefilling:
            return Piece(Slice(self.kv, self._prompt_piece(chunk)), "all")
        return Piece(Slice(self.kv, self._tokens[self.kv.length : self.kv.length + 1]), "all")

    def accept(self, logits: FloatArray) -> None:
        self._answered()
        start = self.kv.length - len(logits)
        rows = max(1, BLOCK_BYTES // logits[:1].nbytes)
        for first in range(0, len(logits), rows):
            self._send_block(start + first, log_softmax(logits[first : first + rows]))
        if self.kv.length == len(self._tokens):
            self.reason = "stop"

    def _send_block(self, start: int, logprobs: FloatArray) -> None:
        end = start + len(logprobs)
        following = np.array(self._tokens[start + 1 : end + 1], np.int64)
        chosen = logprobs[np.arange(len(following)), following]
        tokens = np.array(self._tokens[start:end], np.int32)
        full = logprobs if self._full else np.empty((0, 0), np.float32)
        self._emit(Scores(self.request, start, tokens, chosen, full))


def log_softmax(logits: FloatArray) -> FloatArray:
    """Natural-log probabilities float32 [n, vocabulary] of logits of that shape."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    total = np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64))
    logprobs: FloatArray = (shifted - total).astype(np.float32)
    return logprobs
