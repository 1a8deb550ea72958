"""A request that is being served: a Generate with its state, as inputs for the engine's steps, and what a
Score (job_factory.py) has in common with it. The scheduler decides when it runs. Used by the engine's thread
alone."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from pipeline.arrays import FloatArray, Phase
from pipeline.backbone.batch import StepInput, TokenSpan
from pipeline.backbone.kv_cache import SequenceKV
from pipeline.fairness import ID_BYTES
from pipeline.scheduling.drafts import Guesses
from pipeline.scheduling.prefix_tree import Tokens
from pipeline.text.detokenizer import TextStream
from pipeline.text.grammar import Grammar
from pipeline.text.logprobs import Greedy
from pipeline.text.sampler import Choice, TokenChooser
from protocol.messages import Done, Generate, Queued, Token

NO_KEY = 0
JOB_BYTES = 4096  # of a request beside its tokens
Emit = Callable[[object], None]


class Job(ABC):
    """One request. `kv` is set while it is admitted, `reason` once it has ended."""

    grows = False  # the job adds tokens while it runs
    counted = True  # as of a StepInput
    shares = False  # its KV is shared with other requests, and kept when it ends

    def __init__(
        self, client: bytes, request: int, tokens: list[int], prompt: int, max_kv_tokens: int, emit: Emit
    ) -> None:
        """`tokens`: prompt and answer so far; the first `prompt` of them are prefilled."""
        self.client = client
        self.request = request
        self.tokens = tokens
        self.size = JOB_BYTES + ID_BYTES * len(tokens)  # of memory, about
        self.prompt_length = prompt
        self.max_kv_tokens = max_kv_tokens  # the most that the job can need
        self.prefill_end = prompt  # KV tokens at which prefilling is over
        self.kv: SequenceKV | None = None
        self.key = NO_KEY  # of the same request in other engines
        self.alone_steps = 0  # so many times it is decoded alone, because it may have crashed an engine
        self.sequence: int | None = None  # the id of its KV, or of the KV that it had until it was preempted
        self.reason: str | None = None
        self.arrival = time.perf_counter()
        self.admission = -1  # the number of its first admission, in the order of first admissions
        self.reused = 0  # prompt tokens with KV from an earlier request
        self.stops: set[int] = set()  # KV tokens at which a prefill chunk ends, for a snapshot
        self.published = 0  # blocks that others could begin with, when that was last told
        self.guesses: list[int] = []  # of the tokens behind the next one, for its step
        self.guesser = Guesses((), 0, None)  # that guesses nothing
        self.guessed = self.accepted = 0  # guesses that were computed, and those that came true
        self.awaited: tuple[Job, int] | None = None  # whose prefill this one waits for, up to so many tokens
        self.preemptions = 0
        self.counters_before: dict[str, Any] = {}  # the engine's, at the first admission
        self._seconds: dict[Phase, float] = {"prefill": 0.0, "decode": 0.0}
        self._computed: dict[Phase, int] = {"prefill": 0, "decode": 0}
        self._emit = emit
        self._position = 0  # in the queue, as last reported
        self._queued = 0.0  # seconds until the first admission
        self._first_answer: float | None = None
        self._ids: Tokens = np.empty(0, np.int32)

    @property
    def ids(self) -> Tokens:
        """The tokens so far as an array."""
        if len(self._ids) < len(self.tokens):
            self._ids = np.array(self.tokens, np.int32)
        return self._ids

    @property
    def ready(self) -> bool:
        """False while the next step would have to wait for what this job needs."""
        return True

    @property
    def prefilling(self) -> bool:
        return self.filled < self.prefill_end

    @property
    def filled(self) -> int:
        """Tokens with computed KV."""
        return 0 if self.kv is None else self.kv.length

    @abstractmethod
    def step_input(self, chunk: int) -> StepInput:
        """Returns the tokens to run next; at most `chunk` of them while prefilling."""

    @abstractmethod
    def take_logits(self, logits: FloatArray) -> None:
        """Take the last `step_input`'s logits [n, vocabulary] or choice; may set `reason`. Raises
        PipelineError."""

    def resume(self) -> None:  # noqa: B027 - most never wait
        """Go on where the last step left something to wait for; may set `reason`. Raises PipelineError."""

    def admit(self, kv: SequenceKV, number: int, counters: dict[str, Any]) -> None:
        """Begin, or continue after a preemption. `number`: of this admission; `counters`: the engine's."""
        self.kv, self.sequence = kv, kv.id
        kv.select_rope(len(self.tokens))
        if self.admission < 0:
            self.admission, self.counters_before = number, counters
            self.reused = min(kv.length, self.prompt_length)
            self._queued = time.perf_counter() - self.arrival

    def preempt(self) -> SequenceKV:
        """Give up the sequence: its tokens are prefilled again at the next admission, and none sent twice."""
        assert self.kv is not None
        kv, self.kv = self.kv, None
        self.prefill_end = len(self.tokens)
        self.preemptions += 1
        self._position = 0
        return kv

    def report_position(self, position: int) -> None:
        """Send the client its position in the queue, where it has changed."""
        if position != self._position:
            self._position = position
            self._emit(Queued(self.request, position))

    def count_step(self, phase: Phase, tokens: int, seconds: float) -> None:
        """Count a step of `seconds` with `tokens` tokens of this job."""
        self._computed[phase] += tokens
        self._seconds[phase] += seconds

    def finish(self, reason: str, stats: dict[str, Any], error: str = "", text: str = "") -> None:
        """Send the one terminal message; `text` was held back until now."""
        self.reason = reason
        prefill, decode = self._seconds["prefill"], self._seconds["decode"]
        prefilled, decoded = self._computed["prefill"], self._computed["decode"]
        times = {
            "prompt_tokens": self.prompt_length,
            "kv_reused_tokens": self.reused,
            "decode_tokens": decoded,
            "guessed_tokens": self.guessed,
            "accepted_tokens": self.accepted,
            "queued_s": self._queued,
            "prefill_s": prefill,
            "decode_s": decode,
            "prefill_tok_s": prefilled / prefill if prefill else 0.0,
            "decode_tok_s": decoded / decode if decode else 0.0,
            "first_token_s": 0.0 if self._first_answer is None else self._first_answer - self.arrival,
            "preemptions": self.preemptions,
        }
        self._emit(Done(self.request, reason, error, text, {**times, **stats}))

    def _next_tokens(self, chunk: int) -> TokenSpan:
        """Returns the next tokens without KV: at most `chunk` while prefilling, else one and the guesses."""
        assert self.kv is not None
        start = self.kv.length
        stops = (stop for stop in self.stops if stop > start)
        if not self.prefilling:
            return TokenSpan(self.kv, [self.tokens[start], *self.guesses], len(self.guesses))
        return TokenSpan(self.kv, self.tokens[start : min(start + chunk, self.prefill_end, *stops)])

    def _note_answer(self) -> None:
        if self._first_answer is None:
            self._first_answer = time.perf_counter()


