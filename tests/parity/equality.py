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
    for place, (token, row) in enumerate(zip(reference, logprobs, strict=True)):
        ours = tokens[place] if place < len(tokens) else token
        steps.append(Step(token, ours, float(row.max() - min(row[ours], row[token]))))
    return compare(tokens, steps, bound).verdict is not Verdict.MISMATCH
