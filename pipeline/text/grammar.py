"""Grammars that an answer must follow, as masks of the tokens that may come next (llguidance).

They are compiled and followed in the text process (`Grammars`), because one can take long or crash the
library: compiled in a thread with a large stack, and followed in the main thread, so that no answer's next
mask waits for another's compilation. `Grammar` is the engine's side: it asks for a mask behind each token,
and is ready when the mask is there. Where tokens may be guessed, it asks for the masks behind the guesses as
well, which are those of the same grammar followed that far: a guess that the grammar forbids is none, and a
token that it forces is one that is certain."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
RECENT = 0.2  # share of the last answer in means of what they take and bring
WORTH = 0.5  # of a step's seconds that a right guess saves
PATIENCE = 2.0  # times what answers take
AHEAD_SECONDS = 0.2  # for what follows behind guesses: the answer, and those of others, wait for it
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
        self._ends = tokenizer.decoder.eos_ids
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
            answer = self._advanced(matcher, asked)
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
            return self._advanced(compiled.matcher, asked)
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

    def _advanced(self, matcher: Any, asked: Follow) -> Allowed:
        if asked.tokens and not matcher.is_error():
            matcher.consume_tokens(list(asked.tokens))
        mask = np.zeros(words(asked.vocabulary), np.int32)
        if matcher.is_stopped() and not matcher.is_error():
            return Allowed(asked.answer, mask[:0])
        _fill(matcher, mask)
        if matcher.is_error():
            return _unfollowed(asked, _reason(matcher.get_error()))
        if not mask.any():
            return _refused(asked, "the grammar allows no token here")
        guesses, forced, masks = self._ahead(matcher, asked, mask)
        behind = np.array(masks, np.int32).reshape(len(masks), len(mask))
        return Allowed(asked.answer, mask, "", tuple(guesses), tuple(forced), behind)

    def _ahead(
        self, matcher: Any, asked: Follow, mask: NDArray[np.int32]
    ) -> tuple[list[int], list[int], list[NDArray[np.int32]]]:
        """Returns tokens that may follow, which of them the grammar forces, and the masks behind each. By a
        copy of the matcher: a limit that is reached on a guessed way ends none that is taken. Nor does a way
        that takes long: it is left where it is."""
        until = time.perf_counter() + AHEAD_SECONDS
        guesses: list[int] = []
        forced: list[int] = []
        masks: list[NDArray[np.int32]] = []
        matcher = matcher.deep_copy() if asked.ahead else matcher
        for at in range(asked.ahead):
            token = _only(mask)
            forced.append(int(token >= 0))
            if token < 0 and tuple(guesses) == asked.guesses[:at] and at < len(asked.guesses):
                token = asked.guesses[at]
            mask = np.zeros_like(mask)
            ends = token < 0 or token in self._ends or time.perf_counter() > until
            if ends or not matcher.try_consume_tokens([token]):
                break
            if not matcher.is_stopped():
                _fill(matcher, mask)
            if matcher.is_error() or not (matcher.is_stopped() or mask.any()):
                break
            guesses.append(token)
            masks.append(mask)
            if matcher.is_stopped():
                break
        return guesses, forced[: len(guesses)], masks


def _fill(matcher: Any, mask: NDArray[np.int32]) -> None:
    """Set the bits of the tokens that may come next, where the grammar can be followed."""
    from llguidance.numpy import fill_next_token_bitmask

    if not matcher.is_error():
        fill_next_token_bitmask(matcher, mask[np.newaxis], 0)


def _only(mask: NDArray[np.int32]) -> int:
    """Returns the token that alone is allowed; -1 where others are too."""
    (places,) = mask.nonzero()
    word = int(mask[places[0]]) & 0xFFFFFFFF if len(places) == 1 else 0
    alone = word and not word & (word - 1)
    return int(places[0]) * 32 + word.bit_length() - 1 if alone else -1


def _unfollowed(asked: Follow, reason: str) -> Allowed:
    return _refused(asked, f"the grammar cannot be followed further: {reason}")


def _refused(asked: Follow, reason: str) -> Allowed:
    return Allowed(asked.answer, np.empty(0, np.int32), reason)


def words(vocabulary: int) -> int:
    """Returns the number of 32-bit words of a mask."""
    return -(-vocabulary // 32)


@dataclass(eq=False)
class MaskRequest:
    """Asks what a grammar allows behind `tokens[start:end]`, and behind guesses, as a Follow says. The event
    loop reads `tokens` up to there meanwhile, and gives the answer."""

    client: bytes
    answer: int  # a number of its own each time that the request is admitted
    grammar: str
    vocabulary: int
    tokens: Sequence[int]
    start: int
    end: int
    ahead: int = 0
    guesses: Sequence[int] = ()
    allowed: Allowed | None = None
    seconds: float = field(default_factory=lambda: -time.perf_counter())  # that it took
    given: threading.Event = field(default_factory=threading.Event)

    def give(self, allowed: Allowed) -> None:
        self.seconds += time.perf_counter()
        self.allowed = allowed
        self.given.set()


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
        self._taken = False  # its answer, or what there was to take of it
        self._masks: list[NDArray[np.int32]] = []  # behind the last token, and behind each guess
        self._guesses: list[tuple[int, bool]] = []  # of next tokens, and whether they are forced
        self._error = ""
        # Of the last answers: the seconds that they took, and guesses that had come true before the next.
        self._seconds = self._right = 0.0

    def begin(self, tokens: Sequence[int], start: int) -> None:
        """Ask for the first mask; the answer begins at `tokens[start]`."""
        self.end()
        self._request(next(_answers), tokens, start, 0, ())

    def advance(self) -> None:
        """Go on behind the token that was added to `tokens`."""
        assert self._asked is not None
        right = self._guesses and self._guesses[0][0] == self._asked.tokens[-1]
        self._masks = self._masks[1:] if right else []
        self._guesses = self._guesses[1:] if right else []

    def look(self, ahead: int, guesses: Sequence[int]) -> None:
        """Ask for the next mask, where one is `due`, and for what follows up to `ahead` tokens behind it, as
        a Follow does."""
        asked = self._asked
        assert asked is not None
        assert asked.allowed is not None
        added = zip(asked.tokens[asked.end :], asked.allowed.guesses, strict=False)
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], added))
        self._right += (right - self._right) * RECENT
        self._request(asked.answer, asked.tokens, asked.start, ahead, guesses)

    def end(self) -> None:
        """Ask for no more masks until `begin`."""
        if self._asked is not None:
            self._ask(MaskDropped(self._asked.answer))
            self._asked = None
        self._masks, self._guesses, self._error = [], [], ""

    def wait(self, step: float) -> None:
        """Wait for the answer that is missing, where that probably saves more than it takes, of so many
        seconds of a step."""
        if self._asked is not None and self._seconds < self._right * WORTH * step:
            self._asked.given.wait(PATIENCE * self._seconds)

    @property
    def due(self) -> bool:
        """Returns whether the latest answer is there, and tokens were added since it was asked for."""
        self._take()
        asked = self._asked
        return asked is not None and asked.allowed is not None and asked.end < len(asked.tokens)

    @property
    def ready(self) -> bool:
        """Returns whether the mask behind the last token is there."""
        self._take()
        return bool(self._masks or self._error)

    @property
    def complete(self) -> bool:
        """Returns whether it is known that nothing may follow the last token."""
        return self.ready and not self._error and not self._masks[0].any()

    @property
    def guesses(self) -> list[tuple[int, bool]]:
        """Returns tokens that may come next, one behind the other, and whether each is forced."""
        self._take()
        return self._guesses

    def allowed(self) -> NDArray[np.bool_]:
        """Returns which tokens [vocabulary] may come next, where it is ready. Raises PipelineError where none
        may, or the grammar cannot be followed."""
        assert self.ready
        if self._error:
            raise PipelineError(self._error)
        mask = self._masks[0].view(np.uint8)
        return np.unpackbits(mask, count=self._vocabulary, bitorder="little").astype(bool)

    def _request(
        self, answer: int, tokens: Sequence[int], start: int, ahead: int, guesses: Sequence[int]
    ) -> None:
        self._taken = False
        self._asked = MaskRequest(
            self._client, answer, self._grammar, self._vocabulary, tokens, start, len(tokens), ahead, guesses
        )
        self._ask(self._asked)

    def _take(self) -> None:
        """Take the latest answer, as far as the tokens that were added meanwhile are those it guessed."""
        asked = self._asked
        if asked is None or asked.allowed is None or self._taken:
            return
        self._taken = True
        allowed, added = asked.allowed, list(asked.tokens[asked.end :])
        if asked.ahead:  # the first one of all was compiled
            self._seconds += (asked.seconds - self._seconds) * (RECENT if self._seconds else 1)
        if allowed.error:
            self._error = allowed.error
        elif added == list(allowed.guesses[: len(added)]):
            forced = map(bool, allowed.forced)
            self._masks = [allowed.mask, *allowed.masks][len(added) :]
            self._guesses = [*zip(allowed.guesses, forced, strict=True)][len(added) :]
