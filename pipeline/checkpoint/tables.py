"""Embedding tables beside that of the input. A step reads a few of their rows, so they stay in the
checkpoint's files, whose pages the kernel keeps where memory is free."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pipeline.checkpoint.index import BITS
from pipeline.checkpoint.reader import Bits, TensorReader, fill, numbers_of, to_float32
from pipeline.errors import ModelError
from pipeline.models.architecture import TensorRows
from shm.layout import Float32

Places = NDArray[np.int64]
Shape = tuple[int, ...]


class Table(Protocol):
    """A matrix that is read by rows."""

    def rows(self, places: Places) -> Float32:
        """Returns these rows [n, columns], exact. Raises ModelError where one cannot be read."""


class Parameters(Mapping[str, Tensor]):
    """The parameters and buffers of a model outside its routed experts, by their names in transformers."""

    @abstractmethod
    def table(self, name: str, shape: Shape) -> Table:
        """Returns a matrix to read rows of, as long as the model's tensors are open. Raises ModelError."""


class DiskTable:
    """Tensors of a checkpoint, stacked by rows."""

    def __init__(self, reader: TensorReader, tensors: Mapping[str, Shape]) -> None:
        """`reader`: stays open; `tensors`: their shapes. Raises ModelError where a file cannot be opened."""
        self._reader = reader
        self._parts = [TensorRows(name, shape, 0, shape[0]) for name, shape in tensors.items()]
        self._starts: NDArray[Any] = np.array([0, *accumulate(part.rows for part in self._parts)])
        self._held = reader.hold(tensors)
        packed = any(name in reader.packed for name in tensors)
        dtypes = {entry.dtype for _, entry in self._held}
        self._dtype = "" if packed or len(dtypes) > 1 else dtypes.pop()  # of all, where they are plain
        self._begins: NDArray[Any] = np.array([entry.offset for _, entry in self._held])

    def rows(self, places: Places) -> Float32:
        """Implements `Table.rows`."""
        rows = self._starts[-1]
        if len(wrong := places[(places < 0) | (places >= rows)]):  # of a token that the table does not know
            raise ModelError(f"{self._parts[0].name}: row {wrong[0]} is wanted of {rows}")
        of = self._starts.searchsorted(places, side="right") - 1
        within = places - self._starts[of]
        if self._dtype:
            return to_float32(self._dtype, self._plain(of, within))
        each = zip(of.tolist(), within.tolist(), strict=True)
        found = [self._reader.rows(self._parts[part], row, row + 1) for part, row in each]
        return np.concatenate([numbers_of(row) for row in found])

    def _plain(self, of: Places, within: Places) -> Bits:
        """The bits of rows, each of a part. The disk is asked for all before the first is read."""
        bits = np.empty((len(of), self._parts[0].shape[1]), BITS[self._dtype])
        size, target = bits.strides[0], bits.reshape(-1).view(np.uint8).data
        files = [self._held[part] for part in of.tolist()]
        places = (self._begins[of] + within * size).tolist()
        with suppress(OSError):  # what is wrong with a file, reading it says
            for (descriptor, _), place in zip(files, places, strict=True) if len(of) > 1 else ():
                os.posix_fadvise(descriptor, place, size, os.POSIX_FADV_WILLNEED)
        for n, ((descriptor, entry), place) in enumerate(zip(files, places, strict=True)):
            fill(entry.file, descriptor, place, target[n * size : (n + 1) * size])
        return bits
