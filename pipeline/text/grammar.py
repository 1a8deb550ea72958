"""Grammars that an answer must follow, as masks of the tokens that may come next (llguidance).

They are compiled and followed in the text process (`Grammars`), because one can take long or crash the
library: compiled in a thread with a large stack, and followed in the main thread, so that no answer's next
mask waits for another's compilation. `Grammar` is the engine's side: it asks for a mask behind each token,
and is ready when the mask is there. The engine's thread never waits for one."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import PipelineError, RequestError
from pipeline.text.tokenizer import Tokenizer
from protocol.messages import Allowed, Follow

LIMITS = {  # of llguidance, each for one grammar or one token: a tenth of its own, ample for real schemas
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_grammar_size": 200_000,
}

MOST_REASON = 90  # characters of the library's reason for an error, which is told behind our words
SHOWN = re.compile(r" *\d+ \| ")  # a line of the grammar in it
GRAMMAR_MEMORY = 2 << 30  # bytes that the text process may take with all of them


def limits() -> Any:
    """Return llguidance's form of LIMITS."""
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
        raise RequestError(f"the grammar or schema cannot be used: {_reason(error)}")


def _reason(error: object) -> str:
    """Returns what the library says of an error, in one line without the dump and the grammar behind it."""
    said = str(error).partition("<state>")[0]
    lines = takewhile(lambda line: not SHOWN.match(line), said.splitlines())
    return " ".join(" ".join(lines).split())[:MOST_REASON] or type(error).__name__


@dataclass(frozen=True)
class _Compiled:
    """An answer's grammar, which takes the more memory the more `characters` it has: about a hundred bytes
    for each."""

    matcher: Any
    characters: int
    client: bytes


class Grammars:
    """The grammars of running answers, in the text process. `compile` may run in a thread of its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._made: Any = None  # what llguidance needs of the tokenizer
        self._compiled: dict[int, _Compiled] = {}  # by answer
        self._ended: set[int] = set()  # answers dropped since the last compilation, maybe during this one

    def __len__(self) -> int:
        return len(self._compiled)

    def compile(self, asked: Follow) -> Allowed:
        """Compile an answer's grammar, and follow it to its present end."""
        from llguidance import LLMatcher

        try:
            if self._made is None:
                self._made = self._tokenizer.for_grammars(asked.vocabulary)
            matcher = LLMatcher(self._made, asked.grammar, log_level=0, limits=limits())
            answer = _advanced(matcher, asked)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:  # as in `process.encoded`
            return _unfollowed(asked, _reason(e))
        self._compiled[asked.answer] = _Compiled(matcher, len(asked.grammar), asked.client)
        ended, self._ended = self._ended, set()
        if asked.answer in ended:
            self._compiled.pop(asked.answer, None)
        return answer

    def follow(self, asked: Follow) -> Allowed:
        """Advance an answer's grammar, which has been compiled, and say what may come next."""
        compiled = self._compiled.get(asked.answer)
        if compiled is None:
            reason = f"all grammars take more than {GRAMMAR_MEMORY >> 30} GB, and this client's most of it"
            return _unfollowed(asked, reason)
        try:
            return _advanced(compiled.matcher, asked)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:
            return _unfollowed(asked, _reason(e))

    def drop(self, answer: int) -> None:
        """Free the grammar of an answer that has ended."""
        self._ended.add(answer)  # first: `compile` looks the other way round
        self._compiled.pop(answer, None)

    def drop_largest(self) -> None:
        """Free the largest grammar of the client that holds most; its answer ends with an error."""
        held: Counter[bytes] = Counter()
        for compiled in self._compiled.values():
            held[compiled.client] += compiled.characters
        heaviest = max(held, key=lambda client: held[client])
        own = [answer for answer, compiled in self._compiled.items() if compiled.client == heaviest]
        self.drop(max(own, key=lambda answer: self._compiled[answer].characters))


