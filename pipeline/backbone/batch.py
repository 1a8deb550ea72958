"""The rows of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from pipeline.backbone.kv_cache import SequenceKV


@dataclass(frozen=True)
class TokenSpan:
    """Consecutive new tokens of one sequence in a step."""

    kv: SequenceKV
    tokens: Sequence[int]


@dataclass(frozen=True)
class Batch:
    """The slices' tokens, one after the other; made by `Backbone.batch`."""

    slices: Sequence[TokenSpan]
    rows: int
    tokens: Tensor  # [R] int64, on the device
    turn: tuple[Tensor, Tensor]  # cosines and sines [R, 1, width] of the rows' positions
    # For each sliding window in use: for each slice [T, N] bool, or None where each row sees all N tokens.
    masks: dict[int | None, list[Tensor | None]]

    @cached_property
    def single(self) -> bool:
        """Whether each sequence has one new token."""
        return self.rows == len(self.slices)
