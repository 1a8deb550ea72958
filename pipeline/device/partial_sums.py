"""The sum of the workers' partial sums, in their order: its bits depend neither on timing nor on who adds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.arrays import FloatArray


def sum_on_host(parts: Sequence[FloatArray], shape: tuple[int, ...]) -> FloatArray:
    """float32 [R, H]: zeros plus each part, of the same shape, in turn."""
    total = np.zeros(shape, np.float32)
    for y in parts:
        total += y
    return total
