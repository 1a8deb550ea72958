"""Makes jobs from clients' messages, whose texts have been encoded: checks a message and creates its sampler.
Has the job of a Score, too. Used by the engine's thread alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from pipeline.arrays import FloatArray
from pipeline.backbone.batch import StepInput
from pipeline.backbone.kv_cache import SequenceKV
from pipeline.errors import PromptTooLong, RequestError
from pipeline.scheduling.jobs import Emit, GenerateJob, Job
from pipeline.text.detokenizer import Detokenizer
from pipeline.text.generation_defaults import MOST_LOGPROBS, validate, validate_shaping
from pipeline.text.grammar import AskMask, Grammar
from pipeline.text.logprobs import log_softmax, top_of_rows
from pipeline.text.sampler import Sampler, TokenChooser
from protocol.messages import Generate, Score, Scores

BLOCK_BYTES = 4 << 20  # log-probabilities of one Scores message


class JobFactory:
    """Makes jobs. A request that can never be served is refused with RequestError, one line."""

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        eos: frozenset[int],
        ask_mask: AskMask,
        *,
        vocabulary: int,
        context: int,
        longest: int,
        seed: int,
        greedy: bool = False,
    ) -> None:
        """`detokenizer`: for the text of answers; `ask_mask`: as of Grammar; `context`: tokens of prompt and
        answer together; `longest`: the model's own limit of those; `seed`: of the first request without one;
        `greedy`: whether the device makes greedy choices."""
        self.context = context
        larger = " or start the engine with a larger --context" if context < longest else ""
        self._remedy = f"shorten it{larger}"
        self._detokenizer = detokenizer
        self._ask_mask = ask_mask
        self._eos = eos
        self._vocabulary = vocabulary
        self._greedy_of = vocabulary if greedy else 0
        self._seeds = itertools.count(seed)

    def make(self, client: bytes, message: Generate | Score, emit: Emit) -> Job:
        """Returns the job of a request. Raises RequestError."""
        if isinstance(message, Generate):
            return self.generate(client, message, emit)
        return self.score(client, message, emit)

    def generate(self, client: bytes, message: Generate, emit: Emit) -> Job:
        """Returns the job of a Generate. Raises RequestError."""
        if message.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, it is {message.max_tokens}")
        validate(message.sampling)
        if message.token_ids is None:
            raise RequestError("give exactly one of prompt, token_ids and messages")
        prompt = list(message.token_ids)
        reserve = max(message.reserve, 1)
        if len(prompt) + reserve > self.context:
            answer = "the answer" if reserve == 1 else f"{reserve} tokens of an answer"
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens, the context is {self.context}, including {answer};"
                f" {self._remedy}",
                len(prompt),
            )
        self._check_prompt(prompt)
        if message.stop and self._detokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model has none")
        limit = min(message.max_tokens, self.context - len(prompt))
        if len(message.resume) > limit:
            raise RequestError(
                f"resume has {len(message.resume)} tokens, the answer can have {limit} at most"
            )
        check_ids(message.resume, self._vocabulary)
        if message.rival != -1:
            check_ids([message.rival], self._vocabulary)
        shaping = message.shaping
        validate_shaping(shaping, message.logprobs)
        check_ids([bias.token for bias in shaping.bias], self._vocabulary)
        if shaping.grammar and (self._detokenizer is None or message.ignore_eos):
            raise RequestError("a grammar needs a tokenizer, and ends the answer: not with ignore_eos")
        grammar = (
            Grammar(client, shaping.grammar, self._vocabulary, self._ask_mask) if shaping.grammar else None
        )
        seed = message.sampling.seed
        seed = next(self._seeds) if seed is None else seed
        return GenerateJob(
            client,
            message,
            prompt,
            emit,
            max_tokens=limit,
            chooser=TokenChooser(
                Sampler(message.sampling, seed, drawn=len(message.resume)),
                shaping,
                prompt=len(prompt),
                logprobs=message.logprobs,
                rival=None if message.rival == -1 else message.rival,
            ),
            grammar=grammar,
            text=(
                None
                if self._detokenizer is None
                else self._detokenizer.stream(message.stop, marks=message.marks)
            ),
            eos=frozenset() if message.ignore_eos else self._eos,
            vocabulary=self._greedy_of,
        )

    def score(self, client: bytes, message: Score, emit: Emit) -> Job:
        """Returns the job of a Score. Raises RequestError."""
        if message.token_ids is None:
            raise RequestError("give exactly one of text and token_ids")
        tokens = list(message.token_ids)
        if len(tokens) > self.context:
            raise RequestError(
                f"the text has {len(tokens)} tokens, the context is {self.context}; {self._remedy}"
            )
        self._check_prompt(tokens)
        if not 1 <= message.prefill <= len(tokens):
            raise RequestError(f"prefill must be in 1..{len(tokens)}, it is {message.prefill}")
        if not 0 <= message.top <= min(MOST_LOGPROBS, self._vocabulary):
            raise RequestError(f"top must be in 0..{MOST_LOGPROBS}, it is {message.top}")
        return ScoreJob(client, message, tokens, emit)

    def _check_prompt(self, tokens: Sequence[int]) -> None:
        check_ids(tokens, self._vocabulary)
        if not tokens:
            raise RequestError("the prompt has no tokens")


def check_ids(tokens: Sequence[int], vocabulary: int) -> None:
    """Raise RequestError for an id outside the vocabulary."""
    wrong = [t for t in tokens if not 0 <= t < vocabulary]
    if wrong:
        raise RequestError(f"token id {wrong[0]} is outside the vocabulary of {vocabulary}")


class ScoreJob(Job):
    """Log-probabilities of given tokens: a prefill, then (stepwise) one token at a time. After a preemption
    the tokens whose rows were sent are prefilled without logits, and the next row is sent next."""

    def __init__(self, client: bytes, message: Score, tokens: list[int], emit: Emit) -> None:
        prefill = message.prefill if message.stepwise else len(tokens)
        super().__init__(client, message.request, tokens, prefill, len(tokens), emit)
        self._full = message.full
        self._top = message.top
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
