"""The KV cache: keys and values of sequences, or the latents they are expanded from, in a token budget; and
the states of layers that are recurrent.

A sequence starts with the capacity that it is known to need and grows while it is decoded. The budget counts
capacity, filled or not; the scheduler decides which sequence to preempt when it is spent.

A recurrent state sums up all tokens so far, whatever their number, so it cannot be cut back to an earlier
token. A step reads `states` and writes `pending`, and `advance` exchanges them: a step that fails leaves a
sequence as it was. Snapshots are the earlier lengths that a sequence can be cut back to.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.config import KV_BLOCK, SNAPSHOTS
from pipeline.errors import OutOfDeviceMemory, RequestError
from pipeline.memory.needs import out_of_memory

GROWTH = 1.25  # factor by which a sequence grows, so that it is seldom copied
TOKENS, ROPE, POSITIONS, CAPACITIES, STREAMS = range(5)  # lines of the table, and the first of the addresses

States = list[tuple[Tensor, ...]]  # of each decoder layer, float32; none where it is not recurrent


class Cached(Protocol):
    """What a sequence of a model keeps."""

    @property
    def kv_streams(self) -> Sequence[Sequence[tuple[int, int]]]:
        """By decoder layer, the (heads, numbers a token) of each stream."""

    @property
    def state_shapes(self) -> Sequence[Sequence[tuple[int, ...]]]:
        """By decoder layer, the shapes of its recurrent states."""

    @property
    def rope_switch(self) -> int | None:
        """As the `switch` of the model's Rope."""


class SequenceKV:
    """The cached tokens of one sequence; `length` of `capacity` are filled. A layer caches any number of
    streams of numbers for each token: keys and values, or a latent. Or it keeps `states` of all tokens so
    far, which are 0 at length 0. `id` is unique in this process."""

    _ids = itertools.count()

    def __init__(
        self, layers: list[list[Tensor]], switch: int | None, states: States | None = None, capacity: int = 0
    ) -> None:
        """`switch`: as in the model's Rope; `states`: all 0; `capacity`: where no layer has streams."""
        self.id = next(self._ids)
        self.layers = layers  # for each layer its streams [heads, capacity, numbers]
        self.states: States = [() for _ in layers] if states is None else states
        self.pending: States = [tuple(map(torch.zeros_like, layer)) for layer in self.states]
        self.length = 0
        self.long = False  # which of the two rotary embeddings the cached tokens have, see Rope
        self._switch = switch
        self._snapshots: dict[int, States] = {}  # by length, in ascending order
        self._recurrent = any(self.states)
        self._find_streams(capacity)
        both = [(*now, *then) for now, then in zip(self.states, self.pending, strict=True)]
        swapped = [(*then, *now) for now, then in zip(self.states, self.pending, strict=True)]
        self._state_addresses, self._swapped_addresses = _addresses(both), _addresses(swapped)

    def renumber(self) -> None:
        """Take a new `id`: the tokens are from now on another request's."""
        self.id = next(self._ids)

    def _find_streams(self, capacity: int) -> None:
        self.capacity = next((s.shape[1] for streams in self.layers for s in streams), capacity)
        self.stream_addresses = _addresses(self.layers)  # [layers, most streams of a layer]

    @property
    def addresses(self) -> int:
        """Address of an array of the streams' addresses, [layers, streams]; valid until `resize`."""
        address: int = self.stream_addresses.ctypes.data
        return address

    @property
    def state_addresses(self) -> int:
        """Address of an array of addresses, [layers, 2 * most states of a layer]: of a layer's states, then
        of as many pending ones; valid until `advance`."""
        address: int = self._state_addresses.ctypes.data
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
        if self._recurrent:
            self.states, self.pending = self.pending, self.states
            self._state_addresses, self._swapped_addresses = self._swapped_addresses, self._state_addresses

    @property
    def snapshots(self) -> tuple[int, ...]:
        """The lengths with a snapshot, in ascending order."""
        return tuple(self._snapshots)

    def snapshot(self) -> None:
        """Keep a copy of the states, if there are any, at the present length. Of more than SNAPSHOTS the
        shortest is dropped; where memory is short, none is kept."""
        if not self._recurrent or self.length in self._snapshots or not self.length:
            return
        kept: States | None = None
        if len(self._snapshots) == SNAPSHOTS:
            kept = self._snapshots.pop(min(self._snapshots))
        with suppress(torch.OutOfMemoryError):
            kept = kept or [tuple(map(torch.empty_like, layer)) for layer in self.states]
            _copy(self.states, kept)
            self._snapshots[self.length] = kept

    def reachable(self, length: int) -> int:
        """The most tokens, up to `length`, that `truncate` can keep."""
        if not self._recurrent or length >= self.length:
            return min(length, self.length)
        return max((kept for kept in self._snapshots if kept <= length), default=0)

    def truncate(self, length: int) -> bool:
        """Drop all but the first `length` tokens. False, dropping none, where recurrent states are not known
        at that length: they are at 0, at the present length, and at those of snapshots."""
        if self.reachable(length) != min(length, self.length):
            return False
        if self._recurrent and length < self.length:
            self._snapshots = {kept: of for kept, of in self._snapshots.items() if kept <= length}
            if length:
                _copy(self._snapshots[length], self.states)
            else:
                for state in itertools.chain(*self.states):
                    state.zero_()
        self.length = min(self.length, length)
        return True

    def select_rope(self, tokens: int) -> bool:
        """Choose the rotary embedding for a sequence of `tokens` tokens, filled or not. False where that
        dropped the filled tokens, because they were rotated by the other one."""
        long = self._switch is not None and tokens > self._switch
        dropped = long != self.long and self.length > 0
        if long != self.long:
            self.truncate(0)
            self.long = long
        return not dropped

    def resize(self, capacity: int) -> None:
        """Copy to streams of another capacity, one by one: memory holds only one stream twice. Where that
        fails, `capacity` is the smaller of the two."""
        reached = self.capacity
        try:
            for streams in self.layers:
                for n, old in enumerate(streams):
                    new = old.new_empty((old.shape[0], capacity, old.shape[2]))
                    new[:, : self.length] = old[:, : self.length]
                    streams[n] = new
            reached = capacity
        except BaseException:
            least = min(s.shape[1] for streams in self.layers for s in streams)
            for streams in self.layers:
                streams[:] = [self._cut(s, least) for s in streams]
            raise
        finally:
            self._find_streams(reached)

    def _cut(self, stream: Tensor, capacity: int) -> Tensor:
        """The stream with this capacity, in its own memory: kernels take one capacity for all."""
        if stream.shape[1] == capacity:
            return stream
        cut = stream.view(-1)[: stream.shape[0] * capacity * stream.shape[2]]
        cut = cut.view(stream.shape[0], capacity, stream.shape[2])
        for head in range(1, len(stream)):  # the first lies there already, the others behind their place
            cut[head, : self.length] = stream[head, : self.length].clone()
        return cut


