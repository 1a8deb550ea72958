"""Which channels a mask keeps, and sums of what masks left out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shm.mask import Mask

ROWS = hnp.arrays(np.float32, st.tuples(st.integers(0, 3), st.integers(1, 40)), elements=st.floats(width=32))


@given(ROWS, st.floats(0, 2.0**99, width=32))
def test_a_threshold_keeps_what_reaches_it(u: np.ndarray, threshold: float) -> None:
    np.testing.assert_array_equal(Mask(threshold).keeps(u), ~(np.abs(u) < np.float32(threshold)))  # NaN too


@given(ROWS, st.floats(0, 0.875, width=32))
def test_a_share_keeps_the_largest_of_each_row_and_the_first_of_equal_ones(
    u: np.ndarray, share: float
) -> None:
    u = np.where(np.isnan(u), np.float32(np.nan), u)  # of one pattern
    mask = Mask(threshold=3.0, share=share)
    for row, kept in zip(u, mask.keeps(u), strict=True):
        order = sorted(range(len(row)), key=lambda c: (not np.isnan(row[c]), -abs(float(row[c])), c))
        assert sorted(order[: mask.number(len(row))]) == np.flatnonzero(kept).tolist()


@pytest.mark.parametrize(
    ("share", "channels", "number"),
    [
        (0.2, 20, 4),
        (1 - 0.9, 10, 1),
        (0.3, 14336, 4301),
        (0.0, 64, 0),
        (1e-9, 64, 0),
        (0.01, 64, 1),
        (0.999, 4, 4),
    ],
)
def test_a_share_is_rounded_up_but_for_its_own_rounding(share: float, channels: int, number: int) -> None:
    assert Mask(share=share).number(channels) == number


@pytest.mark.parametrize(
    "values", [(-1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (0.0, -0.1), (0.0, 1.1), (0.0, math.nan)]
)
def test_other_masks_are_refused(values: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="no mask keeps"):
        Mask(*values)
