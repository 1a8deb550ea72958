"""C kernels of attention, and of RMS norm: the operations between two products with weights.
`c/kernels.h` specifies them.

Arrays are passed by address, because the callers hold torch tensors; the callers check shapes and types when
they create those. Everything but the cached numbers is float32.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from workers.kernels.c_types import POINTER, SIZE, checked, typed
from workers.kernels.native import Library, Team

Address = int
NORMS = ("", "head", "all")  # of queries and keys: none, of each head, of all heads together
LINE_NUMBERS = 16  # float32 numbers of a cache line
SHARED_BYTES = 1 << 17  # of the KV cache: less than this, one core reads sooner than it wakes another


class _Grouped(ctypes.Structure):
    _fields_ = (
        *((name, SIZE) for name in ("bits", "heads", "kv_heads", "width", "window", "normed")),
        *((name, POINTER) for name in ("query_norm", "key_norm")),
        *((name, ctypes.c_float) for name in ("eps", "clip", "scale")),
    )


class _Latent(ctypes.Structure):
    _fields_ = (
        *((name, SIZE) for name in ("bits", "heads", "rank", "nope", "rope", "value")),
        *((name, POINTER) for name in ("norm", "expansion")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    )


@dataclass(frozen=True)
class CosSin:
    """RoPE's cosines and sines [width] of a position; the sines carry the signs of the halves."""

    cosines: Address
    sines: Address


class _Scratch:
    """A growing float32 buffer."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.float32)

    def address(self, numbers: int) -> Address:
        if numbers > len(self._buffer):
            self._buffer = np.empty(2 * numbers, np.float32)
        address: Address = self._buffer.ctypes.data
        return address


class GroupedHeads:
    """Query heads in groups that share keys and values, for one new token or many. Used by one thread at
    a time."""

    def __init__(
        self,
        library: Library,
        team: Team | None,
        *,
        bits: int,
        heads: int,
        kv_heads: int,
        width: int,
        window: int | None,
        norm: str,
        query_norm: Address | None,
        key_norm: Address | None,
        eps: float,
        clip: float | None,
    ) -> None:
        """`bits` of a cached number, 16 (bf16) or 32; `norm` is one of NORMS, with the weights of both."""
        types = (*[POINTER] * 7, SIZE, SIZE, POINTER, POINTER, SIZE)
        self._function = typed(library.functions.tandem_grouped, *types, result=checked)
        types = (*[POINTER] * 7, SIZE, SIZE, SIZE, POINTER, POINTER)
        self._span = typed(library.functions.tandem_span, *types, result=checked)
        self._team = team
        self._window = window
        self._heads = heads
        self._token_bytes = 2 * kv_heads * width * bits // 8
        normed = NORMS.index(norm), query_norm, key_norm
        self._facts = _Grouped(
            bits, heads, kv_heads, width, window or 0, *normed, eps, clip or 0, width**-0.5
        )
        self._scratch = _Scratch()
        scratch = typed(library.functions.tandem_span_scratch, POINTER, result=SIZE)
        threads = 1 if team is None else team.threads
        self._span_numbers = threads * scratch(ctypes.byref(self._facts)) // 4 + LINE_NUMBERS

    def attend(
        self,
        qkv: Address,
        cos_sin: CosSin,
        streams: tuple[Address, Address],
        capacity: int,
        position: int,
        out: Address,
        spin_ns: int,
    ) -> None:
        """A token after `position` others: qkv [(heads + 2 kv_heads) * width], changed in place; the streams
        are keys and values [kv_heads, capacity, width]; out [heads * width]. `spin_ns`: nanoseconds for
        which the team spins for the next call. Raises IndexError for a position outside the capacity."""
        seen = position + 1 if self._window is None else min(position + 1, self._window)
        team = _team_if_worthwhile(self._team, seen * self._token_bytes, spin_ns)
        scratch = self._scratch.address(self._heads * seen)
        self._function(
            team, ctypes.byref(self._facts), qkv, cos_sin.cosines, cos_sin.sines, *streams, capacity,
            position, out, scratch, spin_ns,
        )  # fmt: skip

    def attend_span(
        self,
        qkv: Address,
        cos_sin: CosSin,
        streams: tuple[Address, Address],
        capacity: int,
        position: int,
        count: int,
        out: Address,
    ) -> None:
        """`count` new tokens of a sequence, the first after `position` others: qkv [count,
        (heads + 2 kv_heads) * width], changed in place; cosines and sines [count, width]; out [count,
        heads * width]. Raises IndexError for positions outside the capacity."""
        line = 4 * LINE_NUMBERS
        scratch = -(-self._scratch.address(self._span_numbers) // line) * line
        team = None if self._team is None else self._team.handle
        self._span(
            team, ctypes.byref(self._facts), qkv, cos_sin.cosines, cos_sin.sines, *streams, capacity,
            position, count, out, scratch,
        )  # fmt: skip


class LatentHeads:
    """Keys and values expanded from one cached vector a token. Used by one thread at a time."""

    def __init__(
        self,
        library: Library,
        team: Team | None,
        *,
        bits: int,
        heads: int,
        rank: int,
        nope: int,
        rope: int,
        value: int,
        norm: Address,
        expansion: Address,
        eps: float,
        scale: float,
    ) -> None:
        """`norm` [rank]; `expansion` [heads, nope + value, rank], of `bits` each like the cached numbers."""
        types = (*[POINTER] * 7, SIZE, SIZE, POINTER, POINTER, SIZE)
        self._function = typed(library.functions.tandem_latent, *types, result=checked)
        self._team = team
        self._heads, self._head_scratch = heads, 2 * rank + rope
        self._token_bytes = (rank + rope) * bits // 8
        self._expansion_bytes = heads * (nope + value) * rank * bits // 8
        self._facts = _Latent(bits, heads, rank, nope, rope, value, norm, expansion, eps, scale)
        self._scratch = _Scratch()

    def attend(
        self,
        q: Address,
        latent: Address,
        cos_sin: CosSin,
        cache: Address,
        capacity: int,
        position: int,
        out: Address,
        spin_ns: int,
    ) -> None:
        """A token after `position` others: q [heads, nope + rope] and latent [rank + rope], changed in place;
        cache [capacity, rank + rope]; out [heads * value]. Raises IndexError for a position outside the
        capacity."""
        seen = position + 1
        team = _team_if_worthwhile(self._team, seen * self._token_bytes + self._expansion_bytes, spin_ns)
        scratch = self._scratch.address(self._heads * (self._head_scratch + seen))
        self._function(
            team, ctypes.byref(self._facts), q, latent, cos_sin.cosines, cos_sin.sines, cache, capacity,
            position, out, scratch, spin_ns,
        )  # fmt: skip


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight, row by row."""

    def __init__(self, library: Library, weight: Address, width: int, eps: float) -> None:
        types = (POINTER, POINTER, SIZE, SIZE, ctypes.c_float, POINTER)
        self._function = typed(library.functions.tandem_rms_norm, *types)
        self._weight, self._width, self._eps = weight, width, eps

    def __call__(self, x: Address, rows: int, out: Address) -> None:
        """x and out [rows, width], which may be the same."""
        self._function(x, self._weight, rows, self._width, self._eps, out)


def _team_if_worthwhile(team: Team | None, nbytes: int, spin_ns: int) -> int | None:
    """The team's handle if its threads spin already, or `nbytes` to read are worth waking them."""
    return None if team is None or not (spin_ns or nbytes >= SHARED_BYTES) else team.handle
