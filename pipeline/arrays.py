"""Array types that all packages use, the two phases of a request, and the arrays of a single row."""

from __future__ import annotations

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
