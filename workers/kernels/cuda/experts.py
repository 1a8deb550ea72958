"""The device's share of a layer by the CUDA kernels: all tiles that are there in one launch of gate and up
and one of down, wherever they lie.

For few rows each tile has outputs of its own, so that many blocks of threads compute; for more, tiles of an
expert are added up as they are computed. Either way `combine` or the order of the tiles gives the order of
sums that the host has, so who computes a tile changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shm.blocks import BlockFormat
from shm.layout import StoreLayout
from workers.kernels.cuda.buffers import Scratch, Uploaded
from workers.kernels.cuda.launcher import Launcher
from workers.kernels.cuda.products import (
    ITEM,
    TERM,
    BlockProducts,
    Codes,
    Items,
    PlainProducts,
    Products,
    in_chunks,
    limit_of,
)

FEW = 8  # most rows of an expert for which its tiles have outputs of their own
FLOAT = 4  # bytes
NO_LIMIT = 1 << 31

Numbers = NDArray[np.int32]


class Places:
    """Where the rows of a share's items are: item i has the rows rows[offsets[i]:offsets[i + 1]] of x, with
    the weights at the same places, and up to cuts[i] tiles."""

    def __init__(self, cuts: Numbers, offsets: Numbers, rows: Numbers, weights: NDArray[np.float32]) -> None:
        self.rows, self.weights = rows, weights
        self.first = offsets[:-1].astype(np.int64)
        self.number = np.diff(offsets).astype(np.int64)  # of an item's rows
        self.few = int(self.number.max(initial=0)) <= FEW
        # The entries of an item: one for each tile and row, tile after tile.
        entries = cuts * self.number
        self.entry = np.cumsum(entries) - entries
        self.entries = int(entries.sum())
        self.outputs = self.entries if self.few else len(rows)

    def items(self, of: NDArray[np.int64], tile: NDArray[np.int64], at: int = 0) -> tuple[Items, Items]:
        """For tiles of an item each (`of`), in the order of a table of addresses, whose numbers within their
        items are `tile`: the items of gate and up, and of down."""
        table = np.arange(len(of))
        chunk, lo, rows = in_chunks(self.number[of])
        inner = self._made(table[chunk], of[chunk], tile[chunk], lo, rows)
        if self.few:
            return inner, inner
        starts = np.flatnonzero(np.append(True, of[1:] != of[:-1]))
        lengths = np.diff(np.append(starts, len(of)))
        of, tile = of[starts], tile[starts]
        chunk, lo, rows = in_chunks(self.number[of])
        down = self._made(table[starts][chunk], of[chunk], tile[chunk], lo, rows)
        down["tiles"], down["step"] = lengths[chunk], self.number[of][chunk]
        down["out"], down["add"] = self.first[of][chunk] + lo, tile[chunk] > 0
        return inner, down

    def _made(
        self,
        table: NDArray[np.int64],
        of: NDArray[np.int64],
        tile: NDArray[np.int64],
        lo: NDArray[np.int64],
        rows: NDArray[np.int64],
    ) -> Items:
        made = np.zeros(len(of), ITEM)
        made["tile"], made["tiles"], made["rows"] = table, 1, rows
        made["entry"] = made["out"] = self.entry[of] + tile * self.number[of] + lo
        made["row"] = self.first[of] + lo
        return made

    def terms(self, computed: Numbers, x_rows: int) -> tuple[NDArray[np.void], Numbers]:
        """What each row of x adds up, row by row, and where each row's terms begin. computed: tiles of each
        item."""
        of = np.repeat(np.arange(len(self.number)), self.number)
        place = np.arange(len(self.rows))
        terms = np.zeros(len(place), TERM)
        if self.few:
            terms["first"] = self.entry[of] + place - self.first[of]
            terms["parts"], terms["stride"] = computed[of], self.number[of]
        else:
            terms["first"], terms["parts"] = place, 1
        terms["weight"] = self.weights
        order = np.argsort(self.rows, kind="stable")  # experts stay in their order
        order = order[computed[of[order]] > 0]
        offsets = np.searchsorted(self.rows[order], np.arange(x_rows + 1)).astype(np.int32)
        return terms[order], offsets


class LayerOnDevice:
    """One layer's share while it is computed."""

    def __init__(self, products: Products, x: Tensor, places: Places) -> None:
        """Use `CudaExperts.begin`."""
        self._products, self._places = products, places
        self._computed = np.zeros(len(places.number), np.int32)  # tiles of each item
        self._x = x = x.contiguous()
        hidden, channels = products.hidden, products.channels
        self._scratch = Scratch(
            products.launcher,
            *products.sizes(len(x), hidden),
            *products.sizes(places.entries, channels),
            places.outputs * hidden * FLOAT,
        )
        codes, factors, inner, inner_factors, self._out = self._scratch.addresses
        self._codes = Codes(codes, factors, products.units(hidden))
        self._inner = Codes(inner, inner_factors, products.units(channels))
        self._row_list = Uploaded(products.launcher, places.rows.astype(np.int32))
        products.quantize(x.data_ptr(), len(x), hidden, self._codes)

    def add(self, tiles: Sequence[tuple[int, int, Tensor]]) -> None:
        """Compute tiles: of each its item among the share's, its number within its expert, and its bytes on
        the device; of one item in their order, also from one call to the next."""
        if not tiles:
            return
        products = self._products
        of = np.array([item for item, _, _ in tiles], np.int64)
        numbers = np.array([tile for _, tile, _ in tiles], np.int64)
        table = np.array([data.data_ptr() for _, _, data in tiles], np.int64)
        np.add.at(self._computed, of, 1)
        inner, down = self._places.items(of, numbers)
        limit = limit_of(int(inner["rows"].max()), products.limits)
        upload = Uploaded(products.launcher, table, inner, down)
        addresses, to_inner, to_down = upload.addresses
        (rows,) = self._row_list.addresses
        products.gate_up(to_inner, len(inner), limit, addresses, rows, self._codes, self._inner)
        products.down(to_down, len(down), limit, addresses, self._inner, self._out)

    def result(self) -> Tensor:
        """The weighted sum of the tiles that were added, float32 [R, H]."""
        y = torch.empty_like(self._x)
        upload = Uploaded(self._products.launcher, *self._places.terms(self._computed, len(y)))
        terms, offsets = upload.addresses
        self._products.combine(self._out, terms, offsets, len(y), y.data_ptr())
        return y


class CudaExperts:
    """Computes tiles of a quantized format, or of bf16 where no expert has more than `most_rows` rows."""

    def __init__(self, launcher: Launcher, layout: StoreLayout) -> None:
        """`launcher` has the format's program."""
        shape, format = (layout.shape.hidden, layout.shape.tile), layout.format
        self._products: Products
        if isinstance(format, BlockFormat):
            self.most_rows = NO_LIMIT
            self._products = BlockProducts(launcher, format, shape)
        else:
            self.most_rows = FEW
            self._products = PlainProducts(launcher, shape)

    def begin(
        self, x: Tensor, cuts: Numbers, offsets: Numbers, rows: Numbers, weights: NDArray[np.float32]
    ) -> LayerOnDevice:
        """The share whose item i has the rows rows[offsets[i]:offsets[i + 1]] of x, float32 [R, H] on the
        device, with the weights at the same places, and cuts[i] tiles at most."""
        return LayerOnDevice(self._products, x, Places(cuts, offsets, rows, weights))
