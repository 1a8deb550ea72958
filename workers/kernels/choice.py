"""The choice of kernels and of how they compute, which differs between processors and is the same in all
processes of an engine.

The default is for any processor; `tuning.py` measures what is faster on this one. Hint and distance of the
prefetches change no bit. The variant changes those of bf16 and of attention (sums over more or fewer lanes)
and, between `portable` and the others, of the quantized formats (fused additions); `matrix_rows` those of
bf16.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, get_args

import msgspec

MOST_AHEAD = 1 << 20  # bytes
MOST_ROWS = 1 << 16
Hint = Literal["none", "nta", "t0", "t1"]
HINTS: tuple[Hint, ...] = get_args(Hint)  # in the order of c/kernels.h


@dataclass(frozen=True)
class Prefetch:
    """How weights are prefetched that are read once: a hint of HINTS and bytes ahead."""

    hint: Hint = "t0"
    ahead: Annotated[int, msgspec.Meta(ge=0, le=MOST_AHEAD)] = 4096

    def __str__(self) -> str:
        return "no prefetch" if self.hint == "none" else f"prefetch {self.hint} {self.ahead} bytes ahead"

    @property
    def number(self) -> int:
        """The hint as c/kernels.h counts."""
        return HINTS.index(self.hint)


@dataclass(frozen=True)
class Choice:
    """A choice of kernels. `variant`: of VARIANTS; "": the first one that can be used here. `matrix_rows`:
    rows of a product from which matrix units compute it, in a variant that has them."""

    variant: str = ""
    prefetch: Prefetch = Prefetch()
    matrix_rows: Annotated[int, msgspec.Meta(ge=1, le=MOST_ROWS)] = 12

    def to_map(self) -> dict[str, Any]:
        """Returns it for a child's configuration and for JSON."""
        return asdict(self)

    @classmethod
    def from_map(cls, data: Any) -> Choice:
        """The inverse of `to_map`. Raises msgspec.ValidationError for anything else."""
        return msgspec.convert(data, cls)


DEFAULT = Choice()
