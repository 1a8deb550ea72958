"""How far rounding may move log-probabilities from exact ones, measured on this processor.

Where rounding flips a router's choice, or a code of a quantized activation, all later log-probabilities of
that text move: at other tokens in one implementation than in another, and on one processor than on another.
So a text is one sample. How far rounding moves it depends mostly on the text, so each is compared with what
the oracle's own rounding makes of the same text, several times.

What is computed. Under rounding alone a text of ours exceeds the largest of its own S distances with
probability 1 / (S + 1), however distances are distributed. How far it then exceeds them, in logarithms, is
taken to be exponentially distributed, with a quarter of the widest spread (largest over median) that any
text of that model shows. Of n texts some exceed, by so much together: a binomial number of exponential
excesses, whose probability is refused below FALSE_ALARM. Checked with 200 seeds of four models, two of them
beside float32: of 10,000 times that one rounding of 21 texts of 50 tokens was compared with 16 others, the
probability was below 0.01, 0.001 and 0.0003 at most 1.3, 2.3 and 2.0 times as often as it says (in three of
the models never more often), and never below 1e-5. An engine has a factor on top, which makes all of it rarer
still; with it, the engines of the tests have probabilities of 0.02 or more on the processor where this was
written.

What is refused, measured with the mistakes of test_rounding.py, of 21 texts (7 of them alone):

- beside an int4 backbone a wrong scale in one group, which moves a text 4.9 times as far as rounding on
  average, in two texts (chance 2e-12), and swapped groups in two (2e-17); a scale 25 % wrong (1.7 times) in
  all texts (6e-10), and a stale token in all texts alone (9e-13);
- beside float32 all of them and bfloat16 sums in the texts alone (8e-13 or less), or in seven others (3e-13).

What is accepted: beside an int4 backbone a stale token in two texts (1e-2), or in seven that are not alone
(8e-7), and a scale 25 % wrong in two (9e-3) or in seven others (6e-3); beside float32 any mistake in two
texts (5e-6 or more), as a flip may move a text a thousand times as far as its other roundings do. A bound
of twice the largest mean and tail of four roundings of the same two texts refuses the mistakes beside
float32, and with them 7.2 % of correct engines at each check (20,000 draws); beside int4 it refuses the stale
token in half of all pairs of texts, and the scale 25 % wrong in none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]
Floats = NDArray[np.float64]

# For one comparison. The suite makes 60 checks of engines, each of four comparisons, and a few of the oracle:
# fewer than 400, so that one of a million suites has a false alarm.
FALSE_ALARM = 2.5e-9
TAIL = 0.999  # quantile of a text's distances
CALM = 0.02  # quantile of the rows' means: a text begins with rows that have the exact codes and routings
STEEPNESS = 4.0  # the widest spread of a text, in scales of the exponential distribution
LEAST = 1e-12  # nats: what a distance of nothing counts as


@dataclass(frozen=True)
class Distances:
    """Between two sets of log-probabilities, in nats: the mean of each token's row, and each text's 99.9 %
    quantile."""

    rows: Floats  # [texts, tokens]
    tails: Floats  # [texts]

    @classmethod
    def between(cls, ours: Sequence[Rows], exact: Sequence[Rows]) -> Distances:
        errors = [np.abs(a - b) for a, b in zip(ours, exact, strict=True)]
        return cls(
            np.array([e.mean(1) for e in errors], np.float64),
            np.array([np.quantile(e, TAIL) for e in errors], np.float64),
        )

    @property
    def means(self) -> Floats:
        return self.rows.mean(1)

    @property
    def calm(self) -> float:
        return float(np.quantile(self.rows, CALM))


@dataclass(frozen=True)
class Rounding:
    """What the oracle's own rounding makes of the same texts, several times. An engine's rounding may be
    `factor` as large."""

    samples: Sequence[Distances]
    factor: float

    @classmethod
    def of(cls, rounded: Iterable[Sequence[Rows]], exact: Sequence[Rows], factor: float) -> Rounding:
        return cls([Distances.between(rows, exact) for rows in rounded], factor)

    @property
    def tail(self) -> float:
        """The mean over texts and samples, in nats."""
        return float(np.mean([sample.tails for sample in self.samples]))

    def refusal(self, ours: Distances, alone: int) -> str:
        """What of `ours` is no rounding; "" if nothing is. The first `alone` texts are one sample, the others
        another: decoding alone and in batches are two paths. Refused are

        - the texts' means and the texts' tails of either sample, where their `chance` is below FALSE_ALARM;
        - the mean of calm rows, which nothing was flipped for, where it exceeds `factor` times the largest of
          the rounded ones. These means differ by 1 to 4 % (standard deviation) from one rounding to another,
          so that a factor of 1.4 is 8 deviations away; an engine that rounds less often than the oracle has
          0.6 of its mean. Beside float32, where flips move rows a thousandfold, 98 % of the rows would have
          to be moved; by Chernoff's bound on how much of each text flips move, that has a chance of 2.5e-10
          (14 texts of a model with int4 experts, 70 % of rows moved) and less.
        """
        means = np.array([sample.means for sample in self.samples])
        tails = np.array([sample.tails for sample in self.samples])
        found = []
        for name, texts, noise in (("mean", ours.means, means), ("tail", ours.tails, tails)):
            excess = excesses(texts, noise, self.factor)
            scale = spread(noise) / STEEPNESS
            for which, part in (("alone", excess[:alone]), ("batched", excess[alone:])):
                probability = chance(part, scale, len(noise))
                if probability < FALSE_ALARM:
                    found.append(
                        f"{name} of {(part > 0).sum()} of {len(part)} texts {which} is up to "
                        f"{math.exp(part.max()):.3g} times too large, chance {probability:.0e}"
                    )
        calm = self.factor * max(sample.calm for sample in self.samples)
        if not ours.calm <= calm:
            found.append(f"calm rows {ours.calm:.3g}, allowed {calm:.3g}")
        return ", ".join(found)


def excesses(ours: Floats, noise: Floats, factor: float) -> Floats:
    """[texts]: by how much, in logarithms, each of `ours` exceeds `factor` times the largest of its own noise
    [samples, texts]; 0 where it does not."""
    over = logarithms(ours) - logarithms(noise).max(0) - math.log(factor)
    return np.maximum(0.0, over)


def spread(noise: Floats) -> float:
    """The logarithm of largest over median, of the text where it is widest."""
    logs = logarithms(noise)
    return float((logs.max(0) - np.median(logs, 0)).max())


def logarithms(nats: Floats) -> Floats:
    """What is no number counts as infinite."""
    return np.log(np.maximum(np.nan_to_num(nats, nan=np.inf, posinf=np.inf), LEAST))


def chance(excess: Floats, scale: float, samples: int) -> float:
    """The probability that at least as many texts exceed their own noise, by as much together: each does with
    probability 1 / (samples + 1), and then by an exponentially distributed excess of mean `scale`."""
    n, count, p = len(excess), int((excess > 0).sum()), 1 / (samples + 1)
    if count == 0:
        return 1.0
    total = min(float(excess.sum()) / scale, 700.0)  # beyond that the exponential is 0 anyway
    return sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) * exceeded(k, total) for k in range(count, n + 1))


def exceeded(count: int, total: float) -> float:
    """The probability that `count` exponential numbers of mean 1 have a larger sum."""
    return math.exp(-total) * sum(total**i / math.factorial(i) for i in range(count))
