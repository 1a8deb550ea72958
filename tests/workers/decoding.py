"""The numbers of encoded tiles, matrices and rows, for tests: float32 arrays."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shm.blocks import BlockFormat
from shm.expert_math import SWIGLU, ExpertMath
from shm.floe import RowFormat
from shm.layout import NO_HEAD, Bytes, ExpertShape, Float32, StoreLayout, TileFormat
from workers.kernels.reference import dequantize, row_numbers, tile_numbers


def tensor(data: Bytes) -> Tensor:
    return torch.from_numpy(np.array(data))


def decode(
    format: TileFormat,
    data: Bytes,
    hidden: int,
    tile: int,
    head: Bytes = NO_HEAD,
    math: ExpertMath = SWIGLU,
) -> Float32:
    """[matrices, T, H]: gate, unless ungated, up, down transposed."""
    layout = StoreLayout(ExpertShape(1, 1, hidden, tile, tile, math), format)
    return tile_numbers(layout, tensor(data), tensor(head)).numpy()


def decode_matrix(format: BlockFormat, data: Bytes, n: int, k: int) -> Float32:
    """[n, k]"""
    factor = tensor(format.factors_of(data)[:1]) if format.factors else None
    blocks = tensor(data[: format.blocks_bytes(n, k)])
    return np.ascontiguousarray(dequantize(format, blocks, n, k, factor)[:, :k].numpy())


def decode_rows(format: RowFormat, rows: Bytes, k: int) -> Float32:
    """[rows, k]"""
    return row_numbers(format, tensor(rows), k).numpy()
