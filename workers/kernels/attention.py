"""The C kernels of what lies between two products with weights when one token is decoded: attention of one
new token, and RMS norm. `c/kernels.h` says what they compute.

Arrays are given by their addresses, because their owner's tensors know those: what is behind them is checked
where they are made. Everything but the cached numbers is float32.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from workers.kernels.native import Library, Team

Address = int
NORMS = ("", "head", "all")  # of queries and keys: none, of each head, of all heads together
SHARED_BYTES = 1 << 17  # of the cache: below, one core reads them sooner than it wakes another


class _Grouped(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("bits", "heads", "kv_heads", "width", "window", "normed")),
        *((name, ctypes.c_void_p) for name in ("query_norm", "key_norm")),
        *((name, ctypes.c_float) for name in ("eps", "clip", "scale")),
    )


class _Latent(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("bits", "heads", "rank", "plain", "rotated", "value")),
        *((name, ctypes.c_void_p) for name in ("norm", "expansion")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    )


@dataclass(frozen=True)
class Turn:
    """Cosines and sines [width] of a position; the sines carry the signs of the halves."""

    cosines: Address
    sines: Address


class _Scratch:
    """Room for float32 numbers that grows."""

    def __init__(self) -> None:
        self._room = np.empty(0, np.float32)

    def address(self, numbers: int) -> Address:
        if numbers > len(self._room):
            self._room = np.empty(2 * numbers, np.float32)
        address: Address = self._room.ctypes.data
        return address


class GroupedHeads:
    """Query heads in groups that share keys and values. Used by one thread at a time."""

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
        self._function = _function(library.functions.tandem_grouped, 7, (2, 2, 1))
        self._team = team
        self._window = window
        self._heads = heads
        self._token_bytes = 2 * kv_heads * width * bits // 8
        scale = width**-0.5
        self._facts = _Grouped(
            bits,
            heads,
            kv_heads,
            width,
            window or 0,
            NORMS.index(norm),
            query_norm,
            key_norm,
            eps,
            clip or 0,
            scale,
        )
        self._scratch = _Scratch()

    def one(
        self,
        qkv: Address,
        turn: Turn,
        streams: tuple[Address, Address],
        capacity: int,
        position: int,
        out: Address,
        watch: int,
    ) -> None:
        """A token after `position` others: qkv [(heads + 2 kv_heads) * width], changed in place; the streams
        are keys and values [kv_heads, capacity, width]; out [heads * width]. `watch`: nanoseconds in which
        the team looks for what comes next."""
        seen = position + 1 if self._window is None else min(position + 1, self._window)
        team = _worth(self._team, seen * self._token_bytes, watch)
        scratch = self._scratch.address(self._heads * seen)
        self._function(
            team, ctypes.byref(self._facts), qkv, turn.cosines, turn.sines, *streams, capacity, position, out,
            scratch, watch,
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
        plain: int,
        rotated: int,
        value: int,
        norm: Address,
        expansion: Address,
        eps: float,
        scale: float,
    ) -> None:
        """`norm` [rank]; `expansion` [heads, plain + value, rank], of `bits` each like the cached numbers."""
        self._function = _function(library.functions.tandem_latent, 7, (1, 2, 1))
        self._team = team
        self._heads, self._room = heads, 2 * rank + rotated
        self._token_bytes = (rank + rotated) * bits // 8
        self._expansion_bytes = heads * (plain + value) * rank * bits // 8
        self._facts = _Latent(bits, heads, rank, plain, rotated, value, norm, expansion, eps, scale)
        self._scratch = _Scratch()

    def one(
        self,
        q: Address,
        latent: Address,
        turn: Turn,
        cache: Address,
        position: int,
        out: Address,
        watch: int,
    ) -> None:
        """A token after `position` others: q [heads, plain + rotated] and latent [rank + rotated], changed in
        place; cache [capacity, rank + rotated]; out [heads * value]."""
        seen = position + 1
        team = _worth(self._team, seen * self._token_bytes + self._expansion_bytes, watch)
        scratch = self._scratch.address(self._heads * (self._room + seen))
        self._function(
            team, ctypes.byref(self._facts), q, latent, turn.cosines, turn.sines, cache, position, out,
            scratch, watch,
        )  # fmt: skip


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight, row by row."""

    def __init__(self, library: Library, weight: Address, width: int, eps: float) -> None:
        self._function: Any = library.functions.tandem_rms_norm
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._function.argtypes = (pointer, pointer, size, size, ctypes.c_float, pointer)
        self._function.restype = None
        self._weight, self._width, self._eps = weight, width, eps

    def __call__(self, x: Address, rows: int, out: Address) -> None:
        """x and out [rows, width], which may be the same."""
        self._function(x, self._weight, rows, self._width, self._eps, out)


def _worth(team: Team | None, nbytes: int, watch: int) -> int | None:
    """The team's handle where its threads are awake, or there is enough to read to wake them."""
    return None if team is None or not (watch or nbytes >= SHARED_BYTES) else team.handle


def _function(function: Any, pointers: int, then: tuple[int, int, int]) -> Any:
    """With the types of its arguments: pointers, sizes, pointers, sizes."""
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    sizes, more, last = then
    function.argtypes = (*[pointer] * pointers, *[size] * sizes, *[pointer] * more, *[size] * last)
    function.restype = None
    return function
