"""Text from token ids, one at a time: what may be shown now, and nothing that must be taken back.

Three questions are answered one after the other. Which text do the ids so far make certain (`BytePieces`,
`SpacedPieces`)? How much of it could still become a stop string (`StopStrings`)? What is left to show at
the end (`TextStream.finish`)? All together the shown text is exactly the tokenizer's own decoding of all
ids without special tokens, cut at the first stop string. The work per token does not grow with the answer.

Knows nothing of files and of transformers: `tokenizer.py` hands it the pieces and a decoding function.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol


class Pieces(Protocol):
    """Turns token ids, special ones left out, into text piece by piece."""

    def push(self, token: int) -> str:
        """The text that has become certain."""

    def finish(self) -> str:
        """The rest, once no token follows."""


class BytePieces:
    """Byte-level vocabularies: every token is bytes, and the text is all of them as UTF-8, where whatever is
    no UTF-8 shows as U+FFFD. Only an unfinished character at the end is uncertain."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._token_bytes(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class SpacedPieces:
    """Vocabularies whose tokens are text, decoded with their neighbours in view: the first token loses its
    leading space, and a run of byte tokens is decoded as a whole (as one invalid byte spoils the run, none
    of it is certain before it ends). Tokens wait until they are certain; they are then decoded behind the
    last token before them, which stands for all of them."""

    def __init__(self, decode: Callable[[Sequence[int]], str], is_byte: Callable[[int], bool]) -> None:
        self._decode = decode
        self._is_byte = is_byte
        self._before: list[int] = []  # the last token that has been shown, if any
        self._waiting: list[int] = []

    def push(self, token: int) -> str:
        self._waiting.append(token)
        return "" if self._is_byte(token) else self.finish()  # whatever follows cannot change these

    def finish(self) -> str:
        if not self._waiting:
            return ""
        shown = len(self._decode(self._before)) if self._before else 0
        text = self._decode(self._before + self._waiting)[shown:]
        self._before = self._waiting[-1:]
        self._waiting = []
        return text


class StopStrings:
    """Finds the first stop string that is complete (of several that end together, the longest), however the
    text is cut into pieces, and holds back what could still become one. One Knuth-Morris-Pratt automaton
    for each: its state is how much of the stop string the text so far ends with."""

    def __init__(self, stop: Sequence[str]) -> None:
        """`stop`: strings that are not empty."""
        self._stop = tuple(stop)
        self._borders = [_borders(text) for text in stop]
        self._states = [0] * len(stop)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """What of the text so far is certain to be before any stop string, and has not been returned."""
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
        """What was held back and no stop string has claimed."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> int:
        """Move all automata; the length of the longest stop string that is now complete, or 0."""
        complete = 0
        for index, (stop, borders) in enumerate(zip(self._stop, self._borders, strict=True)):
            state = self._states[index]
            while state and stop[state] != character:
                state = borders[state]
            state += stop[state] == character
            if state == len(stop):
                complete = max(complete, state)
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
    """The text of one answer. `stopped` is set once a stop string is complete; nothing is shown after it."""

    def __init__(self, pieces: Pieces, stop: StopStrings, is_special: Callable[[int], bool]) -> None:
        self._pieces = pieces
        self._stop = stop
        self._is_special = is_special

    @property
    def stopped(self) -> bool:
        return self._stop.found

    def push(self, token: int) -> str:
        """The text that may be shown once this token is known; often some of it belongs to earlier ones.
        Special tokens and ids that the tokenizer does not know show nothing."""
        if self.stopped or self._is_special(token):
            return ""
        return self._stop.push(self._pieces.push(token))

    def resume(self, tokens: Sequence[int]) -> None:
        """Begin behind these tokens, whose text has been shown as far as `push` would have returned it."""
        for token in tokens:
            self.push(token)

    def finish(self) -> str:
        """The rest of the text. It can complete a stop string; look at `stopped` afterwards."""
        if self.stopped:
            return ""
        text = self._stop.push(self._pieces.finish())
        return text if self.stopped else text + self._stop.finish()
