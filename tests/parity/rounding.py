"""How far rounding may move log-probabilities from exact ones, measured on this processor.

Where rounding flips a router's choice, or a code of a quantized activation, all later log-probabilities of
that text move: at other tokens in one implementation than in another, and on one processor than on another.
So a text is one sample, and what a few texts of ours reach is compared with the distribution over many texts
of the oracle's own rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]

FALSE_ALARM = 1e-7  # for one comparison; a test makes fewer than ten that can differ
NORMAL = 5.199337582  # the normal distribution's quantile for that
TAIL = 0.999  # quantile of a text's distances
CALM = 0.1  # quantile of the rows' means: a text begins with rows that have the exact codes and routings


@dataclass(frozen=True)
class Rounding:
    """The distances between two sets of log-probabilities, in nats: the mean of each token's row, and of each
    text the 99.9 % quantile and the largest."""

    rows: NDArray[np.float64]  # [texts, tokens]
    tails: NDArray[np.float64]
    largest: NDArray[np.float64]

    @classmethod
    def between(cls, ours: Sequence[Rows], exact: Sequence[Rows]) -> Rounding:
        errors = [np.abs(a - b) for a, b in zip(ours, exact, strict=True)]
        return cls(
            np.array([e.mean(1) for e in errors], np.float64),
            np.array([np.quantile(e, TAIL) for e in errors], np.float64),
            np.array([e.max() for e in errors], np.float64),
        )

    def refusal(self, ours: Rounding, factor: float = 1.0, texts: Sequence[int] = ()) -> str:
        """What of `ours` is too large to be a sample of this distribution; "" if nothing is. The texts of
        `ours` are those at `texts` in this distribution, or the first. Too large is

        - the mean of calm rows, which nothing was flipped for, where it exceeds `factor` times this one on
          the same texts: hundreds of rows are of nearly one size, so that chance has no part in it;
        - the mean, where it exceeds `factor` times this mean on the same texts, and the texts' means rank too
          high; the ranks count only if `factor` is more than 1: an implementation that rounds less often than
          the oracle needs no allowance;
        - the mean over the texts' tails, where it exceeds this mean by the standard error of the difference
          times the t-distribution's quantile for FALSE_ALARM, and the tails rank too high;
        - the largest of all, where it exceeds what the largest of as many texts exceeds with probability
          FALSE_ALARM, by a Gumbel distribution fitted to this one's mean and variance.

        Means alone would be no safe measure: where flips are rare, so are the texts that decide a mean, and
        some hundred samples do not show how large those are. Ranks need no distribution, and no fewer than a
        dozen texts can rank too high.
        """
        n, m = len(ours.rows), len(self.rows)
        same = self.rows[list(texts) or slice(n)]
        mean = same.mean()
        error = self.tails.std(ddof=1) * math.sqrt(1 / n + 1 / m)
        calm = factor * np.quantile(same, CALM)
        checks = {
            "calm rows": (np.quantile(ours.rows, CALM), calm, True),
            "mean": (
                ours.rows.mean(),
                factor * mean,
                factor == 1 or rank_high(ours.rows.mean(1), self.rows.mean(1)),
            ),
            "tail": (
                ours.tails.mean(),
                self.tails.mean() + t_quantile(m - 1) * error,
                rank_high(ours.tails, self.tails),
            ),
            "largest": (ours.largest.max(), gumbel_limit(self.largest, n), True),
        }
        return ", ".join(
            f"{name} {found:.4g}, allowed {allowed:.4g}"
            for name, (found, allowed, ranks) in checks.items()
            if ranks and not found <= allowed
        )


def rank_high(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> bool:
    """Whether samples of one distribution would rank as high as ours among theirs with less than probability
    FALSE_ALARM: Mann and Whitney's test; so far out, its normal approximation errs towards passing."""
    n, m = len(ours), len(theirs)
    above = (ours[:, None] > theirs).sum() + (ours[:, None] == theirs).sum() / 2
    return bool(above - n * m / 2 > NORMAL * math.sqrt(n * m * (n + m + 1) / 12))


def t_quantile(freedom: int) -> float:
    """What the t-distribution exceeds with probability FALSE_ALARM: the normal one's quantile, with the first
    terms of the expansion in 1 / freedom (Abramowitz and Stegun 26.7.5)."""
    z = NORMAL
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def gumbel_limit(samples: NDArray[np.float64], count: int) -> float:
    """What the largest of `count` more samples exceeds with probability FALSE_ALARM."""
    scale = samples.std(ddof=1) * math.sqrt(6) / math.pi
    mode = samples.mean() - np.euler_gamma * scale
    return float(mode + scale * math.log(count / FALSE_ALARM))
