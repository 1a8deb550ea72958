"""Guesses of a sequence's next tokens, from what it has said before: where its last tokens have stood earlier
in prompt or answer, what followed there probably follows again.

Each new token is judged against the guess that was there, whether it was computed with it or not. So it costs
nothing to know how often guesses come true, by how many tokens of the present match: a sequence that does not
repeat itself is soon known for it, without a step that was lost by trying.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from pipeline.text.grammar import Grammar

LONGEST = 32  # tokens of a match that are compared
LOOKED_AT = 8  # earlier places with the same last two tokens, the latest first
LENGTHS = (2, 3, 4, 6, 9, 17)  # matches from so many tokens on are one class
CLASS = [max(c for c, least in enumerate(LENGTHS) if n >= least) for n in range(2, LONGEST + 1)]
FIRST_GUESS, WEIGHT = 0.25, 4.0  # a class is first thought as good as the one below; this many judgements
LEAST_CHANCE = 0.2  # of a guess: a row costs more of a step than that
FADING = 0.97  # of earlier judgements, with each new one


class Draft:
    """One sequence's guesses. The index of its places grows with it: two tokens lead to where they last
    stood, and from there to the places before."""

    def __init__(self, tokens: Sequence[int]) -> None:
        """`tokens`: prompt and answer, which grow only."""
        self._tokens = tokens
        self._latest: dict[tuple[int, int], int] = {}  # by two tokens, the place of the second
        self._before: list[int] = []  # by place, the one before with the same two tokens; -1: none
        self._place, self._length = -1, 0  # of the match's last token, and its tokens
        self._right, self._judged = [0.0] * len(LENGTHS), [0.0] * len(LENGTHS)

    def follow(self) -> None:
        """Take the tokens that were added since the last call. Those of the first call are not judged."""
        judges = bool(self._before)
        for place in range(len(self._before), len(self._tokens)):
            token, came_true = self._tokens[place], False
            if self._length:
                came_true = self._tokens[self._place + 1] == token
                if judges:
                    self._judge(CLASS[self._length - 2], came_true)
            self._match(place, came_true)

    def _judge(self, of: int, came_true: bool) -> None:
        self._right[of] = self._right[of] * FADING + came_true
        self._judged[of] = self._judged[of] * FADING + 1

    def _match(self, place: int, came_true: bool) -> None:
        """Find where the last tokens, up to this place, have stood before, the more of them the better."""
        tokens = self._tokens
        pair = (tokens[place - 1] if place else -1, tokens[place])
        earlier = self._latest.get(pair, -1)
        self._latest[pair] = place
        self._before.append(earlier)
        if came_true:
            self._place, self._length = self._place + 1, min(self._length + 1, LONGEST)
        else:
            self._place, self._length = -1, 0
        for _ in range(LOOKED_AT):
            if earlier < 0 or self._length == LONGEST:
                return
            length = 2
            while (
                length < LONGEST and length <= earlier and tokens[earlier - length] == tokens[place - length]
            ):
                length += 1
            if length > self._length:
                self._place, self._length = earlier, length
            earlier = self._before[earlier]

    def tokens(self, most: int) -> list[int]:
        """Returns guesses of the next tokens: what followed the match, and beyond the present end the guesses
        themselves, as of a text that repeats. None where there is no match."""
        if not self._length:
            return []
        guesses = self._tokens[self._place + 1 : self._place + 1 + most]
        guesses = list(guesses)
        for at in range(most - len(guesses)):
            guesses.append(guesses[at])
        return guesses

    def chances(self, most: int) -> list[float]:
        """Returns for each guess how probable it is that it and all before it are right. A guess that comes
        true makes the match longer."""
        if not self._length:
            return []
        rates = self._rates()
        lengths = range(self._length, self._length + most)
        return list(accumulate((rates[CLASS[min(n, LONGEST) - 2]] for n in lengths), mul))

    def _rates(self) -> list[float]:
        """Returns the share of guesses that come true, by class."""
        rates, rate = [], FIRST_GUESS
        for right, judged in zip(self._right, self._judged, strict=True):
            rate = (right + WEIGHT * rate) / (judged + WEIGHT)
            rates.append(rate)
        return rates


class Guesses:
    """Guesses of an answer's next tokens: those of a draft, and where it has a grammar, what that allows of
    them and what it forces."""

    def __init__(self, tokens: Sequence[int], longest: int, grammar: Grammar | None) -> None:
        """`tokens`: as of Draft, at most `longest`."""
        self._tokens, self._longest, self._grammar = tokens, longest, grammar
        self._draft: Draft | None = None
        self.ahead = 0  # so many guesses the next steps may have

    def next(self, most: int) -> tuple[list[int], list[float]]:
        """Returns at most so many guesses, and how probable each is with those before."""
        most = self.room(most)
        guesses, chances = self._drafted(most)
        if self._grammar is None:
            return guesses, chances
        allowed = self._grammar.guesses[:most]
        return [token for token, _ in allowed], _within(allowed, guesses, chances)

    def look(self) -> None:
        """Ask the grammar, if there is one, for the next mask, and for those behind what may be guessed."""
        if self._grammar is None or not self._grammar.due:
            return
        most = self.room(self.ahead)
        guesses, chances = self._drafted(most) if most else ([], [])
        likely = sum(chance >= LEAST_CHANCE for chance in chances)
        self._grammar.look(most, guesses[:likely])

    def wait(self, step: float) -> None:
        """Wait for the grammar's answer where that probably gains. `step`: seconds of one."""
        if self._grammar is not None:
            self._grammar.wait(step)

    @property
    def bound(self) -> bool:
        """Returns whether a grammar says what may be guessed."""
        return self._grammar is not None

    def room(self, most: int) -> int:
        """Returns how many guesses, at most so many, the answer has room for."""
        return min(most, self._longest - len(self._tokens) - 1)

    def _drafted(self, most: int) -> tuple[list[int], list[float]]:
        if self._draft is None:
            self._draft = Draft(self._tokens)
        self._draft.follow()
        return self._draft.tokens(most), self._draft.chances(most)


def _within(
    allowed: Sequence[tuple[int, bool]], guesses: Sequence[int], chances: Sequence[float]
) -> list[float]:
    """Returns the chances of guesses within a grammar, given those of a Draft: what the grammar forces is
    certain, and beside the draft nothing else is guessed."""
    found: list[float] = []
    chance = before = 1.0
    for at, (token, forced) in enumerate(allowed):
        drafted = at < len(guesses) and guesses[at] == token
        if not forced:
            chance *= chances[at] / before if drafted else 0.0
        before = chances[at] if at < len(chances) else 1.0
        found.append(chance)
    return found
