"""u = up x of an expert, for a calibration: from the heads of the store, with x in the int8 steps that the
kernels of these formats compute with."""

from __future__ import annotations

import torch

from pipeline.arrays import FloatArray
from pipeline.calibration.magnitudes import Up
from shm.floe import FloeFormat
from shm.store import Store
from workers.kernels.unpack import int8_steps


def up_of(store: Store) -> Up | None:
    """None where the experts' format keeps no up matrices apart."""
    shape, kind = store.layout.shape, store.layout.format
    if not isinstance(kind, FloeFormat):
        return None

    def up(layer: int, expert: int, x: FloatArray) -> FloatArray:
        heads = store.heads(layer, expert, 0, shape.tiles)  # whole blocks: together one matrix
        matrix = kind.up.decode_matrix(heads, shape.padded, shape.hidden)[: shape.intermediate]
        steps = int8_steps(torch.from_numpy(x), kind.up.group)[:, : shape.hidden].numpy()
        u: FloatArray = steps @ matrix.T
        return u

    return up
