"""The KV cache: keys and values of sequences, or the latents they are expanded from, in blocks of tokens; and
the states of layers that are recurrent.

All memory is one slab for each layer's stream, and a sequence has a table of its blocks, the same in all
slabs. A block may be held more than once: by sequences that begin with the same tokens, and by what keeps
prefixes. Then it is never written: a sequence that has to write into it takes a copy first.

A recurrent state sums up all tokens so far, whatever their number, so it cannot be cut back to an earlier
token. A step reads `states` and writes `pending`, and `advance` exchanges them: a step that fails leaves a
sequence as it was.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.backbone.kv_blocks import BlockPool, Blocks, addresses, blocks_for
from pipeline.config import KV_BLOCK, SNAPSHOTS
from pipeline.errors import OutOfDeviceMemory, RequestError
from pipeline.memory.needs import out_of_memory

TOKENS, ROPE, POSITIONS, BLOCKS = range(4)  # lines of the table, and the first of the blocks

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
    """The cached tokens of one sequence; `length` of `capacity` are filled. Token t is in block
    blocks[t // KV_BLOCK]. Recurrent layers keep `states` of all tokens so far instead, which are 0 at length
    0. `id` is unique in this process. Made by `KVCache`."""

    stored = True  # what `write` gets
    _ids = itertools.count()

    def __init__(self, pool: BlockPool, switch: int | None, states: States) -> None:
        """`switch`: as in the model's Rope; `states`: all 0."""
        self.id = next(self._ids)
        self.pool = pool
        self.states = states
        self.pending: States = [tuple(map(torch.zeros_like, layer)) for layer in states]
        self.length = 0
        self.begun = 0  # of the first tokens, those that other sequences have computed
        self.long = False  # which of the two rotary embeddings the cached tokens have, see Rope
        self._switch = switch
        self._table: Blocks = np.empty(16, np.int32)
        self._count = 0  # of its blocks
        self._recurrent = any(states)
        both = [(*now, *then) for now, then in zip(self.states, self.pending, strict=True)]
        swapped = [(*then, *now) for now, then in zip(self.states, self.pending, strict=True)]
        self._state_addresses, self._swapped_addresses = addresses(both), addresses(swapped)

    # --- blocks ------------------------------------------------------------------------------------------

    @property
    def blocks(self) -> Blocks:
        """Its blocks, a view; their memory is in place until the next `grow`."""
        return self._table[: self._count]

    @property
    def capacity(self) -> int:
        """Tokens that its blocks have room for."""
        return KV_BLOCK * self._count

    def missing(self, tokens: int) -> int:
        """Free blocks that `grow` takes for so many tokens."""
        return max(0, blocks_for(tokens) - self._count) + self._shares_next(tokens)

    def grow(self, tokens: int) -> None:
        """Have room for so many tokens, those behind the filled ones in blocks that no one else holds. Raises
        RequestError, and takes no block, where fewer are free than are `missing`."""
        missing = self.missing(tokens)
        if not missing:
            return
        self.pool.check(missing)
        if self._shares_next(tokens):
            at = self.length // KV_BLOCK
            self._table[at] = self.pool.copied(self._table[at])
            missing -= 1
        self.append(self.pool.take(missing))

    def begin(self, blocks: Blocks, length: int, states: States | None) -> None:
        """Go on behind the first `length` tokens of these blocks, whose references become this sequence's,
        which has none yet; `states`: of a recurrent model at that length."""
        self.append(blocks)
        self.length = self.begun = length
        if states is not None:
            _copy(states, self.states)

    def append(self, blocks: Blocks) -> None:
        """Add blocks, whose references become this sequence's."""
        count = self._count + len(blocks)
        if count > len(self._table):
            self._table = np.resize(self._table, max(count, 2 * len(self._table)))
        self._table[self._count : count] = blocks
        self._count = count

    def drop(self, kept: int = 0) -> None:
        """Give up all but so many of its first blocks."""
        if kept < self._count:
            self.pool.drop(self._table[kept : self._count])
            self._count = kept

    def _shares_next(self, tokens: int) -> bool:
        """Whether the next of so many tokens belongs into a block that others hold too."""
        at, filled = divmod(self.length, KV_BLOCK)
        return tokens > self.length and filled > 0 and self.pool.references[self._table[at]] > 1

    # --- tokens ------------------------------------------------------------------------------------------

    def write(self, layer: int, *new: Tensor) -> list[Tensor]:
        """Append T tokens to one layer, [heads, T, numbers] for each stream; returns the layer's streams
        including them, in the dtype of the new ones. `length` changes only by `advance`, after all layers are
        written."""
        for stream, tokens in enumerate(new):
            self.store(layer, stream, tokens)
        end = self.length + new[0].shape[1]
        return [self.read(layer, stream, 0, end, tokens.dtype) for stream, tokens in enumerate(new)]

    def store(self, layer: int, stream: int, new: Tensor) -> None:
        """Append T tokens [heads, T, numbers] to one stream."""
        blocks = self._between(self.length, self.length + new.shape[1])
        self.pool.slabs[layer][stream].store(blocks, self.length % KV_BLOCK, new)

    def read(self, layer: int, stream: int, first: int, end: int, dtype: torch.dtype) -> Tensor:
        """A copy of these tokens of one stream, [heads, T, numbers]."""
        slab = self.pool.slabs[layer][stream]
        return slab.read(self._between(first, end), first % KV_BLOCK, end - first, dtype)

    def _between(self, first: int, end: int) -> list[int]:
        """The blocks of these tokens."""
        blocks: list[int] = self.blocks[first // KV_BLOCK : blocks_for(end)].tolist()
        return blocks

    def advance(self, count: int) -> None:
        """Count `count` more tokens as filled, which all layers have been written for."""
        self.length += count
        if self._recurrent:
            self.states, self.pending = self.pending, self.states
            self._state_addresses, self._swapped_addresses = self._swapped_addresses, self._state_addresses

    @property
    def state_addresses(self) -> int:
        """Address of an array of addresses, [layers, 2 * most states of a layer]: of a layer's states, then
        of as many pending ones; valid until `advance`."""
        address: int = self._state_addresses.ctypes.data
        return address

    # --- back to fewer tokens ----------------------------------------------------------------------------

    def copied_states(self) -> States:
        """A copy of the present states. Raises torch.OutOfMemoryError."""
        return [tuple(map(torch.clone, layer)) for layer in self.states]

    def truncate(self, length: int, states: States | None = None) -> None:
        """Drop all but the first `length` tokens, and the blocks that are then not needed, also where no
        token is dropped. `states`: copied ones of a recurrent model at that length, which are known without
        them at 0 and at the present length only; else raises ValueError."""
        if self._recurrent and length < self.length:
            if length and states is None:
                raise ValueError(f"states are not known at {length} of {self.length} tokens")
            if length and states is not None:
                _copy(states, self.states)
            else:
                for state in itertools.chain(*self.states):
                    state.zero_()
        self.length = min(self.length, length)
        self.drop(kept=blocks_for(self.length))

    def select_rope(self, tokens: int) -> bool:
        """Choose the rotary embedding for a sequence of `tokens` tokens, filled or not. False where that
        dropped the filled tokens and their blocks, because they were rotated by the other one."""
        long = is_long(self._switch, tokens)
        dropped = long != self.long and self.length > 0
        if dropped:
            self.truncate(0)
        self.long = long
        return not dropped


def is_long(switch: int | None, tokens: int) -> bool:
    """Whether a sequence of so many tokens has the second rotary embedding; `switch`: as in the model's
    Rope."""
    return switch is not None and tokens > switch


def _copy(states: States, to: States) -> None:
    for old, new in zip(itertools.chain(*states), itertools.chain(*to), strict=True):
        new.copy_(old)


class KVCache(BlockPool):
    """Blocks for `budget` tokens, and the sequences that have them."""

    def __init__(
        self,
        model: Cached,
        dtype: torch.dtype,
        device: torch.device | Sequence[torch.device],
        budget: int,
        sequences: int | None = None,
    ) -> None:
        """`dtype`: float32, bfloat16 or int8; `device`: of all layers, or of each; `budget`: rounded up to
        whole blocks; `sequences`: at most so many exist at once, if the model is recurrent; None: any number.
        Raises torch.OutOfMemoryError."""
        super().__init__(model.kv_streams, dtype, device, budget)
        self._model = model
        recurrent = any(model.state_shapes)
        self._places = sequences if recurrent else None  # that are free
        # Of states, at most so many are kept beside those of sequences; None: there are none.
        self.snapshots = SNAPSHOTS * (sequences or math.inf) if recurrent else None

    @property
    def places(self) -> int | None:
        """Further sequences that may exist; None: any number."""
        return self._places

    def is_long(self, tokens: int) -> bool:
        """As `SequenceKV.long` of a sequence of so many tokens."""
        return is_long(self._model.rope_switch, tokens)

    def allocate(self, tokens: int) -> SequenceKV:
        """A sequence with room for so many tokens. Raises RequestError where fewer are free or there is no
        place, OutOfDeviceMemory where the device has no memory for recurrent states."""
        self.check(blocks_for(tokens))
        if self._places == 0:
            raise RequestError("the KV cache has no room for the states of another sequence")
        with _one_line():
            states = [
                tuple(torch.zeros(shape, dtype=torch.float32, device=device) for shape in layer)
                for layer, device in zip(self._model.state_shapes, self.devices, strict=True)
            ]
            sequence = SequenceKV(self, self._model.rope_switch, states)
        sequence.grow(tokens)
        self._take_places(1)
        return sequence

    def release(self, sequence: SequenceKV) -> None:
        """Return a sequence's blocks and place."""
        sequence.drop()
        self._take_places(-1)

    def _take_places(self, number: int) -> None:
        if self._places is not None:
            self._places -= number


class TransientKV(SequenceKV):
    """KV of a sequence computed in one step: `write` stores nothing, so torch can compute gradients."""

    stored = False

    def __init__(self, tokens: int, switch: int | None) -> None:
        """`tokens`: at least 2, because decode attention of a single token reads stored ones."""
        super().__init__(BlockPool((), torch.float32, torch.device("cpu"), tokens=0), switch, [])
        self.select_rope(tokens)

    def write(self, layer: int, *new: Tensor) -> list[Tensor]:
        return list(new)


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as e:
        raise OutOfDeviceMemory(out_of_memory(e)) from e


def table_of(
    places: Sequence[tuple[SequenceKV, int]], tokens: Sequence[int], rope: Sequence[int], rows: int
) -> NDArray[np.int64]:
    """int64 [3 + most blocks with tokens, rows], of at least as many rows as tokens; the others have none.
    `places`: each token's sequence and position. A line for each block, so that what is copied of a longer
    table lies together."""
    used = [blocks_for(position + 1) for _, position in places]
    table = np.zeros((BLOCKS + max(used), rows), np.int64)
    table[POSITIONS] = -1
    filled = table[:, : len(places)]
    filled[TOKENS], filled[ROPE] = tokens, rope
    filled[POSITIONS] = [position for _, position in places]
    for row, ((kv, _), blocks) in enumerate(zip(places, used, strict=True)):
        filled[BLOCKS : BLOCKS + blocks, row] = kv.blocks[:blocks]
    return table
