"""The search for the strongest setting of an approximation that a text allows: AdapMoE's threshold, or the
contextual sparsity.

AdapMoE's gate (section 4.2) drops a token's smallest weights as long as (their normalised sum)^2 * s_l <= T.
For two experts this is equation 8, (1 - alpha)^2 * s_l <= T. So only finitely many T differ: those from which
on a token of the text loses another expert in a layer. The search bisects their ranks, not their values,
which span many powers of ten.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import NamedTuple

import numpy as np

from pipeline.arrays import FloatArray


class Threshold(NamedTuple):
    """The result of a search. Losses are the values of `loss`."""

    value: float  # T; 0 where no other T kept the loss within the bound
    loss: float  # at T
    exact: float  # at 0
    tried: tuple[tuple[float, float], ...]  # every T with its loss, in the order tried; the first is 0


def perturbations(weights: FloatArray, sensitivity: float) -> FloatArray:
    """The thresholds from which on a token loses another of its experts: one layer's routing weights [R, k]
    and its s_l to float32 [R, k - 1], ascending in each row."""
    ascending = np.sort(weights.astype(np.float64), axis=1)
    total = ascending.sum(axis=1, keepdims=True)
    dropped = ascending[:, :-1].cumsum(axis=1) / np.where(total > 0, total, 1)
    squares: FloatArray = (dropped**2 * sensitivity).astype(np.float32)
    return squares


def largest_threshold(
    candidates: FloatArray,
    loss: Callable[[float], float],
    added: Callable[[float], float],
    evaluations: int,
) -> Threshold:
    """The largest candidate T with a loss of at most the loss at 0 and what `added` of that allows.

    `candidates`: the perturbations of the text's tokens in all layers, in any shape. `loss(T)`: the mean
    negative log-likelihood of the text under the adaptive gate with T; it is called with 0, with the largest
    candidate, and then with the middle one of those in question, at most `evaluations` times in all, at least
    2, so that 6 more leave 1/64 of the candidates undecided.

    A loss need not grow with T. The returned T was tried, keeps the bound, and is below every tried T that
    does not; a larger T that happens to keep the bound too is not searched for, except the largest. A NaN
    loss does not keep the bound. Raises ValueError without candidates, for negative or non-finite ones, and
    where the loss at 0 is not finite."""
    ranked = np.sort(np.asarray(candidates, np.float64), axis=None)
    if not len(ranked) or not np.isfinite(ranked).all() or ranked[0] < 0:
        raise ValueError("a threshold is found among one or more finite numbers from 0 on")
    exact = loss(0.0)
    if not isfinite(exact):
        raise ValueError(f"the loss without a gate is {exact}")
    most = exact + added(exact)
    tried = [(0.0, exact)]
    best = tried[0]
    kept = int(np.searchsorted(ranked, 0.0, side="right"))  # candidates up to the best T
    broken = len(ranked)  # the first candidate that breaks the bound, or is undecided from above
    rank = broken - 1
    while kept < broken and len(tried) < max(evaluations, 2):
        value = float(ranked[rank])
        tried.append((value, loss(value)))
        if tried[-1][1] <= most:
            best = tried[-1]
            kept = int(np.searchsorted(ranked, value, side="right"))
        else:
            broken = int(np.searchsorted(ranked, value, side="left"))
        rank = (kept + broken) // 2
    return Threshold(best[0], best[1], exact, tuple(tried))
