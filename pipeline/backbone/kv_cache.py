"""Keys and values of sequences, or what they are made from, within a budget of tokens.

A sequence begins with room for what it is known to need and grows while it is decoded; who has to make way
when the budget is spent is the scheduler's business. What the budget counts is room, filled or not.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from pipeline.errors import RequestError
from pipeline.models.spec import ModelSpec

BLOCK = 64  # tokens; room is given in whole blocks
GROWTH = 1.25  # a sequence that outgrows its room gets this much more, so that it is seldom copied


class SequenceKV:
    """What one sequence has cached; `length` tokens of `capacity` are filled. A layer caches one or more
    streams of numbers for each token: keys and values, or the latent from which they are expanded. `id` tells
    it from every other sequence of this process."""

    _ids = itertools.count()

    def __init__(self, layers: list[list[Tensor]], switch: int | None) -> None:
        """`switch`: as in the model's Rope."""
        self.id = next(self._ids)
        self.layers = layers  # of each layer its streams [heads, capacity, numbers]
        self.length = 0
        self.long = False  # filled with the rotary embedding of sequences beyond the switch
        self._switch = switch

    @property
    def capacity(self) -> int:
        return self.layers[0][0].shape[1]

    def write(self, layer: int, *new: Tensor) -> list[Tensor]:
        """Append T tokens to one layer (of each stream [heads, T, numbers]); returns the layer's streams up
        to and with them. `length` moves on only by `advance`, once all layers are written."""
        end = self.length + new[0].shape[1]
        for stream, tokens in zip(self.layers[layer], new, strict=True):
            stream[:, self.length : end] = tokens
        return [stream[:, :end] for stream in self.layers[layer]]

    def advance(self, count: int) -> None:
        """All layers have been written for `count` more tokens."""
        self.length += count

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        self.length = min(self.length, length)

    def serve(self, tokens: int) -> bool:
        """From now on it is for a sequence that has so many tokens, filled or not. False where what was
        filled had to be forgotten: on the other side of the switch every token is rotated otherwise."""
        long = self._switch is not None and tokens > self._switch
        forgets = long != self.long and self.length > 0
        if long != self.long:
            self.long, self.length = long, 0
        return not forgets

    def resize(self, capacity: int) -> None:
        """Copy to a larger or smaller room that takes what is filled, one stream after the other, so that
        only one is there twice."""
        for streams in self.layers:
            for n, old in enumerate(streams):
                new = old.new_empty((old.shape[0], capacity, old.shape[2]))
                new[:, : self.length] = old[:, : self.length]
                streams[n] = new


class UnkeptKV(SequenceKV):
    """Of a sequence that is computed in one step from its first token to its last: what is written is handed
    on and kept nowhere, so that gradients go through it."""

    def __init__(self, tokens: int, switch: int | None) -> None:
        """For a sequence of 2 tokens or more: attention of single ones reads what is kept."""
        super().__init__([], switch)
        self.serve(tokens)

    def write(self, layer: int, *new: Tensor) -> list[Tensor]:
        return list(new)


class KVCache:
    """Gives out room for sequences. `budget` tokens in all."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self._spec = spec
        self._dtype, self._device = dtype, device

    @property
    def free(self) -> int:
        return self.budget - self.used

    def allocate(self, tokens: int) -> SequenceKV:
        """Room for a sequence. Raises RequestError where it is not `free`."""
        self._take(tokens)

        def streams() -> list[Tensor]:
            shapes = [(heads, tokens, width) for heads, width in self._spec.attention.kv_streams]
            return [torch.empty(shape, dtype=self._dtype, device=self._device) for shape in shapes]

        return SequenceKV([streams() for _ in range(self._spec.layers)], self._spec.rope.switch)

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
