"""A Score that is being served. Used by the engine's thread alone."""

from __future__ import annotations

import numpy as np

from pipeline.arrays import FloatArray
from pipeline.backbone.batch import StepInput
from pipeline.backbone.kv_cache import SequenceKV
from pipeline.scheduling.jobs import Emit, Job
from pipeline.text.logprobs import log_softmax, top_of_rows
from protocol.messages import Scores

BLOCK_BYTES = 4 << 20  # log-probabilities of one Scores message


class ScoreJob(Job):
    """Log-probabilities of given tokens: a prefill, then (stepwise) one token at a time. After a preemption
    the tokens whose rows were sent are prefilled without logits, and the next row is sent next."""

    def __init__(
        self,
        client: bytes,
        request: int,
        tokens: list[int],
        emit: Emit,
        *,
        prefill: int,
        full: bool,
        top: int = 0,
    ) -> None:
        super().__init__(client, request, tokens, prefill, len(tokens), emit)
        self._full = full
        self._top = top
        self._sent = 0  # rows

    def preempt(self) -> SequenceKV:
        kv = super().preempt()
        self.prefill_end = max(self.prompt_length, self._sent)
        return kv

    def step_input(self, chunk: int) -> StepInput:
        new = self._next_tokens(chunk)
        return StepInput(new, "none" if self.filled + len(new.tokens) <= self._sent else "all")

    def take_logits(self, logits: FloatArray) -> None:
        logits = logits[max(0, self._sent - (self.filled - len(logits))) :]
        if len(logits) == 0:
            return  # all these rows were sent before a preemption
        self._note_answer()
        start = self.filled - len(logits)
        rows = max(1, BLOCK_BYTES // logits[:1].nbytes)
        for first in range(0, len(logits), rows):
            self._send_block(start + first, log_softmax(logits[first : first + rows]))
        self._sent = self.filled
        if self._sent == len(self.tokens):
            self.reason = "stop"

    def _send_block(self, start: int, logprobs: FloatArray) -> None:
        end = start + len(logprobs)
        following = np.array(self.tokens[start + 1 : end + 1], np.int64)
        chosen = logprobs[np.arange(len(following)), following]
        tokens = np.array(self.tokens[start:end], np.int32)
        full = logprobs if self._full else np.empty((0, 0), np.float32)
        self._emit(Scores(self.request, start, tokens, chosen, full, *top_of_rows(logprobs, self._top)))
