"""What a model's logits say: probabilities, and how near a tie they are."""

from __future__ import annotations

import numpy as np

from pipeline.arrays import FloatArray


def log_softmax(logits: FloatArray) -> FloatArray:
    """Natural-log probabilities float32 [n, vocabulary] of logits of that shape."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    total = np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64))
    logprobs: FloatArray = (shifted - total).astype(np.float32)
    return logprobs


def two_best(logits: FloatArray) -> tuple[float, int]:
    """How far the largest of logits [vocabulary] is above the second, and which that is. A vocabulary of one
    has no second: -1."""
    best = int(logits.argmax())
    rest = [
        (float(part.max()), start + int(part.argmax()))
        for start, part in ((0, logits[:best]), (best + 1, logits[best + 1 :]))
        if len(part)
    ]
    if not rest:
        return 0.0, -1
    value, place = max(rest, key=lambda found: found[0])
    return float(logits[best]) - value, place
