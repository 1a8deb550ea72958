"""The KV cache: keys and values of sequences, or the latents they are expanded from, in a token budget.

A sequence starts with the capacity that it is known to need and grows while it is decoded. The budget counts
capacity, filled or not; the scheduler decides which sequence to preempt when it is spent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.config import KV_BLOCK
from pipeline.errors import OutOfDeviceMemory, RequestError
from pipeline.memory.needs import out_of_memory
from pipeline.models.spec import ModelSpec

GROWTH = 1.25  # factor by which a sequence grows, so that it is seldom copied
TOKENS, ROPE, POSITIONS, CAPACITIES, STREAMS = range(5)  # lines of the table, and the first of the addresses


class SequenceKV:
    """The cached tokens of one sequence; `length` of `capacity` are filled. A layer caches one or more
    streams of numbers for each token: keys and values, or a latent. `id` is unique in this process."""

    _ids = itertools.count()

    def __init__(self, layers: list[list[Tensor]], switch: int | None) -> None:
        """`switch`: as in the model's Rope."""
        self.id = next(self._ids)
        self.layers = layers  # for each layer its streams [heads, capacity, numbers]
        self.length = 0
        self.long = False  # which of the two rotary embeddings the cached tokens have, see Rope
        self._switch = switch
        self._find_streams()

    def renumber(self) -> None:
        """Take a new `id`: the tokens are from now on another request's."""
        self.id = next(self._ids)

    def _find_streams(self) -> None:
        self.capacity = self.layers[0][0].shape[1] if self.layers else 0
        self.stream_addresses = np.array(
            [[s.data_ptr() for s in streams] for streams in self.layers], np.int64
        )  # [layers, streams]

    @property
    def addresses(self) -> int:
        """Address of an array of the streams' addresses, [layers, streams]; valid until `resize`."""
        address: int = self.stream_addresses.ctypes.data
        return address

    def write(self, layer: int, *new: Tensor) -> list[Tensor]:
        """Append T tokens to one layer, [heads, T, numbers] for each stream; returns the layer's streams
        including them. `length` changes only by `advance`, after all layers are written."""
        end = self.length + new[0].shape[1]
        for stream, tokens in zip(self.layers[layer], new, strict=True):
            stream[:, self.length : end] = tokens
        return [stream[:, :end] for stream in self.layers[layer]]

    def advance(self, count: int) -> None:
        """Count `count` more tokens as filled, which all layers have been written for."""
        self.length += count

    def truncate(self, length: int) -> None:
        """Drop all but the first `length` tokens."""
        self.length = min(self.length, length)

    def select_rope(self, tokens: int) -> bool:
        """Choose the rotary embedding for a sequence of `tokens` tokens, filled or not. False where that
        dropped the filled tokens, because they were rotated by the other one."""
        long = self._switch is not None and tokens > self._switch
        dropped = long != self.long and self.length > 0
        if long != self.long:
            self.long, self.length = long, 0
        return not dropped

    def resize(self, capacity: int) -> None:
        """Copy to streams of another capacity, one by one: memory holds only one stream twice. Where that
        fails, `capacity` is the smaller of the two."""
        try:
            for streams in self.layers:
                for n, old in enumerate(streams):
                    new = old.new_empty((old.shape[0], capacity, old.shape[2]))
                    new[:, : self.length] = old[:, : self.length]
                    streams[n] = new
        except BaseException:
            least = min(s.shape[1] for streams in self.layers for s in streams)
            for streams in self.layers:
                streams[:] = [self._cut(s, least) for s in streams]
            raise
        finally:
            self._find_streams()

    def _cut(self, stream: Tensor, capacity: int) -> Tensor:
        """The stream with this capacity, in its own memory: kernels take one capacity for all."""
        if stream.shape[1] == capacity:
            return stream
        cut = stream.view(-1)[: stream.shape[0] * capacity * stream.shape[2]]
        cut = cut.view(stream.shape[0], capacity, stream.shape[2])
        for head in range(1, len(stream)):  # the first lies there already, the others behind their place
            cut[head, : self.length] = stream[head, : self.length].clone()
        return cut


class TransientKV(SequenceKV):
    """KV of a sequence computed in one step: `write` stores nothing, so torch can compute gradients."""

    def __init__(self, tokens: int, switch: int | None) -> None:
        """`tokens`: at least 2, because decode attention of a single token reads stored ones."""
        super().__init__([], switch)
        self.select_rope(tokens)

    def write(self, layer: int, *new: Tensor) -> list[Tensor]:
        return list(new)


class KVCache:
    """Allocates sequences; their capacities sum to at most `budget` tokens."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self._spec = spec
        self._dtype, self._device = dtype, device

    @property
    def free(self) -> int:
        return self.budget - self.used

    def allocate(self, tokens: int) -> SequenceKV:
        """A sequence of this capacity. Raises RequestError where fewer tokens are `free`, OutOfDeviceMemory
        where the device has no memory for them."""

        def streams() -> list[Tensor]:
            shapes = [(heads, tokens, width) for heads, width in self._spec.attention.kv_streams]
            return [torch.empty(shape, dtype=self._dtype, device=self._device) for shape in shapes]

        self._check(tokens)
        with _one_line():
            sequence = SequenceKV([streams() for _ in range(self._spec.layers)], self._spec.rope.switch)
        self.used += tokens
        return sequence

    def resize(self, sequence: SequenceKV, capacity: int) -> None:
        """Change a sequence's capacity. Raises as `allocate`; its tokens are then as they were."""
        before = sequence.capacity
        self._check(capacity - before)
        try:
            with _one_line():
                sequence.resize(capacity)
        finally:
            self.used += sequence.capacity - before

    def release(self, sequence: SequenceKV) -> None:
        """Return a sequence's capacity to the budget."""
        self.used -= sequence.capacity

    def _check(self, tokens: int) -> None:
        if tokens > self.free:
            raise RequestError(f"{tokens} tokens do not fit the KV cache, {self.free} are free")


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as e:
        raise OutOfDeviceMemory(out_of_memory(e)) from e


def capacity_for(tokens: int, limit: int) -> int:
    """`tokens` rounded up to whole blocks, at most `limit`."""
    return min(-(-tokens // KV_BLOCK) * KV_BLOCK, limit)


def table_of(
    sequences: Sequence[SequenceKV], tokens: Sequence[int], rope: Sequence[int], rows: int
) -> NDArray[np.int64]:
    """int64 [4 + layers * streams, rows], of at least as many rows as sequences; the others have none."""
    addresses = [kv.stream_addresses.ravel() for kv in sequences]
    table = np.zeros((STREAMS + len(addresses[0]), rows), np.int64)
    table[POSITIONS] = -1
    used = table[:, : len(sequences)]
    used[TOKENS], used[ROPE] = tokens, rope
    used[POSITIONS] = [kv.length for kv in sequences]
    used[CAPACITIES] = [kv.capacity for kv in sequences]
    used[STREAMS:] = np.stack(addresses, axis=1)
    return table