class GenerateJob(Job):
    """Samples tokens until a stop string, an end token, or the limit."""

    grows = True

    def __init__(
        self,
        client: bytes,
        message: Generate,
        prompt: list[int],
        emit: Emit,
        *,
        max_tokens: int,
        chooser: TokenChooser,
        grammar: Grammar | None,
        text: TextStream | None,
        eos: frozenset[int],
        vocabulary: int = 0,
    ) -> None:
        """`chooser`: has drawn the tokens that the message resumes with. `vocabulary`: its size where the
        device makes greedy choices, else 0."""
        tokens = [*prompt, *message.resume]
        super().__init__(client, message.request, tokens, len(prompt), len(prompt) + max_tokens, emit)
        self.prefill_end = len(tokens)
        self.counted = message.counted
        self.shares = message.reuse
        self._chooser = chooser
        self._grammar = grammar
        greedy = vocabulary and chooser.greedy and grammar is None
        self._wanted: Literal["last", "greedy"] = "greedy" if greedy else "last"
        self._vocabulary = vocabulary
        self._text = text
        if text is not None:
            text.resume(message.resume)
        self._eos = eos
        self._rows: list[FloatArray] = []  # logits of the next tokens, while a mask is missing
        self.guesser = Guesses(tokens, self.max_kv_tokens, grammar)
        self._end: dict[str, Any] = {}  # content for the missing Token message of an end token

    @property
    def ready(self) -> bool:
        return not self._rows

    def admit(self, kv: SequenceKV, number: int, counters: dict[str, Any]) -> None:
        super().admit(kv, number, counters)
        if self._grammar is not None:
            self._grammar.begin(self.tokens, self.prompt_length)

    def preempt(self) -> SequenceKV:
        if self._grammar is not None:
            self._grammar.end()
        self._rows, self.guesses = [], []  # the tokens are prefilled again, to the same ones
        return super().preempt()

    def step_input(self, chunk: int) -> StepInput:
        new = self._next_tokens(chunk)
        known = self.filled + len(new.tokens) - new.drafted
        wanted = self._wanted if known == len(self.tokens) else "none"
        return StepInput(new, wanted, self.counted)

    def take_logits(self, logits: FloatArray) -> None:
        if len(logits) == 0:
            return  # the prompt has more chunks
        self._note_answer()
        self._rows = list(logits)
        self.guessed += len(logits) - 1
        self.resume()
        self._rows = [row.copy() for row in self._rows]  # the engine's next step overwrites its own

    def resume(self) -> None:
        while self.reason is None and (self._rows or self._complete):
            self.reason = self._end_reason()  # a resumed answer may lack only its Done
            waits = self._grammar is not None and not self._grammar.ready
            if self.reason is not None or waits:
                break
            self._take_next()
        if self.reason is None:
            self.guesser.look()

    def _take_next(self) -> None:
        """Choose the next token from its row; where it is the one that was guessed, another row follows."""
        logits, length, kv = self._rows.pop(0), len(self.tokens), self.kv
        self._choose(logits)
        if not self._rows:
            return
        guessed = self.guesses.pop(0)
        if self.tokens[length:] == [guessed] and kv is not None and kv.length == length:
            kv.advance(1)
            self.accepted += 1
            self._computed["decode"] += 1
        else:
            self._rows = []

    def _choose(self, logits: FloatArray) -> None:
        """Choose the next token, and send it."""
        choice: Choice | Greedy
        if self._wanted == "greedy":
            choice = Greedy.read(logits, self._vocabulary)
        else:
            allowed = None if self._grammar is None else self._grammar.allowed()
            choice = self._chooser.next(logits, self.tokens, allowed)
        token = choice.token
        if token in self._eos:
            self.reason = "stop"
            self._end = {"end": {"token": token, "margin": choice.margin, "runner_up": choice.runner_up}}
            return
        self.tokens.append(token)
        if self._grammar is not None:
            self._grammar.advance()
        if self.kv is not None and not self.kv.select_rope(len(self.tokens)):
            self.prefill_end = len(self.tokens)  # their KV was dropped: prefill them again
        shown = self._text.push(token) if self._text is not None else ""
        index = len(self.tokens) - self.prompt_length - 1
        self._emit(Token(self.request, index, text=shown, **choice._asdict()))
        self.reason = self._end_reason()

    @property
    def _complete(self) -> bool:
        """Returns whether it is known that nothing may follow in the grammar."""
        return self._grammar is not None and self._grammar.complete

    def _end_reason(self) -> str | None:
        """Returns the reason why the answer ends here; None where more tokens follow."""
        if self._text is not None and self._text.stopped:
            return "stop"
        if len(self.tokens) == self.max_kv_tokens:  # what its grammar allows then need not be known
            return "length"
        return "stop" if self._complete else None

    def finish(self, reason: str, stats: dict[str, Any], error: str = "", text: str = "") -> None:
        if self._grammar is not None:
            self._grammar.end()
        if self._text is not None:
            text = self._text.finish()
            if reason == "length" and self._text.stopped:
                reason = "stop"  # the text held back completed a stop string
            if self._text.stopped:
                self._end = {"stop": self._text.matched}
        super().finish(reason, stats | self._end, error, text)