def _addresses(tensors: Sequence[Sequence[Tensor]]) -> NDArray[np.int64]:
    """Of each layer's tensors, [layers, most tensors of a layer]; 0 where a layer has fewer."""
    table = np.zeros((len(tensors), max(map(len, tensors), default=0)), np.int64)
    for layer, row in zip(tensors, table, strict=True):
        row[: len(layer)] = [tensor.data_ptr() for tensor in layer]
    return table


def _copy(states: States, to: States) -> None:
    for old, new in zip(itertools.chain(*states), itertools.chain(*to), strict=True):
        new.copy_(old)


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

    def __init__(
        self,
        model: Cached,
        dtype: torch.dtype,
        device: torch.device,
        budget: int,
        sequences: int | None = None,
    ) -> None:
        """`sequences`: at most so many exist at once, if the model is recurrent; None: any number."""
        self.budget = budget
        self.used = 0
        self._model = model
        self._dtype, self._device = dtype, device
        self._places = sequences if any(model.state_shapes) else None  # that are free

    @property
    def free(self) -> int:
        return self.budget - self.used

    @property
    def places(self) -> int | None:
        """Further sequences that may exist; None: any number."""
        return self._places

    def allocate(self, tokens: int) -> SequenceKV:
        """A sequence of this capacity. Raises RequestError where fewer tokens are `free` or there is no
        place, OutOfDeviceMemory where the device has no memory for them."""

        def streams(layer: Sequence[tuple[int, int]]) -> list[Tensor]:
            shapes = [(heads, tokens, width) for heads, width in layer]
            return [torch.empty(shape, dtype=self._dtype, device=self._device) for shape in shapes]

        def states(layer: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
            return tuple(torch.zeros(shape, dtype=torch.float32, device=self._device) for shape in layer)

        self._check(tokens)
        if self._places == 0:
            raise RequestError("the KV cache has no room for the states of another sequence")
        with _one_line():
            sequence = SequenceKV(
                [streams(layer) for layer in self._model.kv_streams],
                self._model.rope_switch,
                [states(layer) for layer in self._model.state_shapes],
                tokens,
            )
        self.used += tokens
        self._take_places(1)
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
        """Return a sequence's capacity and place."""
        self.used -= sequence.capacity
        self._take_places(-1)

    def _take_places(self, number: int) -> None:
        if self._places is not None:
            self._places -= number

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
