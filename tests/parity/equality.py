"""The one rule of equality between two results (DESIGN.md section 4), as tests apply it.

Log-probabilities agree within a bound. Greedy tokens are equal, or their first difference is at a near-tie:
where the reference's two best log-probabilities are closer than the bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def near_tie_or_equal(
    tokens: Sequence[int], reference: Sequence[int], logprobs: NDArray[np.float32], bound: float
) -> bool:
    """True where the sequences are equal or first differ at a near-tie; logprobs [len(reference), vocabulary]
    are the reference's at each of its steps."""
    for step, (ours, theirs) in enumerate(zip(tokens, reference, strict=True)):
        if ours != theirs:
            second, best = np.partition(logprobs[step], -2)[-2:]
            return bool(best - second < bound and logprobs[step, ours] >= second)
    return True
