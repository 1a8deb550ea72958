"""Masks: the channels of an expert that a row computes, in the formats whose gate and down lie by channel,
and what a mask left out.

A channel's u is its up row times x, plus its bias if it has one; y is the sum over the kept channels of
f(gate . x, u) * down. Each row has a mask of its own: its result depends on no other row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shm.formats import Float32

ROUNDING = 1 / 256  # of a channel: a share in float32 times the channels may lie so far above a whole number


@dataclass(frozen=True)
class Mask:
    """A row keeps the channels with |u| >= threshold; or with share < 1 instead, of each tile's channels the
    share with the largest |u|, the smaller index of equal ones. Both are float32 where they are used. NaN
    counts as larger than any number."""

    threshold: float = 0.0
    share: float = 1.0

    def __post_init__(self) -> None:
        if not is_mask(self.threshold, self.share):
            raise ValueError(f"no mask keeps |u| >= {self.threshold} or a share of {self.share}")

    def number(self, channels: int) -> int:
        """The channels that a row keeps of a tile, where share < 1."""
        return math.ceil(float(np.float32(self.share)) * channels - ROUNDING)

    def keeps(self, u: Float32) -> NDArray[np.bool_]:
        """bool [rows, T], for u float32 [rows, T] of one tile."""
        size = np.ascontiguousarray(u, np.float32).view(np.int32) & 0x7FFFFFFF  # they order like magnitudes
        if self.share == 1:
            return size >= np.float32(self.threshold).view(np.int32)
        order = np.argsort(-size, axis=1, kind="stable")[:, : self.number(u.shape[1])]
        kept = np.zeros(u.shape, np.bool_)
        np.put_along_axis(kept, order, True, axis=1)
        return kept


def is_mask(threshold: float, share: float) -> bool:
    return 0 <= threshold < math.inf and 0 <= share <= 1


DENSE = Mask()


@dataclass(frozen=True)
class Tally:
    """Sums of what masks kept and left out; all 0 for formats without them. `mass` and `left`: sums of |u|
    over rows and channels, of all and of those left out; 0 where they are not finite. `kept`: channels that
    were read for any row, of `channels`."""

    mass: float = 0.0
    left: float = 0.0
    kept: int = 0
    channels: int = 0

    @classmethod
    def of(cls, parts: Iterable[Tally]) -> Tally:
        """Returns the sum of these tallies, added in their order."""
        mass, left, kept, channels = 0.0, 0.0, 0, 0
        for part in parts:
            mass, left = mass + part.mass, left + part.left
            kept, channels = kept + part.kept, channels + part.channels
        return cls(mass, left, kept, channels)


NOTHING = Tally()
