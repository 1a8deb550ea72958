"""Launches of the kernels in `tiles.cu` and `plain.cu`: activations rounded, gate and up, down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shm.blocks import LANES, BlockFormat
from shm.formats import MatrixFormat, TileFormat, whole_lines
from shm.fp8 import FP8, blocks_in
from workers.kernels.cuda.launcher import Launcher, Tables

WARP, FLOAT = 32, 4
QUANTIZE_THREADS = 128
ROW_THREADS = 128  # of gate_up_1 of a quantized format
FACTORS = 8  # bytes of a group's step and sum

ITEM = np.dtype([(name, np.int32) for name in "tile tiles rows entry step row out add".split()])

Items = NDArray[np.void]


@dataclass(frozen=True)
class Codes:
    """Activations of some rows: their addresses on the device."""

    codes: int
    factors: int
    units: int  # of a row: its groups; in bf16 and fp8 its numbers


def in_chunks(
    rows: NDArray[np.int64], most: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Items of so many rows each, in parts of at most `most`: of each part the item, its first row and its
    number of rows."""
    numbers = -(-rows // most)
    of = np.repeat(np.arange(len(rows)), numbers)
    first = (np.arange(len(of)) - np.repeat(np.cumsum(numbers) - numbers, numbers)) * most
    return of, first, np.minimum(rows[of] - first, most)


class Kernels(NamedTuple):
    """The sizes of a format's kernels."""

    limits: tuple[int, ...]  # most rows of an item
    numbers: int  # of a unit of activations
    code_bytes: int  # of a unit; and of what belongs to its codes
    factor_bytes: int
    together: int  # units of a record of weights
    quantized: int  # units that a block of threads rounds
    inner_threads: int  # of a block of gate and up, and its channels
    channels: int
    down_threads: int  # of a block of down, and its outputs
    outputs: int


def kernels_of(format: TileFormat | MatrixFormat) -> Kernels:
    """Returns those of a quantized format, of fp8, or of bf16."""
    if isinstance(format, BlockFormat):
        sizes = format.group, format.group, FACTORS, format.inputs // format.group, QUANTIZE_THREADS // WARP
        return Kernels((8, 32), *sizes, format.inputs // LANES * WARP, format.inputs, 4 * WARP, 4 * 2 * LANES)
    each = 4 if isinstance(format, FP8) else 2  # bytes of an activation, and weights of 4 bytes
    return Kernels((1, 2, 4, 8), 1, each, 0, 1, QUANTIZE_THREADS, 4 * WARP, 4, 8 * WARP, each * WARP)


def fits(format: TileFormat, hidden: int) -> bool:
    """Tells whether the kernels take experts of this H: those of bf16 and fp8 have no part of a block."""
    return isinstance(format, BlockFormat) or hidden % kernels_of(format).outputs == 0


class Products:
    """The kernels of one format, whose program the launcher has."""

    def __init__(
        self,
        launcher: Launcher,
        format: TileFormat | MatrixFormat,
        shape: tuple[int, int],
        before_down: int = 0,
        biases: int = 0,
        factors: int = 0,
    ) -> None:
        """`shape`: H and channels of the tiles; of a matrix that `down` multiplies, outputs and inputs.
        `before_down`: the matrices of a tile before down; 0: this is for a single matrix. `biases` and
        `factors` (of matrices): where these begin, in bytes from a tile's beginning; 0: there are none."""
        self.launcher, self._kernels = launcher, kernels_of(format)
        self.hidden, self.channels = shape
        self.apart = isinstance(format, BlockFormat)  # one row has a kernel of gate and up of its own
        self._arrived = torch.zeros(0, dtype=torch.int32)
        size = self.channels * self.hidden
        self._biases, self._scales, scale_bytes = biases, factors, FLOAT
        if isinstance(format, BlockFormat):
            size = format.blocks_bytes(self.channels, self.hidden)
        elif isinstance(format, FP8):
            self._scales = whole_lines((before_down + 1) * size)
            scale_bytes = FLOAT * blocks_in(self.channels) * blocks_in(self.hidden)
        else:
            size *= 2
        self._skipped, self._of_down = before_down * size, self._scales + before_down * scale_bytes

    def units(self, inputs: int) -> int:
        """Returns the units of a row of activations."""
        together = self._kernels.together
        return -(-inputs // (together * self._kernels.numbers)) * together

    def sizes(self, rows: int, inputs: int) -> tuple[int, int]:
        """Returns the bytes that codes and factors of so many rows take."""
        units = rows * self.units(inputs)
        return units * self._kernels.code_bytes, units * self._kernels.factor_bytes

    def limit(self, rows: int) -> int:
        """Returns the least limit of a kernel that takes items of so many rows, or the largest of all."""
        return next((limit for limit in self._kernels.limits if rows <= limit), self._kernels.limits[-1])

    def quantize(self, x: int, rows: int, inputs: int, to: Codes) -> None:
        """x: address of float32 [rows, inputs]."""
        number = rows * to.units
        blocks, arguments = -(-number // self._kernels.quantized), (x, inputs, to.units, number)
        self.launcher.launch("quantize", blocks, QUANTIZE_THREADS, *arguments, to.codes, to.factors)

    def gate_up(
        self, tables: Tables, number: int, limit: int, x: Codes, inner: Codes, numbers: int | None = None
    ) -> None:
        """tables: `number` items of at most `limit` rows, the tiles' addresses, and the rows of x. numbers:
        where `apart`, for items of one row, address of float32 [entries, channels]."""
        threads, channels, more = self._kernels.inner_threads, self._kernels.channels, tuple[int, ...]()
        if numbers is not None:
            limit, threads, channels = 1, ROW_THREADS, LANES
            more = numbers, self._counts(number * inner.units)
        wide = -(-inner.units * self._kernels.numbers // channels)
        self.launcher.launch(
            f"gate_up_{limit}", number * wide, threads,
            *tables.addresses, x.codes, x.factors, x.units, inner.units, wide, self._biases, self._scales,
            inner.codes, inner.factors, *more, tables=tables,
        )  # fmt: skip

    def _counts(self, number: int) -> int:
        """Address of so many zeros, which a launch leaves as zeros: how many blocks of threads of a record's
        channels have ended."""
        if len(self._arrived) < number:
            self._arrived = torch.zeros(number, dtype=torch.int32, device=self.launcher.device)
        return self._arrived.data_ptr()

    def down(self, tables: Tables, number: int, limit: int, inner: Codes, out: int) -> None:
        """tables: items, and the tiles' addresses; out: float32 [.., H]."""
        wide = -(-self.hidden // self._kernels.outputs)
        self.launcher.launch(
            f"down_{limit}", number * wide, self._kernels.down_threads,
            *tables.addresses[:2], inner.codes, inner.factors, inner.units, self.hidden, wide, self._skipped,
            self._of_down, out, tables=tables,
        )  # fmt: skip
