"""Random numbers in place of a model's weights: each part by its own generator, seeded by its position."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from msgspec import msgpack

from pipeline.checkpoint.reader import RawTensor
from shm.formats import Bytes, Float32, fill_bf16, widen_bf16

BLOCK_BYTES = 1 << 22  # of a tensor, drawn by one generator


class RandomTensors:
    """The tensors of a shape outside its experts, drawn on each call as bfloat16 numbers; every name
    exists."""

    def __init__(self, shape: str, pool: ThreadPoolExecutor) -> None:
        self._shape = shape
        self._pool = pool

    def float32(self, name: str, shape: tuple[int, ...]) -> Float32:
        """Ones for a norm, zeros for biases, otherwise random numbers with mean 0."""
        if name.endswith("bias") or len(shape) == 1:
            return np.full(shape, 0 if name.endswith("bias") else 1, np.float32)
        return widen_bf16(self.stacked([(name, shape)]).bits.view(np.uint16))

    def stacked(self, tensors: Sequence[tuple[str, tuple[int, ...]]]) -> RawTensor:
        rows = sum(shape[0] for _, shape in tensors)
        stacked = np.empty((rows, *tensors[0][1][1:]), np.uint16)
        row = 0
        for name, shape in tensors:
            part = stacked[row : row + shape[0]].reshape(-1).view(np.uint8)
            self._draw(name, shape[-1], part)
            row += shape[0]
        return RawTensor("BF16", stacked.shape, stacked)

    def _draw(self, name: str, inputs: int, out: Bytes) -> None:
        """Random bfloat16 numbers of the standard deviation 1 / sqrt(inputs)."""

        def draw(block: int) -> None:
            part = out[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
            fill_bf16(generator_of(self._shape, name, block), inputs**-0.5, part)

        list(self._pool.map(draw, range(-(-len(out) // BLOCK_BYTES))))


def generator_of(*position: str | int) -> np.random.Generator:
    """The generator of one tile or block, seeded by its position."""
    digest = hashlib.blake2b(msgpack.encode(position), digest_size=16).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))
