"""Shares for tests, made of plain numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.experts.division import Share


def share_of(
    items: Sequence[tuple[int, int, int]],
    rows: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]] | None = None,
) -> Share:
    """Items (expert, lo, hi) with the rows of each; the weights are 1 if not given."""
    flat = [row for of_item in rows for row in of_item]
    numbers = [1.0] * len(flat) if weights is None else [w for of_item in weights for w in of_item]
    return Share(
        np.array(items, np.int32).reshape(-1, 3),
        np.cumsum([0, *map(len, rows)], dtype=np.int32),
        np.array(flat, np.int32),
        np.array(numbers, np.float32),
    )
