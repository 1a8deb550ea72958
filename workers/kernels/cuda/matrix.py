"""Matrices of a quantized format on a GPU: y = x @ W.T by the same kernels as an expert's down."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shm.blocks import BlockFormat
from shm.formats import Bytes
from workers.kernels.cuda.buffers import Scratch, Uploaded
from workers.kernels.cuda.launcher import Launcher
from workers.kernels.cuda.products import ITEM, BlockProducts, Codes, Items, in_chunks, limit_of

KEPT = 64  # numbers of rows whose items are kept
ALWAYS = 64  # so many rows or fewer: a CUDA graph may read their items, as long as the matrix lives


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
        self._products = BlockProducts(launcher, format, shape, tiles=False)
        writable = np.require(data, requirements=["C", "W"])  # torch refuses others
        self._data = torch.from_numpy(writable).to(launcher.device)
        self._items: dict[int, tuple[Uploaded, int, int]] = {}  # by rows: number and limit, too

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
        scratch = Scratch(products.launcher, *products.sizes(len(x), self.inputs))
        codes, factors = scratch.addresses
        of_x = Codes(codes, factors, products.units(self.inputs))
        products.quantize(x.data_ptr(), len(x), self.inputs, of_x)
        upload, number, limit = self._items_of(len(x))
        items, table = upload.addresses
        products.down(items, number, limit, table, of_x, y.data_ptr())
        return y

    def _items_of(self, rows: int) -> tuple[Uploaded, int, int]:
        """The items of a product with so many rows, kept for the next one."""
        found = self._items.get(rows)
        if found is None:
            made, limit = row_items(rows)
            table = np.array([self._data.data_ptr()], np.int64)
            upload = Uploaded(self._products.launcher, made, table)
            passing = [number for number in self._items if number > ALWAYS]
            if rows > ALWAYS and len(passing) >= KEPT:
                self._items.pop(passing[0])
            self._items[rows] = found = upload, len(made), limit
        return found
