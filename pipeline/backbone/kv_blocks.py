"""The memory of the KV cache: a slab for each stream of each layer, in blocks of tokens, and who holds them.

In int8, each run of at most KV_RUN numbers of a token has a scale: its largest magnitude is 127. So of a
latent of 512 numbers and a rotary key of 64, the key has its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.config import KV_BLOCK, KV_RUN
from pipeline.errors import RequestError
from shm.huge import private

Blocks = NDArray[np.int32]  # numbers of blocks


class Slab:
    """One stream of one layer. Memory is touched when it is written. Tokens are [heads, T, width]."""

    def __init__(self, blocks: int, heads: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype`: float32, bfloat16 or int8."""
        shape = blocks, heads, KV_BLOCK
        self.numbers = _memory((*shape, width), dtype, device)
        self.scales: Tensor | None = None  # float32 [blocks, heads, KV_BLOCK, runs]
        if dtype == torch.int8:
            self.scales = _memory((*shape, runs_of(width)), torch.float32, device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The numbers, and their scales if they have any."""
        return (self.numbers,) if self.scales is None else (self.numbers, self.scales)

    def copy(self, block: int, to: int) -> None:
        """Copy all numbers of a block."""
        for tensor in self.tensors:
            tensor[to] = tensor[block]

    def store(self, blocks: Sequence[int], first: int, new: Tensor) -> None:
        """Write tokens to these blocks, from token `first` of the first block on."""
        parts = (new,) if self.scales is None else quantized(new)
        for tensor, part in zip(self.tensors, parts, strict=True):
            done, start = 0, first
            for block in blocks:
                count = min(KV_BLOCK - start, part.shape[1] - done)
                tensor[block].narrow(1, start, count).copy_(part.narrow(1, done, count))
                done, start = done + count, 0

    def read(self, blocks: Sequence[int], first: int, count: int, dtype: torch.dtype) -> Tensor:
        """So many tokens of these blocks, from token `first` of the first one on, in this dtype."""
        # Of slices: selecting by an index takes a hundred times as long on the host.
        parts = [torch.cat([tensor[block] for block in blocks], 1) for tensor in self.tensors]
        parts = [part.narrow(1, first, count) for part in parts]
        return parts[0].to(dtype) if self.scales is None else widened(*parts).to(dtype)


def _memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised; on the host in huge pages, because attention reads blocks in any order."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(private(dtype.itemsize * math.prod(shape))).view(dtype).view(shape)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers [..., width] in int8, and the scales float32 [..., runs] of their runs."""
    x = x.float()
    numbers = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = []
    for to, run in zip(torch.split(numbers, KV_RUN, -1), torch.split(x, KV_RUN, -1), strict=True):
        scale = run.abs().amax(-1, keepdim=True) / 127
        # Of numbers near the smallest ones the scale is so coarse that they would be beyond int8.
        to.copy_((run / scale.masked_fill(scale == 0, 1)).round_().clamp_(-127, 127))
        scales.append(scale)
    return numbers, torch.cat(scales, -1)


def widened(numbers: Tensor, scales: Tensor) -> Tensor:
    """The float32 numbers [..., width] of int8 ones and their scales."""
    x = numbers.to(torch.float32, memory_format=torch.contiguous_format)
    for run, scale in zip(torch.split(x, KV_RUN, -1), torch.split(scales, 1, -1), strict=True):
        run.mul_(scale)
    return x


def runs_of(width: int) -> int:
    """Runs of so many numbers."""
    return -(-width // KV_RUN)


class BlockPool:
    """Blocks, each of them in all slabs, with the number of references to it: a block that is held more than
    once is never written."""

    def __init__(
        self,
        streams: Sequence[Sequence[tuple[int, int]]],
        dtype: torch.dtype,
        device: torch.device | Sequence[torch.device],
        tokens: int,
    ) -> None:
        """`streams`: by layer, the (heads, width) of each; `device`: of all layers, or of each; `tokens`:
        rounded up to whole blocks."""
        blocks = blocks_for(tokens)
        self.devices = [device] * len(streams) if isinstance(device, torch.device) else list(device)
        self.budget = KV_BLOCK * blocks  # tokens
        self.dtype = dtype
        self.wide = torch.bfloat16 if dtype == torch.int8 else dtype  # in which numbers are multiplied
        self.slabs = [
            [Slab(blocks, *stream, dtype, place) for stream in layer]
            for layer, place in zip(streams, self.devices, strict=True)
        ]
        # [layers, streams] of slabs, in int8 each of numbers and then of scales
        self._addresses = addresses([[t for slab in layer for t in slab.tensors] for layer in self.slabs])
        self.references = np.zeros(blocks, np.int32)
        self._free = list(range(blocks))[::-1]  # the last one is next: its memory was touched lately

    @property
    def free(self) -> int:
        """Blocks that no one holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Tokens of the other blocks."""
        return self.budget - KV_BLOCK * self.free

    @property
    def addresses(self) -> int:
        """Address of an array of the slabs' addresses, [layers, streams]; in int8 of numbers and scales."""
        address: int = self._addresses.ctypes.data
        return address

    def addresses_of(self, layer: int) -> int:
        """The same of one layer, [streams]."""
        return self.addresses + layer * self._addresses.strides[0]

    def check(self, blocks: int) -> None:
        """Raise RequestError where fewer blocks are free."""
        if blocks > self.free:
            wanted, free = KV_BLOCK * blocks, KV_BLOCK * self.free
            raise RequestError(f"{wanted} tokens do not fit the KV cache, {free} are free")

    def take(self, number: int) -> Blocks:
        """Free blocks, held once. Raises RequestError where there are fewer."""
        self.check(number)
        taken = np.array([self._free.pop() for _ in range(number)], np.int32)
        self.references[taken] = 1
        return taken

    def hold(self, blocks: Blocks) -> None:
        """Add a reference to each of these blocks, which are different ones."""
        self.references[blocks] += 1

    def drop(self, blocks: Blocks) -> None:
        """Remove a reference of each of these different blocks; they are free where it was the last."""
        self.references[blocks] -= 1
        self._free += blocks[self.references[blocks] == 0][::-1].tolist()

    def copied(self, block: int) -> int:
        """A new block with the same numbers, held once in place of this one, which loses a reference. Raises
        RequestError where none is free."""
        (copy,) = self.take(1)
        for slab in itertools.chain(*self.slabs):
            slab.copy(block, copy)
        self.drop(np.array([block], np.int32))
        return int(copy)


def addresses(tensors: Sequence[Sequence[Tensor]]) -> NDArray[np.int64]:
    """Of each layer's tensors, [layers, most tensors of a layer]; 0 where a layer has fewer."""
    table = np.zeros((len(tensors), max(map(len, tensors), default=0)), np.int64)
    for layer, row in zip(tensors, table, strict=True):
        row[: len(layer)] = [tensor.data_ptr() for tensor in layer]
    return table


def blocks_for(tokens: int) -> int:
    """Blocks that have room for so many tokens."""
    return -(-tokens // KV_BLOCK)
