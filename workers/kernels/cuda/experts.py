"""The device's share of a layer by the CUDA kernels: all tiles that are there in one launch of gate and up
and one of down, wherever they lie.

For few rows each tile has outputs of its own, so that many blocks of threads compute; for more, tiles of an
expert are added up as they are computed. Either way `sums.cu` or the order of the tiles gives the order of
sums that the host has, so who computes a tile changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shm.layout import StoreLayout
from workers.kernels.c_types import Geometry
from workers.kernels.cuda.launcher import Launcher, Scratch, Tables
from workers.kernels.cuda.products import FLOAT, ITEM, Codes, Items, Products, in_chunks
from workers.kernels.cuda.sums import TERM, Weighted
from workers.kernels.tile_sums import TileSums, TorchKernel

FEW, MANY = 8, 32  # most rows of an expert for which its tiles have outputs of their own; of an item else
KEPT_PLACES, KEPT_ROWS = 512, 128  # layouts of shares that are kept, with so many rows at most

Numbers = NDArray[np.int32]
Floats = NDArray[np.float32]


class Places:
    """The places of the rows of a share's items: item i has the rows rows[offsets[i]:offsets[i + 1]] of x,
    and cuts[i] tiles."""

    def __init__(self, cuts: Numbers, offsets: Numbers, rows: Numbers, x_rows: int) -> None:
        """Use `places_of`."""
        self.rows = rows.astype(np.int32)
        self._first = offsets[:-1].astype(np.int64)
        self._number = np.diff(offsets).astype(np.int64)  # of an item's rows
        self.most = int(self._number.max(initial=0))
        self.few = self.most <= FEW
        # The entries of an item: one for each tile and row, tile after tile.
        entries = cuts * self._number
        self._entry = np.cumsum(entries) - entries
        self.entries = int(entries.sum())
        self.outputs = self.entries if self.few else len(rows)
        # What each row of x adds up, row by row, still without weights, and of each term its place among the
        # rows: experts stay in their order. Then, where each row's terms begin.
        self.order = np.argsort(self.rows, kind="stable")
        self.terms = self._terms(cuts)[self.order]
        self.row_terms = np.searchsorted(self.rows[self.order], np.arange(x_rows + 1)).astype(np.int32)
        if self.few:
            before = np.cumsum(cuts) - cuts  # tiles of earlier items
            of = np.repeat(np.arange(len(cuts)), cuts)
            tile = np.arange(len(of)) - before[of]
            self._every = self._made(tile, of, tile, np.zeros_like(tile), self._number[of])
            self._before = before.tolist()

    def items(self, tiles: Sequence[tuple[int, int, Tensor]]) -> tuple[Items, Items]:
        """Returns what is launched for tiles as of `LayerOnDevice.add`, an item's behind each other, in the
        order of a table of addresses: the items of gate and up, and of down."""
        if self.few:
            made = self._every[[self._before[item] + tile for item, tile, _ in tiles]]
            made["tile"] = np.arange(len(tiles))
            return made, made
        of = np.array([item for item, _, _ in tiles], np.int64)
        tile = np.array([tile for _, tile, _ in tiles], np.int64)
        table = np.arange(len(of))
        chunk, lo, rows = in_chunks(self._number[of], MANY)
        inner = self._made(table[chunk], of[chunk], tile[chunk], lo, rows)
        starts = np.flatnonzero(np.append(True, of[1:] != of[:-1]))
        lengths = np.diff(np.append(starts, len(of)))
        of, tile = of[starts], tile[starts]
        chunk, lo, rows = in_chunks(self._number[of], MANY)
        down = self._made(table[starts][chunk], of[chunk], tile[chunk], lo, rows)
        down["tiles"], down["step"] = lengths[chunk], self._number[of][chunk]
        down["out"], down["add"] = self._first[of][chunk] + lo, tile[chunk] > 0
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
        made["entry"] = made["out"] = self._entry[of] + tile * self._number[of] + lo
        made["row"] = self._first[of] + lo
        return made

    def _terms(self, cuts: Numbers) -> NDArray[np.void]:
        """Returns what each of the rows adds."""
        terms, place = np.zeros(len(self.rows), TERM), np.arange(len(self.rows))
        terms["first"], terms["parts"] = place, 1
        if self.few:
            of = np.repeat(np.arange(len(cuts)), self._number)
            terms["first"] += self._entry[of] - self._first[of]
            terms["parts"], terms["stride"] = cuts[of], self._number[of]
        return terms


def places_of(cuts: Numbers, offsets: Numbers, rows: Numbers, x_rows: int) -> Places:
    """Returns places; those of a step of few tokens are kept, because in the next layers and steps they are
    often the same."""
    if len(rows) > KEPT_ROWS:
        return Places(cuts, offsets, rows, x_rows)
    return _kept_places(*(np.asarray(of, np.int32).tobytes() for of in (cuts, offsets, rows)), x_rows)


@lru_cache(KEPT_PLACES)
def _kept_places(cuts: bytes, offsets: bytes, rows: bytes, x_rows: int) -> Places:
    each = (np.frombuffer(numbers, np.int32) for numbers in (cuts, offsets, rows))
    return Places(next(each), next(each), next(each), x_rows)


class Inputs:
    """Rows of x as gate and up read them."""

    def __init__(self, products: Products, rows: int, scratch: Scratch | None = None) -> None:
        """`scratch`: whose memory they may be; they have memory of their own otherwise."""
        self.rows, self._products = rows, products
        self._memory = scratch or Scratch(products.launcher)
        codes, factors = self._memory.parts(*products.sizes(rows, products.hidden))
        self.codes = Codes(codes, factors, products.units(products.hidden))

    def round(self, x: Tensor) -> Inputs:
        """Become x, float32 [R, H]. May be part of a graph."""
        products = self._products
        products.quantize(x.contiguous().data_ptr(), len(x), products.hidden, self.codes)
        return self


class LayerOnDevice:
    """One layer's share while it is computed."""

    def __init__(
        self, inputs: Inputs, products: Products, places: Places, weights: Floats, scratch: Scratch
    ) -> None:
        """Use `CudaExperts.begin`."""
        self._inputs, self._products, self._places, self._weights = inputs, products, places, weights
        hidden, channels = products.hidden, products.channels
        self._scratch = scratch
        of_row = products.apart and places.most == 1
        inner, factors, self._out, numbers = scratch.parts(
            *products.sizes(places.entries, channels),
            places.outputs * hidden * FLOAT,
            places.entries * channels * FLOAT if of_row else 0,
        )
        self._numbers = numbers if of_row else None
        self._inner = Codes(inner, factors, products.units(channels))

    def add(self, tiles: Sequence[tuple[int, int, Tensor]]) -> None:
        """Compute tiles: of each its item among the share's, its number within its expert, and its bytes on
        the device; of one item in their order, also from one call to the next."""
        if not tiles:
            return
        products, places = self._products, self._places
        tiles = sorted(tiles, key=itemgetter(0))  # an item's are added up one after the other
        inner, down = places.items(tiles)
        addresses = np.array([data.data_ptr() for _, _, data in tiles], np.int64)
        limit = products.limit(places.most)
        tables = Tables(products.launcher, inner, addresses, places.rows)
        products.gate_up(tables, len(inner), limit, self._inputs.codes, self._inner, self._numbers)
        if down is not inner:
            tables = Tables(products.launcher, down, addresses)
        products.down(tables, len(down), limit, self._inner, self._out)

    def result(self) -> Weighted:
        """The weighted sum of all tiles, which were added."""
        terms = self._places.terms.copy()
        terms["weight"] = self._weights[self._places.order]
        return Weighted(self._out, terms, self._places.row_terms, self._scratch)


