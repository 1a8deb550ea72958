"""Attention of one new token on the host by our kernel, for modules whose attention is ours: in place of keys
and values they get what stands for them in the cache, so that nothing is copied for a single token."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from pipeline.backbone.kv_cache import SequenceKV
from pipeline.device.base import Device
from workers.kernels.c_types import Kept
from workers.kernels.layer import Heads, TokenAttention


class OneToken:
    """The kernel for layers of any heads."""

    def __init__(self, device: Device) -> None:
        """`device`: one with a library of kernels."""
        assert device.library is not None
        self._library, self._team = device.library, device.team
        self._scratch = Kept()

    @functools.cache  # noqa: B019 - one for each kind of layer
    def kernel(self, *facts: float) -> TokenAttention:
        """For such `Heads`, without sinks: all but these and the scale, then that."""
        *sizes, scale = facts
        return TokenAttention(self._library, self._team, Heads(*sizes, None, scale), self._scratch)


class Stored:
    """One layer's keys or values [1, heads, N, width] of a sequence with one new token, which is stored
    too."""

    def __init__(
        self, one: OneToken, kv: SequenceKV, place: tuple[int, int], columns: slice, window: int | None
    ) -> None:
        """`place`: layer and stream; `columns`: of the stream's numbers; `window`: the last tokens that
        count."""
        self._one, self._kv, self._place, self._columns, self._window = one, kv, place, columns, window
        first = 0 if window is None else max(0, kv.length + 1 - window)
        self._seen = first, kv.length + 1
        layer, stream = place
        _, heads, _, width = kv.pool.slabs[layer][stream].numbers.shape
        self.shape = torch.Size((1, heads, kv.length + 1 - first, len(range(width)[columns])))

    def read(self) -> Tensor:
        """A copy of all."""
        return self._kv.read(*self._place, *self._seen, self._kv.pool.wide)[None, ..., self._columns]

    def attend(self, q: Tensor, value_width: int, scale: float, latent: bool = False) -> Tensor:
        """Attention of q [heads, width] to these keys: float32 [heads, value_width]. Values are those of the
        same layer; if `latent`, the first numbers of the keys."""
        kv, pool = self._kv, self._kv.pool
        heads, width = q.shape
        bits, window = 8 * pool.dtype.itemsize, self._window or 0
        kernel = self._one.kernel(bits, heads, self.shape[1], width, value_width, int(latent), window, scale)
        q, out = q.float().contiguous(), torch.empty(heads, value_width)
        streams = pool.addresses_of(self._place[0])
        kernel(q.data_ptr(), streams, kv.blocks.ctypes.data, kv.capacity, kv.length, out.data_ptr())
        return out
