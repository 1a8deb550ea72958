"""Divides a calibration's text into windows: the first part of each is read as a prompt, the rest is decoded.
The last windows are held out for validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipeline.errors import RequestError

LEAST_TOKENS = 256  # of a text: with fewer, experts' shares are noise
LARGEST_WINDOW = 512  # tokens
SMALL_WINDOW = 64  # tokens; windows get this small where that makes LANES of them
LANES = 4  # windows that are decoded together
LEAST_CONTEXT = 16  # tokens, for windows with a prompt and an answer
VALIDATION_SHARE = 0.2  # of the text, its end
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
    """The windows of the two parts of a text."""

    training: list[Window]
    validation: list[Window]

    @classmethod
    def of(cls, tokens: Sequence[int], context: int) -> Division:
        """Windows of about equal length that fit the context. Raises RequestError for too short a text or
        context."""
        if len(tokens) < LEAST_TOKENS:
            raise RequestError(
                f"the text has {len(tokens)} tokens, calibrating needs {LEAST_TOKENS} and gets better with"
                " thousands; give a longer one"
            )
        if context < LEAST_CONTEXT:
            raise RequestError(
                f"the context is {context} tokens, calibrating needs {LEAST_CONTEXT}; start the engine with a"
                " larger --context"
            )
        largest = min(LARGEST_WINDOW, context)
        kept = int(len(tokens) * VALIDATION_SHARE)
        return cls(
            _windows(tokens[:-kept], largest, TRAINING_PROMPT),
            _windows(tokens[-kept:], largest, VALIDATION_PROMPT),
        )


def _windows(tokens: Sequence[int], largest: int, prompt: float) -> list[Window]:
    count = max(-(-len(tokens) // largest), min(LANES, len(tokens) // SMALL_WINDOW))
    ends = [len(tokens) * i // count for i in range(count + 1)]
    parts = [list(tokens[start:end]) for start, end in pairwise(ends)]
    return [Window(part, int(len(part) * prompt)) for part in parts]
