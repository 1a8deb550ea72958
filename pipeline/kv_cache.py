"""Keys and values of the sequences that are being served, within a budget of tokens.

A sequence's room is allocated whole when it is admitted, so that no step can run out of memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.errors import RequestError
from pipeline.models.spec import ModelSpec


class SequenceKV:
    """One sequence's keys and values; `length` tokens of `capacity` are filled."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys  # [layers, kv_heads, capacity, head_dim]
        self.values = values
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append T tokens to one layer (keys, values [kv_heads, T, head_dim]); returns the layer's keys and
        values up to and with them. `length` moves on only by `advance`, once all layers are written."""
        end = self.length + keys.shape[1]
        self.keys[layer, :, self.length : end] = keys
        self.values[layer, :, self.length : end] = values
        return self.keys[layer, :, :end], self.values[layer, :, :end]

    def advance(self, count: int) -> None:
        """All layers have been written for `count` more tokens."""
        self.length += count


class KVCache:
    """Gives out room for sequences. `budget` tokens in all."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self._shape = (spec.layers, spec.kv_heads, spec.head_dim)
        self._dtype, self._device = dtype, device

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of this many tokens can be admitted now."""
        return self.used + tokens <= self.budget

    def allocate(self, tokens: int) -> SequenceKV:
        """Room for a sequence. Raises RequestError where it does not fit; ask `fits` first."""
        if not self.fits(tokens):
            free = self.budget - self.used
            raise RequestError(f"{tokens} tokens do not fit the KV cache, {free} are free")
        layers, heads, width = self._shape
        self.used += tokens
        room = torch.empty((2, layers, heads, tokens, width), dtype=self._dtype, device=self._device)
        return SequenceKV(room[0], room[1])

    def release(self, sequence: SequenceKV) -> None:
        """The sequence has ended."""
        self.used -= sequence.capacity
