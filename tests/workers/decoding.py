"""The numbers of encoded tiles, matrices and rows, for tests: float32 arrays."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shm.blocks import BlockFormat
from shm.codes import Codes
from shm.expert_math import SWIGLU, ExpertMath
from shm.floe import RowFormat
from shm.fp8 import FP8
from shm.layout import NO_HEAD, Bytes, ExpertShape, Float32, MatrixFormat, StoreLayout, TileFormat
from workers.kernels.reference import dequantize, fp8_numbers, row_numbers, tile_numbers


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


def decode_matrix(format: MatrixFormat, data: Bytes, n: int, k: int) -> Float32:
    """[n, k]"""
    if isinstance(format, FP8):
        return fp8_numbers(tensor(data), n, k)[0].numpy()
    assert isinstance(format, BlockFormat)
    factor = tensor(format.factors_of(data)[:1]) if format.factors else None
    blocks = tensor(data[: format.blocks_bytes(n, k)])
    return np.ascontiguousarray(dequantize(format, blocks, n, k, factor)[:, :k].numpy())


def fp8_codes(w: Float32) -> Codes:
    """Numbers as a file in fp8 could have them."""
    out, (n, k) = np.empty(FP8().matrix_bytes(*w.shape), np.uint8), w.shape
    FP8().encode_matrix(w, out)
    (codes,), (scales,) = FP8().parts(out, n, k)
    return Codes("fp8", codes, scales.repeat(128, axis=0)[:n])


def decode_rows(format: RowFormat, rows: Bytes, k: int) -> Float32:
    """[rows, k]"""
    return row_numbers(format, tensor(rows), k).numpy()
