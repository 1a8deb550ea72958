"""What the experts of a layer add to each row, by one launch of `sums.cu`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workers.kernels.cuda.launcher import TABLE_ALIGNMENT, Launcher, Tables, places

THREADS = 256
TENSOR, WEIGHTED, PARTS = range(3)
SOURCE, HEADER_BYTES = 4, 16  # numbers of int64; rows and sources
TERM = np.dtype([("first", np.int32), ("parts", np.int32), ("stride", np.int32), ("weight", np.float32)])
MOST_SOURCES, MOST_PARTS = 4, 64


class Weighted(NamedTuple):
    """Weighted sums of lines [.., H], float32, from an address on the device on: what each row adds up, row
    by row, and where each row's terms begin."""

    base: int
    terms: NDArray[np.void]  # of TERM
    offsets: NDArray[np.int32]  # [R + 1]
    memory: object = None  # which has to live until they are added
    memory: object = None  # what has to live until these have been added


def sums_table(rows: int, added: Sequence[Tensor | Weighted], parts: Sequence[int]) -> NDArray[np.uint8]:
    """Returns the bytes that tell a launch what is added up, in this order. parts: addresses, as the device
    reads them, of float32 [rows, H]; added together behind all else."""
    sources, blobs = np.zeros((MOST_SOURCES, SOURCE), np.int64), list[NDArray[Any]]()
    number = len(added) + bool(parts)
    head = np.array([rows, number], np.int64)
    arrays = [head, sources[:number].reshape(-1)]
    for one in added:
        blobs += [one.offsets, one.terms] if isinstance(one, Weighted) else []
    if parts:
        blobs.append(np.array(parts, np.int64))
    arrays += blobs
    sizes = [array.nbytes for array in arrays]
    sizes[:2] = [sizes[0] + sizes[1], 0]  # the sources follow the header
    starts, size = places(TABLE_ALIGNMENT, sizes)
    starts[1], at = head.nbytes, 2
    for line, one in zip(sources, added, strict=False):
        if isinstance(one, Weighted):
            line[:] = WEIGHTED, one.base, starts[at], starts[at + 1]
            at += 2
        else:
            assert one.is_contiguous()
            line[:2] = TENSOR, one.data_ptr()
    if parts:
        sources[number - 1] = PARTS, 0, starts[at], len(parts)
    made = np.empty(size, np.uint8)
    for start, array in zip(starts, arrays, strict=True):
        made[start : start + array.nbytes] = array.view(np.uint8)
    return made


def table_room(rows: int, terms: int, parts: int) -> int:
    """Returns the most bytes of a table of at most so many rows, terms and parts."""
    numbers = HEADER_BYTES + 8 * (SOURCE * MOST_SOURCES + parts) + 2 * 4 * (rows + 1) + TERM.itemsize * terms
    return numbers + TABLE_ALIGNMENT * 8


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
