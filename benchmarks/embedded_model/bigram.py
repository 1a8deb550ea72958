"""Smoothed bigram model over the tokenizer's vocabulary: the baseline of the trained model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.embedded_model.tokenizer import VOCABULARY

PRIORS = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)  # pseudo-counts given to the unigram distribution
DISCOUNTS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # absolute discounts of Kneser-Ney


class Bigram:
    """Counts of token pairs, and two ways to smooth them."""

    def __init__(self, streams: list[NDArray[np.uint16]]) -> None:
        """Count the pairs of every stream (token ids)."""
        size = VOCABULARY
        self.pairs = np.zeros((size, size), np.float32)
        for stream in streams:
            codes = stream[:-1].astype(np.int64) * size + stream[1:]
            self.pairs += np.bincount(codes, minlength=size * size).reshape(size, size).astype(np.float32)
        self.firsts = self.pairs.sum(1)
        unigram = self.pairs.sum(0) + 1.0
        self.unigram = unigram / unigram.sum()
        # Continuation counts: the number of contexts of a token, not its frequency.
        followers = (self.pairs > 0).sum(0) + 1.0
        self.continuation = followers / followers.sum()
        self.branching = (self.pairs > 0).sum(1)

    def interpolated(self, first: NDArray[np.int64], second: NDArray[np.int64], prior: float) -> float:
        """Mean nats a pair with `prior` pseudo-counts spread as the unigram distribution."""
        chance = (self.pairs[first, second] + prior * self.unigram[second]) / (self.firsts[first] + prior)
        return float(-np.log(chance).mean())

    def kneser_ney(self, first: NDArray[np.int64], second: NDArray[np.int64], discount: float) -> float:
        """Mean nats a pair with interpolated Kneser-Ney smoothing."""
        total = np.maximum(self.firsts[first], 1.0)
        kept = np.maximum(self.pairs[first, second] - discount, 0.0) / total
        backoff = np.where(self.firsts[first] > 0, discount * self.branching[first] / total, 1.0)
        return float(-np.log(kept + backoff * self.continuation[second]).mean())

    def best(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> tuple[float, str]:
        """The lowest mean nats over both smoothings and their parameters, and the name of that smoothing.

        The parameter is chosen on the evaluated pairs, which favours the bigram model.
        """
        found = [(self.interpolated(first, second, k), f"unigram prior {k:g}") for k in PRIORS]
        found += [(self.kneser_ney(first, second, d), f"Kneser-Ney discount {d:g}") for d in DISCOUNTS]
        return min(found)
