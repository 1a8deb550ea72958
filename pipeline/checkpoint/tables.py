"""Embedding tables beside that of the input. A step reads a few of their rows, so they stay in the
checkpoint's files, whose pages the kernel keeps where memory is free."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pipeline.checkpoint.reader import TensorReader, numbers_of, to_float32
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
        """`reader` stays open; `tensors`: their shapes."""
        self._reader = reader
        self._parts = [TensorRows(name, shape, 0, shape[0]) for name, shape in tensors.items()]
        self._starts: NDArray[Any] = np.array([0, *accumulate(part.rows for part in self._parts)])
        self._entries = reader.hold(tensors)

    def rows(self, places: Places) -> Float32:
        """Implements `Table.rows`."""
        of = self._starts.searchsorted(places, side="right") - 1
        found = list(zip(of.tolist(), (places - self._starts[of]).tolist(), strict=True))
        entries = self._entries
        if entries is not None:
            return to_float32(entries[0].dtype, self._reader.gather([(entries[n], row) for n, row in found]))
        rows = [self._reader.rows(self._parts[n], row, row + 1) for n, row in found]
        return np.concatenate([numbers_of(each) for each in rows])
