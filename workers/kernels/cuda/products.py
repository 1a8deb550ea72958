"""Launches of the kernels in `tiles.cu`: quantization, gate and up, down."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shm.blocks import LANES, BlockFormat
from workers.kernels.cuda.launcher import Launcher

LIMITS = (1, 2, 4, 8, 32)  # most rows of an item, of the kernels that there are
MOST_ROWS = LIMITS[-1]
QUANTIZE_THREADS, DOWN_THREADS, COMBINE_THREADS, WARP = 128, 128, 256, 32
DOWN_OUTPUTS = DOWN_THREADS // WARP * 2 * LANES  # of one block of threads
FACTORS = 8  # bytes of a group's step and sum

ITEM = np.dtype([(name, np.int32) for name in "tile tiles rows entry step row out add".split()])
TERM = np.dtype([("first", np.int32), ("parts", np.int32), ("stride", np.int32), ("weight", np.float32)])

Items = NDArray[np.void]


@dataclass(frozen=True)
class Codes:
    """Activations of some rows by groups: their addresses on the device."""

    codes: int
    factors: int
    groups: int  # of a row

    @staticmethod
    def sizes(rows: int, groups: int, group: int) -> tuple[int, int]:
        """Bytes of codes and factors."""
        return rows * groups * group, rows * groups * FACTORS


def limit_of(rows: int) -> int:
    """The least limit of a kernel that takes items of so many rows."""
    return next(limit for limit in LIMITS if rows <= limit)


def in_chunks(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Items of so many rows each, in parts of at most MOST_ROWS: of each part the item, its first row and
    its number of rows."""
    numbers = -(-rows // MOST_ROWS)
    of = np.repeat(np.arange(len(rows)), numbers)
    first = (np.arange(len(of)) - np.repeat(np.cumsum(numbers) - numbers, numbers)) * MOST_ROWS
    return of, first, np.minimum(rows[of] - first, MOST_ROWS)


class Products:
    """The kernels of one format."""

    def __init__(self, launcher: Launcher, format: BlockFormat) -> None:
        self.launcher = launcher
        self.format = format

    def groups(self, inputs: int) -> int:
        return -(-inputs // self.format.group)

    def quantize(self, x: int, rows: int, inputs: int, to: Codes) -> None:
        """x: address of float32 [rows, inputs]."""
        number = rows * to.groups
        blocks = -(-number * WARP // QUANTIZE_THREADS)
        self.launcher.launch(
            "quantize", blocks, QUANTIZE_THREADS, x, inputs, to.groups, number, to.codes, to.factors
        )

    def gate_up(
        self, items: int, number: int, limit: int, tiles: int, rows: int, x: Codes, inner: Codes
    ) -> None:
        """`number` items at an address, of at most `limit` rows; tiles: table of addresses; rows: of x."""
        self.launcher.launch(
            f"gate_up_{limit}", number * inner.groups, self.format.group // LANES * WARP,
            items, tiles, rows, x.codes, x.factors, x.groups, inner.groups, inner.codes, inner.factors,
        )  # fmt: skip

    def down(
        self, items: int, number: int, limit: int, tiles: int, skipped: int, x: Codes, outputs: int, out: int
    ) -> None:
        """The matrix begins `skipped` bytes behind each address in `tiles`. out: float32 [.., outputs]."""
        wide = -(-outputs // DOWN_OUTPUTS)
        self.launcher.launch(
            f"down_{limit}", number * wide, DOWN_THREADS,
            items, tiles, skipped, x.codes, x.factors, x.groups, outputs, wide, out,
        )  # fmt: skip

    def combine(self, out: int, terms: int, offsets: int, rows: int, width: int, y: int) -> None:
        """y: float32 [rows, width]."""
        wide = -(-width // COMBINE_THREADS)
        self.launcher.launch("combine", rows * wide, COMBINE_THREADS, out, terms, offsets, width, wide, y)