class CudaExperts:
    """Computes tiles of a block format, of bf16 or fp8."""

    def __init__(self, launcher: Launcher, layout: StoreLayout, many: TorchKernel | None = None) -> None:
        """`launcher` has the layout's program. `many`: what computes a share in which an expert has more than
        FEW rows; None: this too."""
        shape, geometry = layout.shape, Geometry.of_tiles(layout)
        of_tile = shape.math.matrices - 1, geometry.biases, geometry.weights.factors
        self._products = Products(launcher, layout.format, (shape.hidden, shape.tile), *of_tile)
        self._many = many
        self._of_few = Scratch(launcher)  # of shares of few rows, one after the other
        self._x_of_few = Scratch(launcher)

    def inputs(self, rows: int) -> Inputs | None:
        """Memory for so many rows of x, where no share of them is another kernel's."""
        return Inputs(self._products, rows) if self._many is None or rows <= FEW else None

    def begin(
        self, x: Any, cuts: Numbers, offsets: Numbers, rows: Numbers, weights: Floats
    ) -> LayerOnDevice | TileSums:
        """The share whose item i has the rows rows[offsets[i]:offsets[i + 1]] of x, float32 [R, H] on the
        device or rounded already, with the weights at the same places, and cuts[i] tiles, 1 or more."""
        if self._many is not None and np.diff(offsets).max(initial=0) > FEW:
            return self._many.begin(x, cuts, offsets, rows, weights)
        few = len(rows) <= KEPT_ROWS
        if not isinstance(x, Inputs):
            x = Inputs(self._products, len(x), self._x_of_few if few else None).round(x)
        places = places_of(cuts, offsets, rows, x.rows)
        scratch = self._of_few if few else Scratch(self._products.launcher)
        return LayerOnDevice(x, self._products, places, weights, scratch)
