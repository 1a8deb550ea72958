"""Log-probabilities of tokens and margins between two, as scores and comparisons of answers need them; greedy
choices that a device makes."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import FloatArray
from pipeline.errors import NotFinite

Scores = NDArray[np.float32] | NDArray[np.float64]  # [V], or of the remaining candidates

MOST = float(np.finfo(np.float32).max)  # a margin to a token that a model excludes, with a logit of -infinity
WIDTH = 4  # numbers of a row of a device's greedy choices: both logits, and the bits of their tokens, int32


class Greedy(NamedTuple):
    """One row's token, as `Sampler` chooses it at temperature 0: the first of equals. The device finds it and
    the second one, instead of copying a number for each token of the vocabulary to the host."""

    token: int
    margin: float  # as `best_margin`, like `runner_up`
    runner_up: int

    @classmethod
    def read(cls, row: FloatArray, vocabulary: int) -> Greedy:
        """Read it from float32 [WIDTH], the larger logit first. Raises NotFinite where no largest is
        finite."""
        best, second = row[:2].tolist()
        token, runner_up = row[2:].view(np.int32).tolist()
        if not math.isfinite(best):
            raise NotFinite("the model's logits are not finite")
        if vocabulary == 1:
            return cls(token, 0.0, -1)
        if runner_up == token:  # all others are minus infinity, as is the excluded best: the first of those
            runner_up = int(token == 0)
        return cls(token, min(best - second, MOST), runner_up)


def log_softmax(logits: FloatArray) -> FloatArray:
    """Return the natural-log probabilities float32 [n, vocabulary] of logits of that shape."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    total = np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64))
    logprobs: FloatArray = (shifted - total).astype(np.float32)
    return logprobs


def best_margin(logits: FloatArray, rival: int | None = None) -> tuple[float, int]:
    """Returns by how much the largest of logits [vocabulary] exceeds that of `rival`, by default the second
    largest, and that token; at most MOST, as messages hold finite numbers. A vocabulary of one has no second:
    -1."""
    best = int(logits.argmax())
    if rival is not None:
        return min(float(logits[best]) - float(logits[rival]), MOST), rival
    parts = ((0, logits[:best]), (best + 1, logits[best + 1 :]))
    rest = [start + int(part.argmax()) for start, part in parts if len(part)]
    if not rest:
        return 0.0, -1
    place = max(rest, key=lambda token: logits[token])
    return min(float(logits[best]) - float(logits[place]), MOST), place


def top_logprobs(
    logits: FloatArray, token: int, count: int
) -> tuple[float, tuple[int, ...], tuple[float, ...]]:
    """Returns the natural-log probability of a token by logits [vocabulary]; and the `count` most probable
    tokens with theirs, the most probable first. None is below -MOST."""
    shifted = logits - logits.max()
    total = float(np.log(np.exp(shifted).sum(dtype=np.float64)))
    ids = largest(shifted, count)
    ids = ids[np.argsort(-shifted[ids], kind="stable")][:count]
    values = np.maximum(shifted[[token, *ids]] - total, -MOST).tolist()
    return values[0], tuple(ids.tolist()), tuple(values[1:])


def top_of_rows(logprobs: FloatArray, count: int) -> tuple[NDArray[np.int32], FloatArray]:
    """Returns the `count` largest of each row of log-probabilities [n, vocabulary], the largest first: ids
    and values [n, count]."""
    ids = np.empty((len(logprobs), count), np.int32)
    for row, values in enumerate(logprobs):
        best = largest(values, count)
        ids[row] = best[np.argsort(-values[best], kind="stable")][:count]
    return ids, np.maximum(np.take_along_axis(logprobs, ids.astype(np.int64), 1), -MOST)


def largest(scores: Scores, k: int) -> NDArray[np.int64]:
    """Returns the indices of the k largest scores, ascending, with all ties of the smallest."""
    if k >= len(scores):
        return np.arange(len(scores))
    if k == 0:
        return np.arange(0)
    places = None
    groups = max(256, 4 * k)
    if len(scores) >= 2 * groups:
        # k groups have a score of at least the k-th largest of the groups' maxima, so no smaller score is
        # among the k largest. Many times faster than partitioning a vocabulary.
        rows = len(scores) // groups
        maxima = scores[: rows * groups].reshape(rows, groups).max(axis=0)
        places = np.flatnonzero(scores >= np.partition(maxima, groups - k)[groups - k])
        scores = scores[places]
    kept = np.flatnonzero(scores >= np.partition(scores, len(scores) - k)[len(scores) - k])
    return kept if places is None else places[kept]
