"""Incremental detokenization: the text of each new token that no later token can change.

`ByteDecoder` or `RunDecoder` returns the text that the ids so far make certain; `StopStrings` holds back text
that could still become a stop string. In total the text is exactly the tokenizer's own decoding of all ids
without special tokens, cut at the first stop string. The work for a token does not grow with the answer.

The `tokenizers` library's DecodeStream is not used: it returns the text of a byte-fallback token at once,
although the next byte can change it, and then fails on such ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol


class TokenDecoder(Protocol):
    """Turns token ids, without special tokens, into text."""

    def push(self, token: int) -> str:
        """The text that becomes certain with this token."""

    def finish(self) -> str:
        """The rest of the text, when no token follows."""


class ByteDecoder:
    """For byte-level vocabularies: every token is bytes, and the text is all of them as UTF-8 with U+FFFD for
    invalid bytes. Only an incomplete character at the end is uncertain."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._token_bytes(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class RunDecoder:
    """For vocabularies in which a token's text depends on its neighbours: the first token loses its leading
    space, and a run of byte tokens is decoded as a whole (one invalid byte makes all of it invalid, so none
    of it is certain before it ends). Tokens are decoded once they are certain, behind the last token before
    them, which stands in for all earlier ones."""

    def __init__(self, decode: Callable[[Sequence[int]], str], is_byte: Callable[[int], bool]) -> None:
        self._decode = decode
        self._is_byte = is_byte
        self._before: list[int] = []  # the last decoded token, if any
        self._waiting: list[int] = []

    def push(self, token: int) -> str:
        self._waiting.append(token)
        return "" if self._is_byte(token) else self.finish()  # no later token can change these

    def finish(self) -> str:
        if not self._waiting:
            return ""
        start = len(self._decode(self._before)) if self._before else 0
        text = self._decode(self._before + self._waiting)[start:]
        self._before = self._waiting[-1:]
        self._waiting = []
        return text


class StopStrings:
    """Finds the first complete stop string (the longest of several that end together), wherever the text is
    split, and holds back text that could still become one. One Knuth-Morris-Pratt automaton for each stop
    string: its state is the length of the stop string's prefix that the text so far ends with."""

    def __init__(self, stop: Sequence[str]) -> None:
        """`stop`: non-empty strings."""
        self._stop = tuple(stop)
        self._borders = [_borders(text) for text in stop]
        self._states = [0] * len(stop)
        self._held = ""
        self.found = False
        self.matched = ""  # the stop string that was found

    def push(self, text: str) -> str:
        """The text that is certain to be before any stop string, and was not returned yet."""
        if not self._stop:
            return text
        held = self._held + text
        for place, character in enumerate(text, start=len(self._held) + 1):
            complete = self._step(character)
            if complete:
                self.found = True
                self._held = ""
                return held[: place - complete]
        certain = len(held) - max(self._states)
        self._held = held[certain:]
        return held[:certain]

    def finish(self) -> str:
        """The text that was held back and became no stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> int:
        """Advance all automata. The length of the longest stop string that is now complete, or 0."""
        complete = 0
        for index, (stop, borders) in enumerate(zip(self._stop, self._borders, strict=True)):
            state = self._states[index]
            while state and stop[state] != character:
                state = borders[state]
            state += stop[state] == character
            if state == len(stop) and state > complete:
                complete, self.matched = state, stop
            self._states[index] = state
        return complete


def _borders(text: str) -> list[int]:
    """borders[i]: length of the longest proper prefix of text[:i] that is also its suffix."""
    borders = [0, 0]
    length = 0
    for character in text[1:]:
        while length and text[length] != character:
            length = borders[length]
        length += text[length] == character
        borders.append(length)
    return borders


class TextStream:
    """The text of one answer. `stopped` is set once a stop string is complete; no text follows it."""

    def __init__(self, decoder: TokenDecoder, stop: StopStrings, is_special: Callable[[int], bool]) -> None:
        self._decoder = decoder
        self._stop = stop
        self._is_special = is_special

    @property
    def stopped(self) -> bool:
        return self._stop.found

    @property
    def matched(self) -> str:
        """The stop string that is complete, "" before."""
        return self._stop.matched

    def push(self, token: int) -> str:
        """The text that becomes certain with this token. Special tokens and unknown ids have none."""
        if self.stopped or self._is_special(token):
            return ""
        return self._stop.push(self._decoder.push(token))

    def resume(self, tokens: Sequence[int]) -> None:
        """Continue behind these tokens; an earlier stream has returned their text."""
        for token in tokens:
            self.push(token)

    def finish(self) -> str:
        """The rest of the text. It can complete a stop string, so `stopped` may change."""
        if self.stopped:
            return ""
        text = self._stop.push(self._decoder.finish())
        return text if self.stopped else text + self._stop.finish()
