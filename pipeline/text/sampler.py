"""Chooses an answer's next token from one row of logits: penalties, biases and a grammar, then the sampler;
and what a client may ask to know about the choice, which is always of the model's own logits.

The sampler's filters, their order and their limits are those of transformers' generation: repetition penalty,
temperature, top-k, top-p, min-p. Ties at top-k's limit are all kept, as there; ties at top-p's limit by
smaller token id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import FloatArray
from pipeline.errors import NotFinite
from pipeline.text.logprobs import Scores, best_margin, largest, top_logprobs
from protocol.messages import Sampling, Shaping

Allowed = NDArray[np.bool_] | None
GROUP = 256  # tokens that are summed together


class Sampler:
    """One request's settings, random numbers, and ids for the repetition penalty."""

    def __init__(self, sampling: Sampling, seed: int, drawn: int = 0) -> None:
        """`sampling` is valid. Equal seeds and logits give equal tokens. Continues behind the
        first `drawn` tokens of a sampler with the same seed."""
        self._sampling = sampling
        self._filters = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        self._random = np.random.default_rng(seed)
        self._random.random(drawn)  # `next` draws one number for each token
        self._seen: NDArray[np.bool_] | None = None  # [V], only for the repetition penalty
        self._counted = 0  # leading ids of `previous` that are in _seen
        self._weights: NDArray[np.float32] | None = None  # [groups, GROUP], of a draw from all tokens

    @property
    def greedy(self) -> bool:
        """Returns whether `next` is the largest logit."""
        return self._sampling.temperature == 0 and self._sampling.repetition_penalty == 1

    def next(self, logits: NDArray[np.float32], previous: Sequence[int]) -> int:
        """Returns the next token from `logits` [V] float32. `previous`: the request's ids so far, each in
        0..V-1; it only grows. Raises NotFinite where the logits hold NaN or have no finite maximum."""
        if self._sampling.temperature == 0:
            scores = self._penalised(logits, previous)
            best = int(np.argmax(scores))  # the first of equals; a NaN counts as the largest
            if not math.isfinite(scores[best]):
                raise NotFinite("the model's logits are not finite")
            return best
        drawn = self._random.random()
        if not self._filters:
            return self._of_all(self._penalised(logits, previous), drawn)
        ids, weights = self.candidates(logits, previous)
        return int(ids[_place(weights, drawn)[0]])

    def _of_all(self, scores: Scores, drawn: float) -> int:
        """Returns the token that the number `drawn` from [0, 1) means where no filter excludes any: its group
        by the groups' sums, then its place in the group. In one sum over all tokens, in float64, a token of
        152 thousand would take 4 ms instead of half a millisecond."""
        if self._weights is None:
            self._weights = np.zeros((-(-len(scores) // GROUP), GROUP), np.float32)
        every = self._weights.ravel()[: len(scores)]
        with np.errstate(over="ignore", under="ignore"):
            np.subtract(scores, _finite_best(scores), out=every)
            if (temperature := self._sampling.temperature) != 1:
                every /= min(max(temperature, 1e-30), 1e30)  # as float32
            np.exp(every, out=every)
        group, rest = _place(np.einsum("ij->i", self._weights), drawn)
        return group * GROUP + _place(self._weights[group], rest)[0]

    def candidates(
        self, logits: NDArray[np.float32], previous: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Returns tokens, ascending, and unnormalized probabilities, for temperatures above 0. As `next`."""
        sampling = self._sampling
        scores = self._penalised(logits, previous)
        best = _finite_best(scores)
        ids = np.arange(len(scores))
        if 0 < sampling.top_k < len(scores):
            ids = largest(scores, sampling.top_k)
            scores = scores[ids]
        # subtract before dividing, so that no temperature overflows the best token
        weights = scores.astype(np.float64)
        with np.errstate(over="ignore", under="ignore"):
            weights -= best
            weights /= sampling.temperature
            np.exp(weights, out=weights)
        if sampling.top_p < 1:
            kept = _nucleus(weights, sampling.top_p)
            ids, weights = ids[kept], weights[kept]
        if sampling.min_p > 0:
            # weights are relative to the best token's, which no filter removes
            kept = np.flatnonzero(weights >= sampling.min_p)
            ids, weights = ids[kept], weights[kept]
        return ids, weights

    def _penalised(self, logits: NDArray[np.float32], previous: Sequence[int]) -> Scores:
        penalty = self._sampling.repetition_penalty
        if penalty == 1:
            return logits
        if self._seen is None:
            self._seen = np.zeros(len(logits), dtype=bool)
        self._seen[np.asarray(previous[self._counted :], dtype=np.int64)] = True
        self._counted = len(previous)
        seen = np.flatnonzero(self._seen)
        scores = logits.astype(np.float64)
        scores[seen] = np.where(scores[seen] < 0, scores[seen] * penalty, scores[seen] / penalty)
        return scores


def _finite_best(scores: Scores) -> float:
    best = float(scores.max())
    if not math.isfinite(best):
        raise NotFinite("the model's logits are not finite")
    return best


def _place(weights: Scores, drawn: float) -> tuple[int, float]:
    """Returns the place in the sum of the weights that `drawn` in [0, 1) falls on, never one with a weight of
    0, and where within that place, in [0, 1)."""
    total = weights.cumsum(dtype=np.float64)
    end = float(total[-1])
    at = min(drawn * end, math.nextafter(end, 0))
    place = int(total.searchsorted(at, side="right"))
    before = float(total[place - 1]) if place else 0.0
    return place, (at - before) / (float(total[place]) - before)


def _nucleus(weights: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Returns the indices of the largest weights, ascending, up to and including the one with which their sum
    reaches the share `top_p` of the total; at least one."""
    goal = top_p * weights.sum()
    size = 256  # sorting a whole vocabulary is slow; a few tokens usually reach the goal
    while True:
        places = largest(weights, size)
        falling = -np.sort(-weights[places])
        total = np.cumsum(falling)
        if total[-1] >= goal or len(places) == len(weights):
            break
        size *= 8
    count = min(int(np.searchsorted(total, goal, side="left")) + 1, len(falling))
    limit = falling[count - 1]
    kept = places[weights[places] >= limit]
    equal = np.flatnonzero(weights[kept] == limit)
    return np.delete(kept, equal[len(equal) - (len(kept) - count) :])


class Choice(NamedTuple):
    """A token, and the fields of its Token message. All but the token are of the model's own logits."""

    token: int
    margin: float
    runner_up: int
    logprob: float = 0.0
    top_tokens: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class TokenChooser:
    """Chooses one answer's tokens."""

    def __init__(
        self,
        sampler: Sampler,
        shaping: Shaping,
        *,
        prompt: int,
        logprobs: int = -1,
        rival: int | None = None,
    ) -> None:
        """`prompt`: tokens before the answer; `logprobs`, `rival`: as in Generate."""
        self._sampler = sampler
        self._shaping = shaping
        self._logprobs = logprobs
        self._rival = rival
        self._counted = prompt  # leading ids that are counted, or of the prompt
        self._counts: dict[int, int] = {}  # of the answer's tokens
        self._penalizes = shaping.presence_penalty != 0 or shaping.frequency_penalty != 0
        self._biased = np.array([b.token for b in shaping.bias], np.int64)
        self._biases = np.array([b.bias for b in shaping.bias], np.float32)

    @property
    def greedy(self) -> bool:
        """Returns whether each token is the largest logit, and nothing else of the logits is asked for."""
        asks = self._logprobs >= 0 or self._rival is not None
        return self._sampler.greedy and not (asks or self._penalizes or len(self._biased))

    def next(self, logits: FloatArray, tokens: Sequence[int], allowed: Allowed = None) -> Choice:
        """Returns the token after `tokens`, prompt and answer, which only grow. `allowed` [vocabulary]: by a
        grammar. Raises NotFinite as the sampler."""
        token = self._sampler.next(self._shaped(logits, tokens, allowed), tokens)
        margin, runner_up = best_margin(logits, self._rival)
        if self._logprobs < 0:
            return Choice(token, margin, runner_up)
        logprob, ids, values = top_logprobs(logits, token, self._logprobs)
        return Choice(token, margin, runner_up, logprob, ids, values)

    def _shaped(self, logits: FloatArray, tokens: Sequence[int], allowed: Allowed) -> FloatArray:
        if not (self._penalizes or len(self._biased) or allowed is not None):
            return logits
        shaped = logits.copy()
        if self._penalizes:
            for token in tokens[self._counted :]:
                self._counts[token] = self._counts.get(token, 0) + 1
            self._counted = len(tokens)
            ids = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
            times = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            shaped[ids] -= self._shaping.presence_penalty + self._shaping.frequency_penalty * times
        if len(self._biased):
            np.add.at(shaped, self._biased, self._biases)
        if allowed is not None:
            shaped[~allowed] = -np.inf
        return shaped
