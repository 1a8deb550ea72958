"""The number of experts that each layer's cache keeps: AdapMoE's expected on-demand loads and their minimum.

E experts a layer, k a token, L layers. A cache of size t holds t of the layer's E experts, assumed to be
independent of the experts that are needed (the paper's equation 10). Sizes are whole experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import comb
from typing import Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

from pipeline.policies.calibration import at_limits
from pipeline.policies.view import View

Floats = NDArray[np.float64]
Predictor = Literal["raw", "residual"]

# weight of a size's square, added to its loads: of equal loads the more even sizes win. Without prefetch the
# loads are linear in the size, and every division of the total would tie.
_EVEN = 1e-12


def expected_loads(experts: int, needed: Sequence[float], accuracy: float) -> Floats:
    """The expected on-demand loads of one layer a token, float64 [E + 1]: one for each cache size 0..E.

    `needed[j]` is the share of tokens that need j experts, `accuracy` the share of predictions that come
    true. Of j needed experts M ~ Hypergeometric(E, E - t, j) miss the cache; a right prediction has loaded
    one of them in time, so E[(M - accuracy) * 1(M >= 1)] = E[M] - accuracy * P(M >= 1) are left. For j in
    1..2 this is the paper's equations 11 to 15. Raises ValueError where `needed` counts more experts than a
    layer has."""
    if len(needed) > experts + 1:
        raise ValueError(f"{len(needed) - 1} experts cannot be needed of {experts}")
    loads = np.zeros(experts + 1)
    absent = np.arange(experts, -1, -1) / experts
    for j, share in enumerate(needed):
        loads += share * (j * absent - accuracy * (1 - _all_cached(experts, j)))
    return loads


@lru_cache(maxsize=64)
def _all_cached(experts: int, j: int) -> Floats:
    """The probability that j needed experts are all in the cache, for each size of it, [E + 1]."""
    return np.array([comb(size, j) / comb(experts, j) for size in range(experts + 1)])


def best_sizes(loads: ArrayLike, total: int) -> list[int]:
    """The sizes, one a layer, that minimise the summed loads with at most `total` experts in all: the paper's
    knapsack, equations 16 to 19. `loads` is [L, E + 1]."""
    table = np.asarray(loads, dtype=np.float64)
    layers, sizes = table.shape
    total = min(total, layers * (sizes - 1))
    best = np.zeros(total + 1)  # [j]: the least loads of the layers so far with at most j experts
    chosen = []
    for layer in range(layers):
        # [j, size]: the least loads of the earlier layers with j - size experts, inf below 0
        left = sliding_window_view(np.concatenate((np.full(sizes - 1, np.inf), best)), sizes)[:, ::-1]
        with_size = left + table[layer]
        chosen.append(with_size.argmin(axis=1))
        best = with_size.min(axis=1)
    answer = []
    for choice in reversed(chosen):
        answer.append(int(choice[total]))
        total -= answer[-1]
    return answer[::-1]


def filled(sizes: Sequence[int], experts: int, total: int) -> list[int]:
    """The sizes with the rest of `total` added, one expert at a time to the smallest layer."""
    answer = list(sizes)
    for _ in range(min(total, len(answer) * experts) - sum(answer)):
        answer[answer.index(min(answer))] += 1
    return answer


def layer_sizes(
    view: View, total: int, limits: Sequence[float], predictor: Predictor | None = "raw"
) -> list[int]:
    """AdapMoE's cache sizes, whole experts a layer, for `total` experts over all layers (all are distributed,
    as far as layers have experts).

    `limits` [L]: the share of a token's weight that the gate in force may drop, from which the calibration's
    tables have the experts that tokens keep and the accuracy of predictions, both in decode. `predictor`: the
    one to plan with, None without prefetch; the first layer has the accuracy of its trained gate, 0 without
    one. The view has a calibration."""
    shape, calibration = view.shape, view.calibration
    assert calibration is not None
    needed = at_limits(calibration.kept, limits)
    accuracy = np.zeros(shape.layers)
    if predictor is not None:
        accuracy[:] = at_limits(calibration.gated_accuracy[predictor], limits)
        first = at_limits(calibration.gated_accuracy["first"], limits)[0]
        accuracy[0] = first if calibration.first_gate is not None else 0.0
    loads = [
        expected_loads(shape.experts, share, right)
        for share, right in zip(needed.tolist(), accuracy.tolist(), strict=True)
    ]
    uneven = _EVEN * np.arange(shape.experts + 1) ** 2
    return filled(best_sizes(np.array(loads) + uneven, total), shape.experts, total)
