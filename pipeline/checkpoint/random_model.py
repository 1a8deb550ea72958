"""A model of a known shape with random weights: it has the speed of the real model, and meaningless text.

Weights are copies of a few random tiles or pieces (`shm/formats.py`), so that a start takes little longer
than allocating their memory. Each tile and each part of a tensor chooses by its own
generator, seeded by the shape's name and its position: a shape has the same bytes on every start and any
number of cores, and `shape:NAME/4` is the first four layers of `shape:NAME`. Weights depend on format and
tile size, not on `--seed`.

The standard deviation is 1 / sqrt(H) for experts and 1 / sqrt(inputs) for other matrices; norms are 1, biases
0. So hidden states keep a sensible magnitude, and routers choose all experts about equally often.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product

import numpy as np
from msgspec import msgpack

from pipeline.checkpoint.model_source import ModelSource
from pipeline.checkpoint.reader import RawTensor
from pipeline.models.config_keys import Config
from pipeline.models.facts import facts_of, is_own
from pipeline.models.shapes import shape_config
from shm.formats import Bytes, Float32, fill_bf16, random_numbers, widen_bf16
from shm.layout import StoreLayout
from shm.store import StoreBuilder

# Part of every fingerprint; incremented when the same shape would get other bytes.
VERSION = 3
BLOCK_BYTES = 1 << 22  # of a tensor, drawn by one generator


class RandomModel(ModelSource):
    """A shape with random weights."""

    kind = "random weights"
    filling = "drawing random experts"
    fused = False

    def __init__(self, name: str, config: Config | None = None) -> None:
        """`name`: shape:NAME or shape:NAME/LAYERS; or any, with the config of a model of which only that is
        there, to plan with. Raises ModelError."""
        self.name = name
        self._shape, self.config = shape_config(name) if config is None else (name, config)

    def fingerprint(self, format_name: str, tile: int) -> str:
        facts = {
            "random": VERSION,
            "shape": self._shape,
            "config": json.dumps(self.config, sort_keys=True),
            "format": format_name,
            "tile": tile,
            "math": facts_of(self.config).math.plain(),
        }
        return hashlib.blake2b(msgpack.encode(facts), digest_size=32).hexdigest()

    def worth_keeping(self, format_name: str) -> bool:
        """False: drawing the weights again is about as fast."""
        return False

    @contextmanager
    def tensors(self) -> Iterator[RandomTensors]:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            if is_own(self.config):
                yield RandomTensors(self._shape, pool)
                return
            from pipeline.checkpoint.random_parameters import RandomParameters  # takes transformers

            yield RandomParameters(self.config, self._shape, pool)

    def fill(self, builder: StoreBuilder, progress: Callable[[int], None]) -> int:
        layout = builder.layout
        shape = layout.shape
        number = shape.layers * shape.experts * shape.tiles

        def draw(place: tuple[int, int, int]) -> None:
            layer, expert, tile = place
            out, heads = builder.expert(layer, expert), builder.heads(layer, expert)
            if tile == 0:
                layout.clear_padding(out, heads)
            generator = _generator(self._shape, layer, expert, tile)
            _draw_tile(generator, layout, tile, *layout.tile_of(out, heads, tile))

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            try:
                places = product(range(shape.layers), range(shape.experts), range(shape.tiles))
                for done, _ in enumerate(pool.map(draw, places), 1):
                    progress(layout.total_bytes * done // number)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return 0


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
            fill_bf16(_generator(self._shape, name, block), inputs**-0.5, part)

        list(self._pool.map(draw, range(-(-len(out) // BLOCK_BYTES))))


def _draw_tile(
    generator: np.random.Generator, layout: StoreLayout, tile: int, out: Bytes, head: Bytes
) -> None:
    shape, scale = layout.shape, layout.shape.hidden**-0.5
    used = shape.intermediate - tile * shape.tile
    if used >= shape.tile:
        layout.format.fill_random(generator, shape.hidden, shape.tile, scale, out, head, shape.math)
        return
    numbers = random_numbers(generator, (shape.math.matrices, shape.tile, shape.hidden), scale)
    numbers[:, used:] = 0  # channels that pad the last tile must have no effect
    *gate, up, down = numbers
    layout.format.encode(gate[0] if gate else None, up, down, out, head)


def _generator(*position: str | int) -> np.random.Generator:
    """The generator of one tile or block, seeded by its position."""
    digest = hashlib.blake2b(msgpack.encode(position), digest_size=16).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))
