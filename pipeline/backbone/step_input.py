"""What a step is asked to compute: tokens of sequences, and which of their rows' logits somebody wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.backbone.batch import TokenSpan


@dataclass(frozen=True)
class StepInput:
    """Consecutive new tokens of one sequence, and which rows' logits are wanted."""

    slice: TokenSpan
    wanted: Literal["none", "last", "all"]


def wanted_rows(pieces: Sequence[StepInput]) -> tuple[list[int], list[int]]:
    """The rows of the step whose logits are wanted, and how many of them are each piece's."""
    rows: list[int] = []
    counts = []
    start = 0
    for piece in pieces:
        end = start + len(piece.slice.tokens)
        chosen = {"none": range(0), "last": range(end - 1, end), "all": range(start, end)}[piece.wanted]
        rows.extend(chosen)
        counts.append(len(chosen))
        start = end
    return rows, counts
