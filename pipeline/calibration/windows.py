"""Divides a calibration's text into windows, from all of it. Commands read its limits: it imports no torch.

The first part of each window is read as a prompt, the rest is decoded; every fifth is held out for
validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pipeline.errors import RequestError

LEAST_TOKENS = 256  # of a text: with fewer, experts' shares are noise
LARGEST_WINDOW = 512  # tokens
SMALL_WINDOW = 64  # tokens; windows get this small where that makes 5 * LANES of them
LANES = 4  # windows that are decoded together
SHORTEST_WINDOW = 4  # tokens: with a prompt, a decoded token and its successor
LEAST_CONTEXT = 16  # tokens, for windows with a prompt and an answer
HELD_OUT = 5  # one of so many windows is for validation
# The share of a window that is read as a prompt; the rest is decoded. Validation windows decode more, because
# the threshold is searched on that.
TRAINING_PROMPT, VALIDATION_PROMPT = 0.75, 0.5


@dataclass(frozen=True)
class Window:
    """Consecutive tokens that are read as a sequence of their own; the first `prefill` are the prompt."""

    tokens: list[int]
    prefill: int


@dataclass(frozen=True)
class Division:
    """The windows of the two parts of a text, each in the order of the text."""

    training: list[Window]
    validation: list[Window]

    @classmethod
    def of(cls, excerpts: Sequence[Sequence[int]], context: int, most: int) -> Division:
        """Windows of about equal length that fit the context, at most `most` tokens in all. Those of a longer
        text are evenly spaced over all of it. `excerpts`: the text's tokens, in one or more pieces; no window
        spans two. Raises RequestError for too short a text or context."""
        given = sum(map(len, excerpts))
        if min(given, most) < LEAST_TOKENS:
            raise RequestError(
                f"the text has {given} tokens, calibrating needs {LEAST_TOKENS} and gets better with"
                " thousands; give a longer one"
            )
        if context < LEAST_CONTEXT:
            raise RequestError(
                f"the context is {context} tokens, calibrating needs {LEAST_CONTEXT}; start the engine with a"
                " larger --context"
            )
        windows = _windows(excerpts, min(given, most), min(LARGEST_WINDOW, context))
        middle = HELD_OUT // 2
        held_out = set(range(middle, len(windows), HELD_OUT))
        return cls(
            [_window(w, TRAINING_PROMPT) for i, w in enumerate(windows) if i not in held_out],
            [_window(windows[i], VALIDATION_PROMPT) for i in sorted(held_out)],
        )

    @property
    def tokens(self) -> int:
        """Tokens of all windows."""
        return sum(len(window.tokens) for window in self.training + self.validation)


def _windows(excerpts: Sequence[Sequence[int]], wanted: int, largest: int) -> list[list[int]]:
    """`wanted` tokens, or a little fewer where excerpts are short, in windows of up to `largest`."""
    count = max(-(-wanted // largest), min(HELD_OUT * LANES, wanted // SMALL_WINDOW))
    ends = list(accumulate(map(len, excerpts), initial=0))
    # Each excerpt has as many of the windows as its share of the tokens, and each window begins a part of it.
    until = [(end * count + ends[-1] // 2) // ends[-1] for end in ends]
    windows = []
    for excerpt, (first, last) in zip(excerpts, pairwise(until), strict=True):
        for window in range(first, last):
            size = wanted * (window + 1) // count - wanted * window // count
            start, end = (
                len(excerpt) * place // (last - first) for place in (window - first, window + 1 - first)
            )
            windows.append(list(excerpt[start : min(start + size, end)]))
    return [window for window in windows if len(window) >= SHORTEST_WINDOW]


def _window(tokens: list[int], prompt: float) -> Window:
    return Window(tokens, int(len(tokens) * prompt))
