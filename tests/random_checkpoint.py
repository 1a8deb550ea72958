"""Writes a checkpoint of random weights for any supported config: bfloat16, in sharded safetensors files.

There is no tokenizer; use token ids. Norms are ones,
biases are zeros, and a matrix has the standard deviation 1 / sqrt(inputs).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pipeline.models.registry import architecture_of, model_spec
from shm.formats import fill_bf16
from shm.layout import Bytes

SHARD_BYTES = 4 << 30
CHUNK = 1 << 26  # bytes drawn and written at a time, which bounds the memory needed

Shapes = dict[str, tuple[int, ...]]


def write(folder: Path, config: Mapping[str, Any], fused: bool) -> int:
    """Write the checkpoint; returns the bytes of its tensors. `config`: the content of config.json; `fused`:
    all experts of a layer in two tensors. Raises ModelError for an unsupported config."""
    config = {"eos_token_id": 2, **config}
    shards = _shards(architecture_of(config).tensors(model_spec(config), fused))
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.Generator(np.random.SFC64(0))
    names: dict[str, str] = {}
    for number, shapes in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        names |= dict.fromkeys(shapes, file)
        with (folder / file).open("wb") as out:
            _write_shard(out, shapes, rng)
    total = sum(2 * math.prod(shape) for shapes in shards for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return total


def _shards(tensors: Shapes) -> list[Shapes]:
    """The tensors in order, split into shards of at most SHARD_BYTES or a single tensor."""
    shards: list[Shapes] = [{}]
    free = SHARD_BYTES
    for name, shape in tensors.items():
        nbytes = 2 * math.prod(shape)
        if nbytes > free and shards[-1]:
            shards.append({})
            free = SHARD_BYTES
        shards[-1][name] = shape
        free -= nbytes
    return shards


def _write_shard(out: BinaryIO, shapes: Shapes, rng: np.random.Generator) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shapes.items():
        end = position + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, end]}
        position = end
    packed = json.dumps(header).encode()
    packed += b" " * (-len(packed) % 8)
    out.write(len(packed).to_bytes(8, "little") + packed)
    for name, shape in shapes.items():
        for chunk in _numbers(name, shape, rng):
            out.write(chunk.data)


def _numbers(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Iterator[Bytes]:
    """A tensor's bytes, in chunks."""
    count = math.prod(shape)
    if len(shape) == 1:
        one = b"\0\0" if name.endswith("bias") else b"\x80\x3f"  # 0.0, 1.0
        yield np.frombuffer(one * count, np.uint8)
        return
    for begin in range(0, 2 * count, CHUNK):
        chunk = np.empty(min(CHUNK, 2 * count - begin), np.uint8)
        fill_bf16(rng, shape[-1] ** -0.5, chunk)
        yield chunk
