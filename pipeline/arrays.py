"""Array types that all packages use and their sums, the two phases of a request, and the arrays of a single
row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@cache
def one_row(experts: int) -> tuple[IntArray, IntArray, IntArray]:
    """Offsets, rows and counts of so many experts that a single row uses once each."""
    arrays = np.arange(experts + 1, dtype=np.int32), np.zeros(experts, np.int32), np.ones(experts, np.int32)
    for array in arrays:
        array.flags.writeable = False
    return arrays


def sum_on_host(parts: Sequence[FloatArray], shape: tuple[int, ...]) -> FloatArray:
    """Add the workers' partial sums in their order: float32 [R, H], zeros plus each part in turn. The bits
    depend neither on timing nor on who adds."""
    total = np.zeros(shape, np.float32)
    for y in parts:
        total += y
    return total