def _advanced(matcher: Any, asked: Follow) -> Allowed:
    from llguidance.numpy import fill_next_token_bitmask

    if asked.tokens and not matcher.is_error():
        matcher.consume_tokens(list(asked.tokens))
    mask = np.zeros(words(asked.vocabulary), np.int32)
    if matcher.is_stopped() and not matcher.is_error():
        return Allowed(asked.answer, mask[:0])
    if not matcher.is_error():
        fill_next_token_bitmask(matcher, mask[np.newaxis], 0)
    if matcher.is_error():
        return _unfollowed(asked, _reason(matcher.get_error()))
    return Allowed(asked.answer, mask) if mask.any() else _refused(asked, "the grammar allows no token here")


def _unfollowed(asked: Follow, reason: str) -> Allowed:
    return _refused(asked, f"the grammar cannot be followed further: {reason}")


def _refused(asked: Follow, reason: str) -> Allowed:
    return Allowed(asked.answer, np.empty(0, np.int32), reason)


def words(vocabulary: int) -> int:
    """Returns the number of 32-bit words of a mask."""
    return -(-vocabulary // 32)


@dataclass(eq=False)
class MaskRequest:
    """Returns what a grammar allows behind `tokens[start:]`, to be set as `allowed`. Nothing is added to
    `tokens` before that, so the event loop may read them meanwhile."""

    client: bytes
    answer: int  # a number of its own each time that the request is admitted
    grammar: str
    vocabulary: int
    tokens: Sequence[int]
    start: int
    allowed: Allowed | None = None


@dataclass(frozen=True)
class MaskDropped:
    """No more masks of this answer are needed."""

    answer: int


AskMask = Callable[[MaskRequest | MaskDropped], None]
_answers = itertools.count()


class Grammar:
    """One answer's grammar, on the engine's side. Used by the engine's thread."""

    def __init__(self, client: bytes, grammar: str, vocabulary: int, ask: AskMask) -> None:
        """`vocabulary`: of the logits; `ask` has a request answered at some time."""
        self._client = client
        self._grammar = grammar
        self._vocabulary = vocabulary
        self._ask = ask
        self._asked: MaskRequest | None = None  # the latest, while the request is admitted

    def begin(self, tokens: Sequence[int], start: int) -> None:
        """Ask for the first mask; the answer begins at `tokens[start]`."""
        self.end()
        self._request(next(_answers), tokens, start)

    def advance(self) -> None:
        """Ask for the next mask: a token was added to `tokens`."""
        assert self._asked is not None
        self._request(self._asked.answer, self._asked.tokens, self._asked.start)

    def end(self) -> None:
        """Ask for no more masks until `begin`."""
        if self._asked is not None:
            self._ask(MaskDropped(self._asked.answer))
            self._asked = None

    @property
    def ready(self) -> bool:
        """Returns whether the mask behind the last token is there."""
        return self._asked is not None and self._asked.allowed is not None

    @property
    def complete(self) -> bool:
        """Returns whether it is known that nothing may follow the last token."""
        allowed = None if self._asked is None else self._asked.allowed
        return allowed is not None and not allowed.error and not len(allowed.mask)

    def allowed(self) -> NDArray[np.bool_]:
        """Returns which tokens [vocabulary] may come next, where it is ready. Raises PipelineError where none
        may, or the grammar cannot be followed."""
        assert self._asked is not None
        assert self._asked.allowed is not None
        if self._asked.allowed.error:
            raise PipelineError(self._asked.allowed.error)
        mask = self._asked.allowed.mask.view(np.uint8)
        return np.unpackbits(mask, count=self._vocabulary, bitorder="little").astype(bool)

    def _request(self, answer: int, tokens: Sequence[int], start: int) -> None:
        self._asked = MaskRequest(self._client, answer, self._grammar, self._vocabulary, tokens, start)
        self._ask(self._asked)
