"""Matrices of a quantized format on a GPU: y = x @ W.T by the kernels of an expert's down, in fp8 of its up.

With them up of the formats whose gate and down lie by channel (`shm/floe.py`), so with the host's bits and
its masks. What one row keeps of the channels `channels.cu` computes; for more rows it is torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shm.floe import FloeFormat
from shm.formats import Bytes, MatrixFormat
from shm.fp8 import BLOCK, FP8
from shm.layout import StoreLayout
from workers.kernels.c_types import Geometry
from workers.kernels.cuda.launcher import Launcher, Scratch, Tables
from workers.kernels.cuda.products import FLOAT, ITEM, Codes, Items, Products, in_chunks
from workers.kernels.reference import ChannelInputs, ReferenceChannels, fp8_parts, widened

FP8_VECTOR = 16  # inputs that a lane reads together
FP8_ROWS = 32  # of a product that kernels compute: torch computes more of them faster
WIDENED = 1 << 24  # numbers of a matrix in fp8 that are float32 at a time


@lru_cache(256)
def row_items(rows: int, most: int) -> Items:
    """The items of a product of one matrix with so many rows, of at most `most` each."""
    _, lo, number = in_chunks(np.array([rows]), most)
    made = np.zeros(len(lo), ITEM)
    made["tiles"], made["rows"], made["entry"], made["row"], made["out"] = 1, number, lo, lo, lo
    return made


def tables_of(
    products: Products, address: int, rows: int, *places: NDArray[np.int32]
) -> tuple[Tables, int, int]:
    """Returns what is launched for so many rows and the matrix there: the tables, the number of items, and
    their limit."""
    limit = products.limit(rows)
    items = row_items(rows, limit)
    tables = Tables(products.launcher, items, np.array([address], np.int64), *places)
    return tables, len(items), limit


class CudaMatrix:
    """A matrix [outputs, inputs] of a quantized format, or in fp8, of which torch multiplies many rows; its
    bytes are copied to the device."""

    def __init__(self, launcher: Launcher, format: MatrixFormat, data: Bytes, shape: tuple[int, int]) -> None:
        """data: uint8 [matrix_bytes], as `MatrixFormat.encode_matrix` writes it."""
        self.outputs, self.inputs = shape
        if data.shape != (format.matrix_bytes(*shape),):
            raise ValueError(f"{data.shape} bytes are no matrix {shape} of {format.name}")
        factors = Geometry(format, self.inputs, self.outputs).weights.factors
        self._fp8 = isinstance(format, FP8)
        self._products = Products(launcher, format, shape[::-1] if self._fp8 else shape, factors=factors)
        writable = np.require(data, requirements=["C", "W"])  # torch refuses others
        self._data = torch.from_numpy(writable).to(launcher.device)

    @property
    def bytes(self) -> int:
        return self._data.nbytes

    def product(self, x: Tensor) -> Tensor:
        """x float32 [R, inputs] on the device: float32 [R, outputs]."""
        x, rows = x.contiguous(), len(x)
        if self._fp8 and (rows > FP8_ROWS or self.inputs % FP8_VECTOR):
            return self._widened(x)
        y = torch.empty((rows, self.outputs), dtype=torch.float32, device=x.device)
        products, address = self._products, self._data.data_ptr()
        if rows and self._fp8:  # as up, whose result is nothing else
            of_x, of_y = Codes(x.data_ptr(), 0, self.inputs), Codes(y.data_ptr(), 0, self.outputs)
            products.gate_up(*tables_of(products, address, rows, np.arange(rows, dtype=np.int32)), of_x, of_y)
        elif rows:
            scratch = Scratch(products.launcher)
            codes, factors = scratch.parts(*products.sizes(rows, self.inputs))
            of_x = Codes(codes, factors, products.units(self.inputs))
            products.quantize(x.data_ptr(), rows, self.inputs, of_x)
            products.down(*tables_of(products, address, rows), of_x, y.data_ptr())
        return y

    def _widened(self, x: Tensor) -> Tensor:
        """Returns the product by torch, widened in parts."""
        codes, scales = (part[0] for part in fp8_parts(self._data, self.outputs, self.inputs))
        step = max(1, WIDENED // (self.inputs * BLOCK))  # blocks
        parts = [
            x @ widened(codes[lo * BLOCK : (lo + step) * BLOCK], scales[lo : lo + step]).mT
            for lo in range(0, len(scales), step)
        ]
        return torch.cat(parts, dim=1)


KEPT = np.dtype([("u", np.int64), ("first", np.int32), ("number", np.int32), ("line", np.int64)])
KEPT_THREADS, TOGETHER = 128, 8  # of channels.cu


class CudaInputs:
    """Rows of x as up and, of a single row, gate read them, on the device."""

    x: Tensor  # float32 [R, H]

    def __init__(self, kernel: CudaChannels, rows: int) -> None:
        """Use `CudaChannels.inputs`."""
        self._kernel, self.alone, device = kernel, rows == 1, kernel.device  # alone: there is a single row
        self.units = units = kernel.products(0).units(kernel.hidden)
        if self.alone and kernel.bits < 16:  # as long as whole lines of records; what is behind x becomes 0
            units = 8 * kernel.lines // kernel.bits
        self.codes = torch.empty((rows, units * kernel.group), dtype=torch.int8, device=device)
        self.factors = torch.empty((rows, units, 2), dtype=torch.float32, device=device)
        wide, dtype = (
            ((units, 16, 4), torch.int8) if kernel.bits < 16 else ((32 * kernel.lines,), torch.bfloat16)
        )
        self.words = torch.zeros(wide, dtype=dtype, device=device)  # of a single row, for gate

    def round(self, x: Tensor) -> CudaInputs:
        """Become x, float32 [R, H]. May be part of a graph."""
        self.x, kernel = x.contiguous(), self._kernel
        to = Codes(self.codes.data_ptr(), self.factors.data_ptr(), self.factors.shape[1])
        kernel.products(0).quantize(self.x.data_ptr(), len(x), kernel.hidden, to)
        if self.alone and kernel.bits < 16:
            self.words.copy_(self.codes.view(-1, 4, 16).mT)
        elif self.alone:
            self.words[: kernel.hidden].copy_(self.x[0])
        return self

    @cached_property
    def reference(self) -> ChannelInputs:
        """As the reference takes them."""
        return self._kernel.reference.activations(self.x)


class CudaChannels:
    """Computes heads and channels on the device."""

    def __init__(self, launcher: Launcher, channels: Launcher, layout: StoreLayout) -> None:
        """`launcher` has the program of the format's up matrices, `channels` that of its channels."""
        assert isinstance(layout.format, FloeFormat)
        self._launcher, self._channels, self.device = launcher, channels, launcher.device
        self._up, self.bits, self.hidden = layout.format.up, layout.format.rows.bits, layout.shape.hidden
        self.group, self.lines = self._up.group, -(-self.hidden * self.bits // 512)
        self.reference = ReferenceChannels(layout)
        self.keeps = self.reference.keeps
        self._inner = Scratch(channels)

    def inputs(self, rows: int) -> CudaInputs | None:
        """Memory for a single row of x; several are taken as they are."""
        return CudaInputs(self, rows) if rows == 1 else None

    def activations(self, x: Tensor) -> CudaInputs:
        """Returns the rows x float32 [R, H] in the forms that the products read."""
        return CudaInputs(self, len(x)).round(x)

    def ups(
        self,
        heads: Tensor,
        experts: Sequence[int] | Tensor,
        x: CudaInputs,
        rows: Tensor,
        offsets: NDArray[np.int32],
        channels: Sequence[int],
    ) -> Tensor:
        """Returns u, as DeviceChannelKernel says, by one launch; `experts`: a list, or int64 there."""
        number, most = np.diff(offsets), max(channels)
        products, codes, factors = self.products(most), x.codes, x.factors
        limit = products.limit(int(number.max()))
        of, lo, some = in_chunks(number.astype(np.int64), limit)
        items = np.zeros(len(of), ITEM)
        items["tile"], items["tiles"], items["rows"], items["out"] = of, 1, some, offsets[:-1][of] + lo
        if not x.alone:
            items["entry"], codes, factors = items["out"], codes[rows], factors[rows]
        if isinstance(experts, Tensor):
            there = heads.data_ptr() + experts * heads.stride(0)
            tables = Tables(self._launcher, items)
            tables.addresses.append(there.data_ptr())
        else:
            places = heads.data_ptr() + np.array(experts, np.int64) * heads.stride(0)
            tables = Tables(self._launcher, items, places)
        u = torch.empty((int(offsets[-1]), most), dtype=torch.float32, device=heads.device)
        of_x = Codes(codes.data_ptr(), factors.data_ptr(), x.units)
        products.down(tables, len(items), limit, of_x, u.data_ptr())
        return u

    def channels(self, records: Tensor, u: Tensor, x: CudaInputs, rows: Tensor) -> Tensor:
        """Returns what ReferenceChannels does."""
        return self.reference.channels(records, u, x.reference, rows)

    def kept(
        self, tiles: Items, records: NDArray[np.int64], which: NDArray[np.int32], x: CudaInputs, out: Tensor
    ) -> None:
        """Write what tiles give the one row of x to their lines of out, as DeviceChannelKernel says."""
        tables, threads = Tables(self._channels, tiles, records, which), KEPT_THREADS
        (inner,) = self._inner.parts(len(which) * FLOAT)
        if wide := -(-int(tiles["number"].max()) // TOGETHER):
            self._channels.launch(
                "gates", len(tiles) * wide, threads, *tables.addresses, x.words.data_ptr(),
                x.factors.data_ptr(), self.lines, wide, inner, tables=tables,
            )  # fmt: skip
        wide = -(-self.lines * 16 // threads)
        self._channels.launch(
            "downs", len(tiles) * wide, threads, *tables.addresses[:2], inner, self.lines, self.hidden, wide,
            out.data_ptr(), tables=tables,
        )  # fmt: skip

    def products(self, channels: int) -> Products:
        """Returns the kernels of up for so many channels."""
        return Products(self._launcher, self._up, (channels, self.hidden))
