"""Which experts will be needed last, where only some are in memory, and how many a routing has to read.

An expert whose layer comes in d of L layers, and which a share p of the latest steps used, is expected to
be needed in d / L + 1 / p - 1 steps: in a prompt, where p is nearly 1 for all of them, that is the layer that
has just been computed, and where single tokens are decoded the expert that is used least.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import IntArray

Shares = NDArray[np.float64]

STEPS = 64  # of which p is a mean
LEAST_SHARE = 1e-3  # p of an expert that was not used for long


class ExpertUse:
    """The shares p of all experts."""

    def __init__(self, share: Shares) -> None:
        """share [L, E], what is known at the beginning; it is kept and changed."""
        self.share = share

    def book(self, layer: int, experts: IntArray) -> None:
        """A step has used these experts of a layer."""
        self.share[layer] *= 1 - 1 / STEPS
        self.share[layer, experts] += 1 / STEPS

    def until_needed(self, layer: int) -> Shares:
        """Returns the expected steps [L, E], and one, until an expert is needed after this layer."""
        layers = len(self.share)
        coming = (np.arange(layers) - layer - 1) % layers + 1
        expected: Shares = coming[:, None] / layers + 1 / np.maximum(self.share, LEAST_SHARE)
        return expected


def misses(
    steps: Iterable[Sequence[IntArray]], counted: Iterable[int], share: Shares, capacity: int
) -> float:
    """Returns how many experts a token has to read, where `capacity` experts are in memory and nothing is
    read ahead. The most used ones are there at first. `steps`: the experts of each layer; `counted`: the
    tokens of each step, 0 for one that only warms. share [L, E], of earlier steps."""
    use = ExpertUse(share.copy())
    resident = np.zeros(share.shape, bool)
    resident.ravel()[np.argsort(-share, axis=None, kind="stable")[:capacity]] = True
    missed = tokens = 0
    for layers, rows in zip(steps, counted, strict=True):
        tokens += rows
        for layer, experts in enumerate(layers):
            use.book(layer, experts)
            missed += (rows > 0) * int(np.count_nonzero(~resident[layer, experts]))
            resident[layer, experts] = True
            if (over := int(np.count_nonzero(resident)) - capacity) > 0:
                expected = np.where(resident, use.until_needed(layer), -1.0)
                expected[layer, experts] = -1.0
                resident.ravel()[np.argpartition(expected, -over, axis=None)[-over:]] = False
    return missed / max(tokens, 1)
