"""The rule of equality (launch/equality.py) for tests that know whole rows of log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from launch.equality import Step, Verdict, compare


def near_tie_or_equal(
    tokens: Sequence[int], reference: Sequence[int], logprobs: NDArray[np.float32], bound: float
) -> bool:
    """True where the sequences are equal or first differ at a near-tie; logprobs [len(reference), vocabulary]
    are the reference's at each of its steps."""
    steps = []
    for token, row in zip(reference, logprobs, strict=True):
        second, best = np.argpartition(row, -2)[-2:]
        rival = second if best == token else best
        steps.append(Step(token, int(rival), float(row[best] - row[second])))
    return compare(tokens, steps, bound).verdict is not Verdict.MISMATCH
