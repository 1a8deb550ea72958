"""The sum of the workers' partial sums, in shard order: its bits depend neither on timing nor on who adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import FloatArray


class Part(NamedTuple):
    """One shard's partial sum."""

    y: FloatArray  # [n, H]
    kept: NDArray[np.intp]  # [n]: the rows of the whole that it has, ascending


def sum_on_host(parts: Sequence[Part], shape: tuple[int, ...]) -> FloatArray:
    """float32 [R, H]: zeros plus each part in turn."""
    total = np.zeros(shape, np.float32)
    for y, kept in parts:
        if len(y) == len(total):  # all rows: much faster than by their numbers
            total += y
        else:
            total[kept] += y
    return total
