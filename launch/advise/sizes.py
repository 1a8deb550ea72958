"""What a model's experts and the rest of its layers weigh in one format, from its config alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.checkpoint.model_source import ModelSource
from pipeline.config import EngineConfig, FormatName
from pipeline.memory.needs import Needs, backbone_tensors, needs, plain_bytes
from pipeline.models.registry import expert_shape
from pipeline.policies.view import ModelShape
from pipeline.traces.header import Header
from pipeline.traces.recorder import DEPTH
from shm.layout import StoreLayout, format_named


@dataclass(frozen=True)
class Sizes:
    """Bytes unless noted otherwise."""

    needs: Needs
    header: Header  # as a trace of the model in this format would have it
    expert: int  # with its heads, where the format has them
    expert_weights: int  # numbers
    other: int  # of a layer, without its routed experts
    other_weights: int  # numbers
    head: int  # read once a step
    kv_token: int  # of one token in one layer

    @property
    def format(self) -> FormatName:
        return self.needs.format

    @property
    def tile(self) -> float:
        """Bytes that are read for a tile; the header has those that are moved for it."""
        return self.expert / self.header.shape.tiles


def sizes_of(source: ModelSource, config: EngineConfig, format: FormatName) -> Sizes:
    """`config`: with its device and workers. Raises as `needs`."""
    found = needs(source, config, format)
    spec, tile_format = found.spec, format_named(format)
    shape = expert_shape(source.config, config.tile, tile_format)
    layout = StoreLayout(shape, tile_format)
    table = spec.vocabulary * spec.hidden
    number = plain_bytes(config)
    # embeddings and head are outside the layers; a tied table is one tensor
    backbone = sum(math.prod(tensor.shape) for tensor in backbone_tensors(source, spec))
    weights = max(0, backbone - table * (1 if spec.tied_embeddings else 2)) // spec.layers
    share = weights * spec.layers * number and found.backbone / (backbone * number)  # less where quantized
    header = Header(
        model=source.name,
        fingerprint=source.fingerprint("calibration", 0),
        store=source.fingerprint(format, shape.tile),
        shape=ModelShape(shape.layers, shape.experts, shape.tiles, spec.top_k),
        tile_bytes=layout.tile_bytes,
        router=spec.router,
        depth=DEPTH,
    )
    return Sizes(
        needs=found,
        header=header,
        expert=layout.expert_bytes,
        expert_weights=3 * spec.hidden * spec.intermediate,
        other=round(share * number * weights),
        other_weights=weights,
        head=round(share * number * table),
        kv_token=found.kv_token // spec.layers,
    )
