"""The descriptor of a Work: which tiles of which experts of one layer are computed for which rows of x.

The same bytes lie in shared memory beside a worker's answer (`lane.py`), travel as one frame over ZeroMQ
(`Work` in protocol/messages.py, with x as another), and are read in place by C, which checks every number of
them before it computes anything (`workers/kernels/c/descriptor.h`). Numbers are in the machine's byte order;
there is no padding:

    bytes 0     generation int64, of the worker that it is sent to; 0 in the sender's own process
          8     seq int64, unique within the coordinator's generation
          16    layer int64
          24    number of items n int64      32 number of rows k int64      40 rows of x R int64
          48    threshold float32            52 share float32: the mask of a format that has masks (mask.py)
          56    unused
          64    items int32 [n, 3]: expert, first tile, end     offsets int32 [n + 1]
                rows int32 [k]     weights float32 [k]

Item i is computed for the rows rows[offsets[i]:offsets[i + 1]] of x float32 [R, H], ascending, with the
routing weights at the same places. The answer is y float32 [R, H]: the sum over the items of their weights
times the sums of their tiles' outputs, 0 for rows without an item. The pipeline makes the descriptors of a
layer in one call (`pipeline/experts/division.py`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shm.formats import Float32
from shm.mask import DENSE, Mask

HEADER = 16  # numbers of 4 bytes
GENERATION, SEQ, LAYER, ITEMS, ROWS, X_ROWS = range(6)  # of its numbers of 8 bytes
THRESHOLD, SHARE = 12, 13  # of its numbers of 4 bytes

Int32 = NDArray[np.int32]
Descriptor = Int32  # one-dimensional and contiguous


def numbers(items: int, rows: int) -> int:
    """The length of a descriptor with so many items and rows."""
    return HEADER + 4 * items + 1 + 2 * rows


def address_of(array: Any) -> int:
    """The address of a contiguous array's memory; sooner than by `array.ctypes`."""
    if array.flags.writeable and array.size:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # three times as soon as by its interface
    address: int = array.__array_interface__["data"][0]
    return address


def head_of(descriptor: Descriptor) -> memoryview:
    """The header's numbers of 8 bytes."""
    return descriptor[:HEADER].data.cast("B").cast("q")


def describe(
    layer: int,
    items: Int32 | Sequence[Sequence[int]],
    offsets: Int32 | Sequence[int],
    rows: Int32 | Sequence[int],
    weights: Float32 | Sequence[float],
    x_rows: int,
    mask: Mask = DENSE,
    seq: int = 0,
) -> Descriptor:
    """A descriptor with these parts, for generation 0. They are not checked."""
    items = np.asarray(items, np.int32).reshape(-1, 3)
    head = np.zeros(HEADER, np.int32)
    head.view(np.int64)[SEQ : X_ROWS + 1] = seq, layer, len(items), len(rows), x_rows
    head.view(np.float32)[[THRESHOLD, SHARE]] = mask.threshold, mask.share
    lists = np.asarray(offsets, np.int32), np.asarray(rows, np.int32), np.asarray(weights, np.float32)
    return np.concatenate([head, items.ravel(), *(each.view(np.int32) for each in lists)])
