"""Attention of many new tokens of one sequence in C: `c/kernels.h` specifies it.

Arrays are passed by address.
"""

from __future__ import annotations

import ctypes

from workers.kernels.c_types import POINTER, SIZE, checked, typed
from workers.kernels.layer import Grouped
from workers.kernels.matrix import Address
from workers.kernels.memory import Kept
from workers.kernels.native import Library, Team


class SpanKernel:
    """Attention with query heads in groups that share keys and values. Used by one thread at a time, like the
    scratch, which layers share."""

    def __init__(self, library: Library, team: Team | None, grouped: Grouped, scratch: Kept) -> None:
        types = (*[POINTER] * 7, SIZE, SIZE, SIZE, POINTER, POINTER)
        self._function = typed(library.functions.tandem_span, *types, result=checked)
        self._team, self._grouped, self._scratch = team, grouped, scratch
        each = typed(library.functions.tandem_span_scratch, POINTER, result=SIZE)
        self._size = (1 if team is None else team.threads) * each(ctypes.byref(grouped))

    def __call__(
        self,
        qkv: Address,
        cos_sin: tuple[Address, Address],
        streams: tuple[Address, Address],
        capacity: int,
        position: int,
        count: int,
        out: Address,
    ) -> None:
        """`count` tokens, the first after `position` others: qkv [count, (heads + 2 kv_heads) * width],
        changed in place; cosines and sines [count, width]; the streams are keys and values [kv_heads,
        capacity, width]; out [count, heads * width]. Raises IndexError for positions outside the capacity."""
        team = None if self._team is None else self._team.handle
        self._function(
            team, ctypes.byref(self._grouped), qkv, *cos_sin, *streams, capacity, position, count, out,
            self._scratch.reserve(self._size),
        )  # fmt: skip
