"""What scores and comparisons of answers are made of: log-probabilities, and margins between two tokens."""

from __future__ import annotations

import numpy as np

from pipeline.arrays import FloatArray

MOST = float(np.finfo(np.float32).max)  # a margin to a token that a model excludes, with a logit of -infinity


def log_softmax(logits: FloatArray) -> FloatArray:
    """Natural-log probabilities float32 [n, vocabulary] of logits of that shape."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    total = np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64))
    logprobs: FloatArray = (shifted - total).astype(np.float32)
    return logprobs


def best_margin(logits: FloatArray, rival: int | None = None) -> tuple[float, int]:
    """By how much the largest of logits [vocabulary] exceeds that of `rival`, by default the second largest,
    and that token; at most MOST, as messages hold finite numbers. A vocabulary of one has no second: -1."""
    best = int(logits.argmax())
    if rival is not None:
        return min(float(logits[best]) - float(logits[rival]), MOST), rival
    parts = ((0, logits[:best]), (best + 1, logits[best + 1 :]))
    rest = [start + int(part.argmax()) for start, part in parts if len(part)]
    if not rest:
        return 0.0, -1
    place = max(rest, key=lambda found: logits[found])
    return min(float(logits[best]) - float(logits[place]), MOST), place
