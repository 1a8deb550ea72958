"""Matrices of a quantized format on a GPU: y = x @ W.T by the kernels of an expert's down, in fp8 of its up.

With them up of the formats whose gate and down lie by channel (`shm/floe.py`), so with the host's bits and
its masks. What one row keeps of the channels `channels.cu` computes; for more rows it is torch's.
"""

from __future__ import annotations

from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from shm.floe import FloeFormat
from shm.formats import Bytes, MatrixFormat
from shm.fp8 import BLOCK, FP8
from shm.layout import StoreLayout
from workers.kernels.c_types import Geometry
from workers.kernels.cuda.launcher import Launcher, Scratch, Tables
from workers.kernels.cuda.products import ITEM, Codes, Items, Products, in_chunks
from workers.kernels.reference import ChannelInputs, ReferenceChannels, fp8_parts, widened

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
        if self._fp8 and rows > FP8_ROWS:
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
    """Rows of x, float32 [R, H], and as up takes them, on the device."""

    def __init__(self, x: Tensor, codes: Tensor, factors: Tensor, reference: ReferenceChannels) -> None:
        """codes: int8 [R, H in whole groups]; factors: float32 [R, groups, 2]."""
        self.x, self.codes, self.factors, self._reference = x, codes, factors, reference

    @cached_property
    def reference(self) -> ChannelInputs:
        """As the reference takes them."""
        return self._reference.activations(self.x)


class CudaChannels:
    """Computes heads and channels on the device."""

    def __init__(self, launcher: Launcher, channels: Launcher, layout: StoreLayout) -> None:
        """`launcher` has the program of the format's up matrices, `channels` that of its channels."""
        assert isinstance(layout.format, FloeFormat)
        self._launcher, self._channels = launcher, channels
        self._format, self._hidden = layout.format, layout.shape.hidden
        self._reference = ReferenceChannels(layout)
        self.keeps = self._reference.keeps

    def activations(self, x: Tensor) -> CudaInputs:
        """Returns the rows x float32 [R, H] in the forms that the products read."""
        x, products, group = x.contiguous(), self._up(0), self._format.up.group
        groups = products.units(self._hidden)
        codes = torch.empty((len(x), groups * group), dtype=torch.int8, device=x.device)
        factors = torch.empty((len(x), groups, 2), dtype=torch.float32, device=x.device)
        to = Codes(codes.data_ptr(), factors.data_ptr(), groups)
        products.quantize(x.data_ptr(), len(x), self._hidden, to)
        return CudaInputs(x, codes, factors, self._reference)

    def up(self, heads: Tensor, x: CudaInputs, rows: Tensor, biases: Tensor | None = None) -> Tensor:
        """u of all channels of consecutive heads, float32 [n, channels]. rows: int64 [n]; biases: up's,
        float32 [channels]."""
        channels = len(heads) // self._format.head_bytes(self._hidden, 16) * 16
        codes, factors = x.codes[rows], x.factors[rows]
        u = torch.empty((len(rows), channels), dtype=torch.float32, device=heads.device)
        if u.numel():
            of_x, products = Codes(codes.data_ptr(), factors.data_ptr(), factors.shape[1]), self._up(channels)
            products.down(*tables_of(products, heads.data_ptr(), len(rows)), of_x, u.data_ptr())
        return u if biases is None else u + biases

    def channels(self, records: Tensor, u: Tensor, x: CudaInputs, rows: Tensor) -> Tensor:
        """Returns what ReferenceChannels does."""
        return self._reference.channels(records, u, x.reference, rows)

    def kept(
        self, tiles: Items, records: NDArray[np.int64], which: NDArray[np.int32], x: CudaInputs, out: Tensor
    ) -> None:
        """Write what tiles give the one row of x to their lines of out, as DeviceChannelKernel says."""
        bits, groups = self._format.rows.bits, x.factors.shape[1]
        lines = -(-self._hidden * bits // 512)
        if bits == 16:
            words, factors = functional.pad(x.x.bfloat16(), (0, 32 * lines - self._hidden)), x.factors
        else:
            padding = 8 * lines // bits - groups
            words = functional.pad(x.codes, (0, 64 * padding)).view(-1, 4, 16).mT.contiguous()
            factors = functional.pad(x.factors, (0, 0, 0, padding))
        tables, threads = Tables(self._channels, tiles, records, which), KEPT_THREADS
        inner = torch.empty(len(which), dtype=torch.float32, device=out.device)
        if wide := -(-int(tiles["number"].max()) // TOGETHER):
            self._channels.launch(
                "gates", len(tiles) * wide, threads, *tables.addresses, words.data_ptr(), factors.data_ptr(),
                lines, wide, inner.data_ptr(), tables=tables,
            )  # fmt: skip
        wide = -(-lines * 16 // threads)
        self._channels.launch(
            "downs", len(tiles) * wide, threads, *tables.addresses[:2], inner.data_ptr(), lines, self._hidden,
            wide, out.data_ptr(), tables=tables,
        )  # fmt: skip

    def _up(self, channels: int) -> Products:
        return Products(self._launcher, self._format.up, (channels, self._hidden))
