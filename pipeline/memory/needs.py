"""How much memory a model takes in one format, from its config and headers alone.

What depends on the model is exact: experts, backbone, KV cache. What the processes need for themselves was
measured on the CPU (Linux, torch 2.13): memory of their own, without what they share. With a GPU it is an
estimate.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.checkpoint.model_source import ModelSource
from pipeline.config import DEFAULT_CONTEXT, EngineConfig, FormatName
from pipeline.memory.limits import CHUNK_MAX
from pipeline.models.architecture import Want
from pipeline.models.registry import architecture_of, expert_shape, model_spec
from pipeline.models.spec import Latent, ModelSpec
from shm.layout import FORMATS, BlockFormat, format_named
from shm.manifest import StoreManifest, store_bytes
from shm.segment import SHM_FOLDER
from shm.store import store_name

COORDINATOR = {"cpu": 320_000_000, "cuda": 1_500_000_000}  # bytes; 290 MB seen. A CUDA context is large
WORKER = 80_000_000  # 70 MB seen, with what a wide step takes
PREFETCHER = {"cpu": 50_000_000, "cuda": 500_000_000}
GPU_CONTEXT = 600_000_000  # GPU memory of a second process; the coordinator's is not counted as free
HIDDEN_COPIES = 8  # float32 hidden states of a step that are alive together, about
MASK_BYTES = 5  # of a row and a token that it may see: true or false, and what torch makes of it
EXPANDED_BYTES = 4 << 27  # of latent attention: four copies of what `pipeline/backbone/attention.py` expands
SLOT_ALIGNMENT = 256  # of a slot in GPU memory


@dataclass(frozen=True)
class Needs:
    """Of one model in one format; bytes but where it says otherwise."""

    format: FormatName
    store: int  # every expert
    present: int  # of the store, what lies in shared memory already
    slot: int  # a tile on the device
    tiles: int  # number of all tiles
    backbone: int
    position: int  # cosines and sines of a position
    kv_token: int  # a token of the KV cache
    processes: int  # of the host, what the processes need for themselves
    steps: int  # of the device, what a step allocates and the second process's context; on the host it is 0
    spec: ModelSpec


def needs(source: ModelSource, config: EngineConfig, format: FormatName) -> Needs:
    """`config`: with its device and its number of workers. Raises UsageError where the format has no tiles
    such as --tile asks for, ModelError for a model that is not supported."""
    spec, tile_format = model_spec(source.config), format_named(format)
    shape = expert_shape(source.config, config.tile, tile_format)
    fingerprint = source.fingerprint(format, shape.tile)
    manifest = StoreManifest(fingerprint, shape, format, source.name)
    store = store_bytes(manifest)
    cuda = config.device == "cuda"
    slot = manifest.layout.tile_bytes
    wants = list(backbone_wants(source, spec))
    rows = min(config.chunk or CHUNK_MAX, config.context or spec.max_positions)
    activations = 4 * rows * (spec.vocabulary + HIDDEN_COPIES * spec.hidden)
    activations += MASK_BYTES * rows * (config.context or min(spec.max_positions, DEFAULT_CONTEXT))
    if isinstance(spec.attention, Latent):
        activations += EXPANDED_BYTES
    # A weight is read as float32, whatever it is kept as, before there are activations.
    largest = 4 * max(math.prod(want.shape) for want in wants)
    device = "cuda" if cuda else "cpu"
    processes = (
        COORDINATOR[device] + (1 if config.workers is None else config.workers) * WORKER + PREFETCHER[device]
    )
    second = GPU_CONTEXT if config.prefetcher == "process" else 0
    return Needs(
        format=format,
        store=store,
        present=min(store, _allocated(store_name(fingerprint))),
        slot=-(-slot // SLOT_ALIGNMENT) * SLOT_ALIGNMENT if cuda else slot,
        tiles=shape.layers * shape.experts * shape.tiles,
        backbone=backbone_bytes(wants, spec, config),
        position=8 * spec.attention.rotated * (1 if spec.rope.switch is None else 2),
        kv_token=spec.kv_numbers_per_token * plain_bytes(config),
        processes=processes + (largest if cuda else max(largest, activations)),
        steps=activations + second if cuda else 0,
        spec=spec,
    )


def backbone_wants(source: ModelSource, spec: ModelSpec) -> Iterator[Want]:
    """Every tensor of the backbone. The layout of a checkpoint changes names and no sizes."""
    architecture = architecture_of(source.config)
    yield from architecture.outer(spec).values()
    for layer in range(spec.layers):
        yield from architecture.layer(spec, layer, fused=False).values()


def plain_bytes(config: EngineConfig) -> int:
    """Of a number of the KV cache, and of the backbone where that is not quantized."""
    return 4 if config.backbone_dtype == "f32" else 2


def backbone_bytes(wants: list[Want], spec: ModelSpec, config: EngineConfig) -> int:
    """Bytes of the weights on the device."""
    tile_format = FORMATS[config.backbone_dtype]
    quantized = tile_format if isinstance(tile_format, BlockFormat) and config.device != "cuda" else None
    total = 0
    for want in wants:
        if want.kind == "float32":
            total += 4 * math.prod(want.shape)
        elif want.kind == "matrix" and quantized is not None:
            total += quantized.matrix_bytes(*want.shape)
        else:
            total += plain_bytes(config) * math.prod(want.shape)
    if spec.tied_embeddings and quantized is not None:  # a plain table cannot serve as the quantized head
        total += quantized.matrix_bytes(spec.vocabulary, spec.hidden)
    return total


def _allocated(segment: str) -> int:
    """Bytes of this user's segment that exist: all of a finished one's, some of one that is being built."""
    with contextlib.suppress(OSError):
        status = os.stat(SHM_FOLDER + segment)
        if status.st_uid == os.geteuid():
            return status.st_blocks * 512
    return 0
