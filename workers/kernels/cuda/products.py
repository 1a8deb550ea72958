"""Launches of the kernels in `tiles.cu` and `plain.cu`: activations rounded, gate and up, down."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shm.blocks import LANES, BlockFormat
from shm.formats import TileFormat
from shm.fp8 import FP8
from workers.kernels.cuda.launcher import Launcher, Tables

LIMITS = (1, 2, 4, 8, 32)  # most rows of an item, of the kernels that there are
PLAIN_LIMITS = LIMITS[:-1]
WARP = 32
QUANTIZE_THREADS, DOWN_THREADS = 128, 128
DOWN_OUTPUTS = DOWN_THREADS // WARP * 2 * LANES  # of one block of threads
ROUND_THREADS, PLAIN_INNER_THREADS, PLAIN_DOWN_THREADS = 256, 128, 256  # of plain.cu
PLAIN_CHANNELS = PLAIN_INNER_THREADS // WARP  # of one block of threads
PLAIN_COLUMNS = 4 * WARP  # the same, where a column has one byte
FACTORS, FLOAT = 8, 4  # bytes of a group's step and sum, and of a float32

ITEM = np.dtype([(name, np.int32) for name in "tile tiles rows entry step row out add".split()])

Items = NDArray[np.void]


@dataclass(frozen=True)
class Codes:
    """Activations of some rows: their addresses on the device."""

    codes: int
    factors: int
    units: int  # of a row: its groups; in bf16 and fp8 its numbers


def limit_of(rows: int, limits: tuple[int, ...] = LIMITS) -> int:
    """The least limit of a kernel that takes items of so many rows."""
    return next(limit for limit in limits if rows <= limit)


def in_chunks(
    rows: NDArray[np.int64], most: int = LIMITS[-1]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Items of so many rows each, in parts of at most `most`: of each part the item, its first row and its
    number of rows."""
    numbers = -(-rows // most)
    of = np.repeat(np.arange(len(rows)), numbers)
    first = (np.arange(len(of)) - np.repeat(np.cumsum(numbers) - numbers, numbers)) * most
    return of, first, np.minimum(rows[of] - first, most)


class Products(ABC):
    """The kernels of one format, whose program the launcher has."""

    limits: tuple[int, ...] = LIMITS

    def __init__(self, launcher: Launcher, shape: tuple[int, int], biases: int = 0) -> None:
        """`shape`: H and channels of the tiles; of a matrix, outputs and inputs. `biases`: where a tile's
        begin, in bytes; 0: there are none."""
        self.launcher = launcher
        self.hidden, self.channels = shape
        self._biases = biases

    @abstractmethod
    def units(self, inputs: int) -> int:
        """Returns the units of a row of activations."""

    @abstractmethod
    def sizes(self, rows: int, inputs: int) -> tuple[int, int]:
        """Returns the bytes that codes and factors of so many rows take."""

    @abstractmethod
    def quantize(self, x: int, rows: int, inputs: int, to: Codes) -> None:
        """x: address of float32 [rows, inputs]."""

    @abstractmethod
    def gate_up(self, tables: Tables, number: int, limit: int, x: Codes, inner: Codes) -> None:
        """tables: `number` items of at most `limit` rows, the tiles' addresses, and the rows of x."""

    @abstractmethod
    def down(self, tables: Tables, number: int, limit: int, inner: Codes, out: int) -> None:
        """tables: items, and the tiles' addresses; out: float32 [.., H]."""


class BlockProducts(Products):
    """`tiles.cu`: the quantized formats."""

    def __init__(
        self,
        launcher: Launcher,
        format: BlockFormat,
        shape: tuple[int, int],
        before_down: int = 0,
        biases: int = 0,
        factors: int = 0,
    ) -> None:
        """`before_down`: the matrices of a tile before down; 0: this is for a single matrix. `factors`: where
        the matrices' factors begin, in bytes from the tile's or the matrix's beginning; 0: there are none."""
        super().__init__(launcher, shape, biases)
        self._format = format
        self._together = format.inputs // format.group  # groups of a record
        self._skipped = before_down * format.blocks_bytes(self.channels, self.hidden)
        self._factors, self._of_down = factors, factors + FLOAT * before_down

    def units(self, inputs: int) -> int:
        return -(-inputs // self._format.inputs) * self._together

    def sizes(self, rows: int, inputs: int) -> tuple[int, int]:
        groups = rows * self.units(inputs)
        return groups * self._format.group, groups * FACTORS

    def quantize(self, x: int, rows: int, inputs: int, to: Codes) -> None:
        number = rows * to.units
        blocks = -(-number * WARP // QUANTIZE_THREADS)
        self.launcher.launch(
            "quantize", blocks, QUANTIZE_THREADS, x, inputs, to.units, number, to.codes, to.factors
        )

    def gate_up(self, tables: Tables, number: int, limit: int, x: Codes, inner: Codes) -> None:
        parts = inner.units // self._together  # records of a tile's channels
        self.launcher.launch(
            f"gate_up_{limit}", number * parts, self._format.inputs // LANES * WARP,
            *tables.addresses, x.codes, x.factors, x.units, parts, self._biases, inner.codes, inner.factors,
            self._factors, tables=tables,
        )  # fmt: skip

    def down(self, tables: Tables, number: int, limit: int, inner: Codes, out: int) -> None:
        wide = -(-self.hidden // DOWN_OUTPUTS)
        self.launcher.launch(
            f"down_{limit}", number * wide, DOWN_THREADS,
            *tables.addresses[:2], self._skipped, inner.codes, inner.factors, inner.units, self.hidden, wide,
            out, self._of_down, tables=tables,
        )  # fmt: skip


class PlainProducts(Products):
    """`plain.cu`: bf16 and fp8, for few rows."""

    limits = PLAIN_LIMITS

    def __init__(
        self, launcher: Launcher, format: TileFormat, shape: tuple[int, int], biases: int = 0
    ) -> None:
        super().__init__(launcher, shape, biases)
        fp8 = isinstance(format, FP8)
        self._number = 4 if fp8 else 2  # bytes of an activation
        self._columns = PLAIN_COLUMNS if fp8 else PLAIN_COLUMNS // 2

    def units(self, inputs: int) -> int:
        return inputs

    def sizes(self, rows: int, inputs: int) -> tuple[int, int]:
        return self._number * rows * inputs, 0

    def quantize(self, x: int, rows: int, inputs: int, to: Codes) -> None:
        number = rows * inputs
        self.launcher.launch("quantize", -(-number // ROUND_THREADS), ROUND_THREADS, x, number, to.codes)

    def gate_up(self, tables: Tables, number: int, limit: int, x: Codes, inner: Codes) -> None:
        wide = -(-self.channels // PLAIN_CHANNELS)
        self.launcher.launch(
            f"gate_up_{limit}", number * wide, PLAIN_INNER_THREADS,
            *tables.addresses, x.codes, self.hidden, self.channels, self._biases, wide, inner.codes,
            tables=tables,
        )  # fmt: skip

    def down(self, tables: Tables, number: int, limit: int, inner: Codes, out: int) -> None:
        wide = -(-self.hidden // self._columns)
        self.launcher.launch(
            f"down_{limit}", number * wide, PLAIN_DOWN_THREADS,
            *tables.addresses[:2], inner.codes, self.hidden, self.channels, wide, out, tables=tables,
        )  # fmt: skip
