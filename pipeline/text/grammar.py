"""Grammars that an answer must follow, as masks of the tokens that may come next (llguidance).

A grammar is compiled, and each mask is made, in a thread of its own, which holds the interpreter's lock for
next to none of that time: a mask is made while the engine computes the step it is for. Compiling may take as
long as a second, and a request waits for that without holding up others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import PipelineError, RequestError
from pipeline.text.tokenizer import Tokenizer

LIMITS = {  # of llguidance, each for one grammar or one token: a tenth of its own, ample for real schemas
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_grammar_size": 200_000,
}
MASK_SECONDS = 20.0  # for a mask or a compilation; the limits above end either much earlier
SLOW_SECONDS = 0.01  # a request whose masks take longer is left out of steps until its mask is made


def limits() -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(**LIMITS)


def check_grammar(grammar: str) -> None:
    """Raises RequestError, one line, for a grammar that cannot be compiled within the limits."""
    if find_spec("llguidance") is None:
        raise RequestError("grammars need the Python package llguidance: pip install '.[serve]'")
    from llguidance import LLMatcher

    try:
        error = LLMatcher.validate_grammar(grammar, None, limits=limits())
    except ValueError as e:
        error = str(e)
    if error and not error.startswith("WARNING"):
        raise RequestError(f"the grammar or schema cannot be used: {' '.join(error.split())[:300]}")


class GrammarCompiler:
    """Of one model. Makes what the compilation needs of the tokenizer at the first grammar."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, ends: Sequence[int]) -> None:
        """`vocabulary`: of the logits; `ends`: tokens that end an answer."""
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = list(ends)
        self._threads: ThreadPoolExecutor | None = None
        self._made: Any = None
        self._lock = threading.Lock()

    def start(self, grammar: str, resume: Sequence[int]) -> Grammar:
        """A grammar whose text is `check_grammar`ed, behind the answer's first tokens. Returns at once."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "grammar")
        return Grammar(self._threads, self._vocabulary, lambda: self._compile(grammar, resume))

    def _compile(self, grammar: str, resume: Sequence[int]) -> Any:
        from llguidance import LLMatcher

        with self._lock:
            if self._made is None:
                self._made = self._tokenizer.for_grammars(self._vocabulary, self._ends)
        matcher = LLMatcher(self._made, grammar, log_level=0, limits=limits())
        if resume and not matcher.is_error():
            matcher.consume_tokens(list(resume))
        return matcher


class Grammar:
    """One answer's. Used by the engine's thread, which calls `allowed` and `accept` in turns."""

    def __init__(self, threads: ThreadPoolExecutor, vocabulary: int, compile_: Any) -> None:
        self._threads = threads
        self._vocabulary = vocabulary
        self._bits = np.zeros(-(-vocabulary // 32), np.int32)
        self._matcher: Any = None
        self._slow = True  # the compilation may be
        self._pending: Future[bool] = threads.submit(self._first, compile_)

    @property
    def ready(self) -> bool:
        """Whether the next mask is made, or will be within a step."""
        return not self._slow or self._pending.done()

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens [vocabulary] may come next. Raises PipelineError where none may, or at a limit."""
        self._wait()
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._vocabulary]
        return bits.astype(bool)

    def accept(self, token: int) -> bool:
        """Go on behind this token. True where the answer is complete: nothing may follow."""
        self._matcher.consume_token(token)
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return True
        self._pending = self._threads.submit(self._next)
        return False

    def _wait(self) -> None:
        try:
            some = self._pending.result(MASK_SECONDS)
        except TimeoutError:
            raise PipelineError("the grammar is too slow; simplify it") from None
        if self._matcher.is_error():
            reason = " ".join(self._matcher.get_error().split())[:200]
            raise PipelineError(f"the grammar cannot be followed further: {reason}")
        if not some:
            raise PipelineError("the grammar allows no token here")

    def _first(self, compile_: Any) -> bool:
        self._matcher = compile_()
        return self._next()

    def _next(self) -> bool:
        from llguidance.numpy import fill_next_token_bitmask

        began = time.perf_counter()
        if self._matcher.is_error():
            return False
        fill_next_token_bitmask(self._matcher, self._bits[np.newaxis], 0)
        self._slow = time.perf_counter() - began > SLOW_SECONDS
        return bool(self._bits.any())
