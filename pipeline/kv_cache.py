"""Keys and values of sequences, within a budget of tokens.

A sequence begins with room for what it is known to need and grows while it is decoded; who has to make way
when the budget is spent is the scheduler's business. What the budget counts is room, filled or not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.errors import RequestError
from pipeline.models.spec import ModelSpec

BLOCK = 64  # tokens; room is given in whole blocks
GROWTH = 1.25  # a sequence that outgrows its room gets this much more, so that it is seldom copied


class SequenceKV:
    """One sequence's keys and values; `length` tokens of `capacity` are filled."""

    def __init__(self, keys: list[Tensor], values: list[Tensor]) -> None:
        self.keys = keys  # of each layer [kv_heads, capacity, head_dim]
        self.values = values
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[1]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append T tokens to one layer (keys, values [kv_heads, T, head_dim]); returns the layer's keys and
        values up to and with them. `length` moves on only by `advance`, once all layers are written."""
        end = self.length + keys.shape[1]
        self.keys[layer][:, self.length : end] = keys
        self.values[layer][:, self.length : end] = values
        return self.keys[layer][:, :end], self.values[layer][:, :end]

    def advance(self, count: int) -> None:
        """All layers have been written for `count` more tokens."""
        self.length += count

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        self.length = min(self.length, length)

    def resize(self, capacity: int) -> None:
        """Copy to a larger or smaller room that takes what is filled, one layer after the other, so that only
        one layer is there twice."""
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                new = old.new_empty((old.shape[0], capacity, old.shape[2]))
                new[:, : self.length] = old[:, : self.length]
                tensors[layer] = new


class KVCache:
    """Gives out room for sequences. `budget` tokens in all."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self._layers = spec.layers
        self._shape = (spec.kv_heads, spec.head_dim)
        self._dtype, self._device = dtype, device

    @property
    def free(self) -> int:
        return self.budget - self.used

    def allocate(self, tokens: int) -> SequenceKV:
        """Room for a sequence. Raises RequestError where it is not `free`."""
        self._take(tokens)
        heads, width = self._shape

        def room() -> list[Tensor]:
            shape = (heads, tokens, width)
            return [torch.empty(shape, dtype=self._dtype, device=self._device) for _ in range(self._layers)]

        return SequenceKV(room(), room())

    def resize(self, sequence: SequenceKV, capacity: int) -> None:
        """Make a sequence's room `capacity` tokens. Raises RequestError where more than is `free` would be
        needed."""
        self._take(capacity - sequence.capacity)
        sequence.resize(capacity)

    def release(self, sequence: SequenceKV) -> None:
        """The sequence is not needed any more."""
        self.used -= sequence.capacity

    def _take(self, tokens: int) -> None:
        if tokens > self.free:
            raise RequestError(f"{tokens} tokens do not fit the KV cache, {self.free} are free")
        self.used += tokens


def room_for(tokens: int, most: int) -> int:
    """The room to give a sequence of so many tokens that will have `most` at most: whole blocks."""
    return min(-(-tokens // BLOCK) * BLOCK, most)
