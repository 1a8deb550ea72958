"""Matrices of a quantized format on a GPU: y = x @ W.T by the same kernels as an expert's down.

With them up of the formats whose gate and down lie by channel (`shm/floe.py`), so with the host's bits and
its masks; the rest of those is torch's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shm.blocks import BlockFormat
from shm.floe import FloeFormat
from shm.formats import Bytes
from shm.fp8 import BLOCK, FP8
from shm.layout import StoreLayout
from shm.mask import Mask
from workers.kernels.c_types import Geometry
from workers.kernels.cuda.launcher import Launcher, Scratch, Tables
from workers.kernels.cuda.products import (
    ITEM,
    PLAIN_CHANNELS,
    PLAIN_INNER_THREADS,
    PLAIN_LIMITS,
    BlockProducts,
    Codes,
    Items,
    in_chunks,
    limit_of,
)
from workers.kernels.reference import ChannelInputs, ReferenceChannels, fp8_parts, widened

FP8_ROWS = 32  # of a product that kernels compute: torch computes more of them faster
WIDENED = 1 << 24  # numbers of a matrix in fp8 that are float32 at a time


@lru_cache(256)
def row_items(rows: int) -> tuple[Items, int]:
    """The items of a product of one matrix with so many rows, and the limit of its kernel."""
    _, lo, number = in_chunks(np.array([rows]))
    made = np.zeros(len(lo), ITEM)
    made["tiles"], made["rows"], made["entry"], made["out"] = 1, number, lo, lo
    return made, limit_of(int(number.max()))


class CudaMatrix:
    """A matrix [outputs, inputs]; its bytes are copied to the device."""

    def __init__(self, launcher: Launcher, format: BlockFormat, data: Bytes, shape: tuple[int, int]) -> None:
        """data: uint8 [matrix_bytes], as `BlockFormat.encode_matrix` writes it."""
        self.outputs, self.inputs = shape
        if data.shape != (format.matrix_bytes(*shape),):
            raise ValueError(f"{data.shape} bytes are no matrix {shape} of {format.name}")
        factors = Geometry(format, self.inputs, self.outputs).weights.factors
        self._products = BlockProducts(launcher, format, shape, factors=factors)
        writable = np.require(data, requirements=["C", "W"])  # torch refuses others
        self._data = torch.from_numpy(writable).to(launcher.device)
        self._address = np.array([self._data.data_ptr()], np.int64)

    @property
    def bytes(self) -> int:
        return self._data.nbytes

    def product(self, x: Tensor) -> Tensor:
        """x float32 [R, inputs] on the device: float32 [R, outputs]."""
        x = x.contiguous()
        products = self._products
        y = torch.empty((len(x), self.outputs), dtype=torch.float32, device=x.device)
        if len(x) == 0:
            return y
        scratch = Scratch(products.launcher)
        codes, factors = scratch.parts(*products.sizes(len(x), self.inputs))
        of_x = Codes(codes, factors, products.units(self.inputs))
        products.quantize(x.data_ptr(), len(x), self.inputs, of_x)
        items, limit = row_items(len(x))
        tables = Tables(products.launcher, items, self._address)
        products.down(tables, len(items), limit, of_x, y.data_ptr())
        return y


class CudaFp8Matrix:
    """The same in fp8: products of a few rows by `fp8_matrix.cu`, of more by torch, widened in parts."""

    def __init__(self, launcher: Launcher, format: FP8, data: Bytes, shape: tuple[int, int]) -> None:
        """data: uint8 [matrix_bytes]."""
        self.outputs, self.inputs = shape
        if data.shape != (format.matrix_bytes(*shape),):
            raise ValueError(f"{data.shape} bytes are no matrix {shape} of {format.name}")
        self._launcher = launcher
        writable = np.require(data, requirements=["C", "W"])  # torch refuses others
        self._data = torch.from_numpy(writable).to(launcher.device)
        self._codes, self._scales = fp8_parts(self._data, *shape)

    @property
    def bytes(self) -> int:
        return self._data.nbytes

    def product(self, x: Tensor) -> Tensor:
        """x float32 [R, inputs] on the device: float32 [R, outputs]."""
        x = x.contiguous()
        if len(x) > FP8_ROWS:
            step = max(1, WIDENED // (self.inputs * BLOCK))  # blocks
            codes, scales = self._codes[0], self._scales[0]
            parts = [
                x @ widened(codes[lo * BLOCK : (lo + step) * BLOCK], scales[lo : lo + step]).mT
                for lo in range(0, len(scales), step)
            ]
            return torch.cat(parts, dim=1)
        y = torch.empty((len(x), self.outputs), dtype=torch.float32, device=x.device)
        if len(x):
            limit = limit_of(min(len(x), PLAIN_LIMITS[-1]), PLAIN_LIMITS)
            wide = -(-self.outputs // PLAIN_CHANNELS)
            self._launcher.launch(
                f"product_{limit}", -(-len(x) // limit) * wide, PLAIN_INNER_THREADS,
                self._codes.data_ptr(), self._scales.data_ptr(), x.data_ptr(), len(x), self.inputs,
                self.outputs, wide, y.data_ptr(),
            )  # fmt: skip
        return y


DeviceMatrix = CudaMatrix | CudaFp8Matrix


class CudaInputs(NamedTuple):
    """Rows of x as up takes them, on the device, and as the reference does."""

    codes: Tensor  # int8 [R, H in whole groups]
    factors: Tensor  # float32 [R, groups, 2]
    reference: ChannelInputs


class CudaChannels:
    """Computes heads and channels on the device."""

    def __init__(self, launcher: Launcher, layout: StoreLayout) -> None:
        """`launcher` has the program of the format's up matrices."""
        assert isinstance(layout.format, FloeFormat)
        self._launcher, self._format, self._hidden = launcher, layout.format, layout.shape.hidden
        self._reference = ReferenceChannels(layout)

    def activations(self, x: Tensor) -> CudaInputs:
        """Returns the rows x float32 [R, H] in the forms that the products read."""
        x, products, group = x.contiguous(), self._up(0), self._format.up.group
        groups = products.units(self._hidden)
        codes = torch.empty((len(x), groups * group), dtype=torch.int8, device=x.device)
        factors = torch.empty((len(x), groups, 2), dtype=torch.float32, device=x.device)
        to = Codes(codes.data_ptr(), factors.data_ptr(), groups)
        products.quantize(x.data_ptr(), len(x), self._hidden, to)
        return CudaInputs(codes, factors, self._reference.activations(x))

    def up(self, heads: Tensor, x: CudaInputs, rows: Tensor, biases: Tensor | None = None) -> Tensor:
        """u of all channels of consecutive heads, float32 [n, channels]. rows: int64 [n]; biases: up's,
        float32 [channels]."""
        channels = len(heads) // self._format.head_bytes(self._hidden, 16) * 16
        codes, factors = x.codes[rows], x.factors[rows]
        u = torch.empty((len(rows), channels), dtype=torch.float32, device=heads.device)
        if u.numel():
            items, limit = row_items(len(rows))
            tables = Tables(self._launcher, items, np.array([heads.data_ptr()], np.int64))
            of_x = Codes(codes.data_ptr(), factors.data_ptr(), factors.shape[1])
            self._up(channels).down(tables, len(items), limit, of_x, u.data_ptr())
        return u if biases is None else u + biases

    def keeps(self, u: Tensor, mask: Mask) -> Tensor:
        """bool [n, channels]: `Mask.keeps` of each tile."""
        return self._reference.keeps(u, mask)

    def channels(self, records: Tensor, u: Tensor, x: CudaInputs, rows: Tensor) -> Tensor:
        """Returns what ReferenceChannels does."""
        return self._reference.channels(records, u, x.reference, rows)

    def _up(self, channels: int) -> BlockProducts:
        return BlockProducts(self._launcher, self._format.up, (channels, self._hidden))
