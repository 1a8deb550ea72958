"""Chooses an answer's next token from one row of logits: penalties, biases and a grammar, then the sampler;
and what a client may ask to know about the choice, which is always of the model's own logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipeline.arrays import FloatArray
from pipeline.text.grammar import Grammar
from pipeline.text.logprobs import best_margin, top_logprobs
from pipeline.text.sampler import Sampler
from protocol.messages import Shaping


class Choice(NamedTuple):
    """A token, and the fields of its Token message. All but the token are of the model's own logits."""

    token: int
    margin: float
    runner_up: int
    logprob: float = 0.0
    top_tokens: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class TokenChooser:
    """Chooses one answer's tokens."""

    def __init__(
        self,
        sampler: Sampler,
        shaping: Shaping,
        *,
        prompt: int,
        grammar: Grammar | None = None,
        logprobs: int = -1,
        rival: int | None = None,
    ) -> None:
        """`prompt`: tokens before the answer; `logprobs`, `rival`: as in Generate."""
        self._sampler = sampler
        self._shaping = shaping
        self._grammar = grammar
        self._logprobs = logprobs
        self._rival = rival
        self._prompt = prompt
        self._counted = prompt  # leading ids that are counted, or of the prompt
        self._counts: dict[int, int] = {}  # of the answer's tokens
        self._penalizes = shaping.presence_penalty != 0 or shaping.frequency_penalty != 0
        self._biased = np.array([b.token for b in shaping.bias], np.int64)
        self._biases = np.array([b.bias for b in shaping.bias], np.float32)

    def begin(self, tokens: Sequence[int]) -> None:
        """The request is admitted. `tokens`: prompt and answer, a list that only grows."""
        if self._grammar is not None:
            self._grammar.begin(tokens, self._prompt)

    def end(self) -> None:
        """The request has ended, or is no longer admitted."""
        if self._grammar is not None:
            self._grammar.end()

    @property
    def ready(self) -> bool:
        """Whether `next` has what it needs."""
        return self._grammar is None or self._grammar.ready

    @property
    def complete(self) -> bool:
        """Whether it is known that nothing may follow."""
        return self._grammar is not None and self._grammar.complete

    @property
    def greedy(self) -> bool:
        """Whether each token is the largest logit, and nothing else of the logits is asked for."""
        asks = self._logprobs >= 0 or self._rival is not None or self._grammar is not None
        return self._sampler.greedy and not (asks or self._penalizes or len(self._biased))

    def next(self, logits: FloatArray, tokens: Sequence[int]) -> Choice:
        """The token after `tokens`, prompt and answer, which only grow. Raises PipelineError as the sampler,
        and where the grammar allows none."""
        token = self._sampler.next(self._shaped(logits, tokens), tokens)
        margin, runner_up = best_margin(logits, self._rival)
        if self._logprobs < 0:
            return Choice(token, margin, runner_up)
        logprob, ids, values = top_logprobs(logits, token, self._logprobs)
        return Choice(token, margin, runner_up, logprob, ids, values)

    def accept(self) -> None:
        """The chosen token was added to the tokens."""
        if self._grammar is not None:
            self._grammar.advance()

    def _shaped(self, logits: FloatArray, tokens: Sequence[int]) -> FloatArray:
        if not (self._penalizes or len(self._biased) or self._grammar is not None):
            return logits
        shaped = logits.copy()
        if self._penalizes:
            for token in tokens[self._counted :]:
                self._counts[token] = self._counts.get(token, 0) + 1
            self._counted = len(tokens)
            ids = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
            times = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            shaped[ids] -= self._shaping.presence_penalty + self._shaping.frequency_penalty * times
        if len(self._biased):
            np.add.at(shaped, self._biased, self._biases)
        if self._grammar is not None:
            shaped[~self._grammar.allowed()] = -np.inf
        return shaped
