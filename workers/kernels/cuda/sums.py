"""What the experts of a layer add to each row, by one launch of `sums.cu`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workers.kernels.cuda.compiler import Program
from workers.kernels.cuda.launcher import TABLE_ALIGNMENT, Launcher, Tables, packed

SUMS = Program("sums.cu")
THREADS = 256
TENSOR, WEIGHTED, PARTS = range(3)
HEADER_BYTES, SOURCE_BYTES = 16, 32
TERM = np.dtype([("first", np.int32), ("parts", np.int32), ("stride", np.int32), ("weight", np.float32)])
MOST_SOURCES, MOST_PARTS = 4, 64


class Weighted(NamedTuple):
    """Weighted sums of lines [.., H], float32, from an address on the device on: what each row adds up, row
    by row, and where each row's terms begin."""

    base: int
    terms: NDArray[np.void]  # of TERM
    offsets: NDArray[np.int32]  # [R + 1]
    memory: object = None  # which has to live until they are added


def sums_table(rows: int, added: Sequence[Tensor | Weighted], parts: Sequence[int]) -> NDArray[np.uint8]:
    """Returns the bytes that tell a launch what is added up, in this order. parts: addresses, as the device
    reads them, of float32 [rows, H]; added together behind all else."""
    named: list[NDArray[Any]] = [
        array for one in added if isinstance(one, Weighted) for array in (one.offsets, one.terms)
    ]
    if parts:
        named.append(np.array(parts, np.int64))
    number = len(added) + bool(parts)
    (_, *starts), made = packed(np.empty(HEADER_BYTES + number * SOURCE_BYTES, np.uint8), *named)
    numbers, start = [rows, number], iter(starts)
    for one in added:
        if isinstance(one, Weighted):
            numbers += WEIGHTED, one.base, next(start), next(start)
        else:
            assert one.is_contiguous()
            numbers += TENSOR, one.data_ptr(), 0, 0
    if parts:
        numbers += PARTS, 0, next(start), len(parts)
    made[: 8 * len(numbers)].view(np.int64)[:] = numbers
    return made


def table_room(rows: int, terms: int, parts: int) -> int:
    """Returns the most bytes of a table of at most so many rows, terms and parts."""
    told = SOURCE_BYTES * MOST_SOURCES + 8 * parts + 2 * 4 * (rows + 1) + TERM.itemsize * terms
    return HEADER_BYTES + told + 2 * MOST_SOURCES * TABLE_ALIGNMENT


class OutputSums:
    """Launches `sums.cu`."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def total(self, y: Tensor, added: Sequence[Tensor | Weighted], parts: Sequence[int]) -> None:
        """y, float32 [R, H] on the device and contiguous, becomes the sum. Parts must not change until the
        device has passed this."""
        made = Tables(self._launcher, sums_table(len(y), added, parts))
        self._launch(made, y, add=False)

    def add(self, at: int, y: Tensor) -> None:
        """Add to y what the table at this address of the device says when the launch runs."""
        self._launch(Tables(self._launcher), y, add=True, at=at)

    def _launch(self, tables: Tables, y: Tensor, *, add: bool, at: int | None = None) -> None:
        hidden, wide = y.shape[1], -(-y.shape[1] // THREADS)
        arguments = (tables.addresses[0] if at is None else at), hidden, wide, int(add), y.data_ptr()
        self._launcher.launch("add_outputs", len(y) * wide, THREADS, *arguments, tables=tables)
