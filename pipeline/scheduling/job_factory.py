"""Makes jobs from clients' messages, whose texts have been encoded: checks a message and creates its sampler.
Used by the engine's thread alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pipeline.errors import PromptTooLong, RequestError
from pipeline.scheduling.jobs import Emit, GenerateJob, Job
from pipeline.scheduling.score_job import ScoreJob
from pipeline.text.detokenizer import Detokenizer
from pipeline.text.generation_defaults import MOST_LOGPROBS, validate, validate_shaping
from pipeline.text.grammar import AskMask, Grammar
from pipeline.text.sampler import Sampler, TokenChooser
from protocol.messages import Generate, Score

NAME_LIMIT = 256  # characters of a conversation's name


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

    def generate(self, client: bytes, message: Generate, emit: Emit) -> Job:
        """Raises RequestError."""
        if message.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, it is {message.max_tokens}")
        if message.conversation is not None and len(message.conversation) > NAME_LIMIT:
            raise RequestError(f"a conversation's name has {NAME_LIMIT} characters at most")
        validate(message.sampling)
        if message.token_ids is None:
            raise RequestError("give exactly one of prompt, token_ids and messages")
        prompt = self._checked(message.token_ids)
        reserve = max(message.reserve, 1)
        if len(prompt) + reserve > self.context:
            answer = "the answer" if reserve == 1 else f"{reserve} tokens of an answer"
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens, the context is {self.context}, including {answer};"
                f" {self._remedy}",
                len(prompt),
            )
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
            message.request,
            prompt,
            emit,
            resume=message.resume,
            max_tokens=limit,
            chooser=TokenChooser(
                Sampler(message.sampling, seed, drawn=len(message.resume)),
                shaping,
                prompt=len(prompt),
                grammar=grammar,
                logprobs=message.logprobs,
                rival=None if message.rival == -1 else message.rival,
            ),
            text=None if self._detokenizer is None else self._detokenizer.stream(message.stop),
            eos=frozenset() if message.ignore_eos else self._eos,
            conversation=message.conversation,
            vocabulary=self._greedy_of,
        )

    def score(self, client: bytes, message: Score, emit: Emit) -> Job:
        """Raises RequestError."""
        if message.token_ids is None:
            raise RequestError("give exactly one of text and token_ids")
        tokens = self._checked(message.token_ids)
        if len(tokens) > self.context:
            raise RequestError(
                f"the text has {len(tokens)} tokens, the context is {self.context}; {self._remedy}"
            )
        if not 1 <= message.prefill <= len(tokens):
            raise RequestError(f"prefill must be in 1..{len(tokens)}, it is {message.prefill}")
        if not 0 <= message.top <= min(MOST_LOGPROBS, self._vocabulary):
            raise RequestError(f"top must be in 0..{MOST_LOGPROBS}, it is {message.top}")
        prefill = message.prefill if message.stepwise else len(tokens)
        full, top = message.full, message.top
        return ScoreJob(client, message.request, tokens, emit, prefill=prefill, full=full, top=top)

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        check_ids(tokens, self._vocabulary)
        if not tokens:
            raise RequestError("the prompt has no tokens")
        return list(tokens)


def check_ids(tokens: Sequence[int], vocabulary: int) -> None:
    """Raise RequestError for an id outside the vocabulary."""
    wrong = [t for t in tokens if not 0 <= t < vocabulary]
    if wrong:
        raise RequestError(f"token id {wrong[0]} is outside the vocabulary of {vocabulary}")
