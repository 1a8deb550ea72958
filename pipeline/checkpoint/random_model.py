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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product

import numpy as np
from msgspec import msgpack

from pipeline.checkpoint.model_source import ModelSource
from pipeline.checkpoint.random_tensors import RandomTensors, generator_of
from pipeline.models.config_keys import Config
from pipeline.models.facts import facts_of, is_own
from pipeline.models.shapes import shape_config
from shm.formats import Bytes, random_numbers
from shm.layout import StoreLayout
from shm.store import StoreBuilder

# Part of every fingerprint; incremented when the same shape would get other bytes.
VERSION = 3


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
        part = builder.manifest.part

        def draw(place: tuple[int, int, int]) -> None:
            layer, expert, tile = place
            out, heads = builder.expert(layer, expert), builder.heads(layer, expert)
            if tile == 0:
                layout.clear_end(out, heads)
            of_model = tile if part is None else part.tile_in_model(tile)
            generator = generator_of(self._shape, layer, expert, of_model)
            body, head = layout.tile_of(out, heads, tile)
            layout.clear_tile(body)
            _draw_tile(generator, layout, tile, body, head)

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            try:
                done = 0
                for layer in range(shape.layers):
                    for _ in pool.map(draw, product((layer,), range(shape.experts), range(shape.tiles))):
                        done += 1
                        progress(layout.total_bytes * done // number)
                    builder.filled(layer)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return 0


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
