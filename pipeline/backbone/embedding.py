"""The table of embeddings: rows by token. A step needs few of them and a start none, so the table may be read
from the checkpoint later, when nobody waits; until then, rows are read as tokens come."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoint.reader import RawTensor, TensorReader, to_float32
from pipeline.models.architecture import Part
from shm.huge import private

# Read at a time by `move`: so few that torch converts them in the thread that asks, and starts no others.
READ_NUMBERS = (1 << 15) - 1


class Table:
    """[rows, width] numbers of a tensor of the checkpoint, whose file is open until all are in memory."""

    def __init__(self, reader: TensorReader, name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
        """`reader`: this object's own. `dtype`: of the rows that it gives. Raises ModelError where the tensor
        is missing or of another shape."""
        self.bytes = shape[0] * shape[1] * dtype.itemsize
        self._part = Part(name, shape, 0, shape[0])
        self._dtype = dtype
        self._reader = reader
        weakref.finalize(self, reader.close)
        reader.rows(self._part, 0, 0)  # opens the file: whoever replaces it later does not change this one
        self._reading = threading.Lock()  # held by who reads single rows, and to close the file
        self._whole: Tensor | None = None

    def __getitem__(self, tokens: Tensor) -> Tensor:
        """int64 [R]: [R, width]. Raises ModelError where the checkpoint's file was changed."""
        if self._whole is None:
            with self._reading:
                if self._whole is None:
                    return self._read(tokens)
        return self._whole[tokens]

    def move(self, going: Callable[[], bool]) -> None:
        """Have it in memory and the file closed, unless `going` says no meanwhile; by one thread, while
        others ask for rows. Raises ModelError, and OSError where there is too little memory."""
        rows, width = self._part.shape
        step = max(1, READ_NUMBERS // width)
        whole = torch.from_numpy(private(self.bytes)).view(self._dtype).view(rows, width)
        for lo in range(0, rows, step):
            if not going():
                return
            raw = self._reader.rows(self._part, lo, min(lo + step, rows))
            whole[lo : lo + step] = tensor_of(raw)
        with self._reading:
            self._whole = whole
            self._reader.close()

    def _read(self, tokens: Tensor) -> Tensor:
        unique, places = torch.unique(tokens, return_inverse=True)
        found = [self._reader.rows(self._part, token, token + 1) for token in unique.tolist()]
        bits = np.concatenate([raw.bits for raw in found])
        return tensor_of(RawTensor(found[0].dtype, bits.shape, bits)).to(self._dtype)[places]


def tensor_of(raw: RawTensor) -> Tensor:
    """A tensor of the same bits."""
    if raw.dtype == "BF16":
        return torch.from_numpy(raw.bits.view(np.int16)).view(torch.bfloat16)
    if raw.dtype == "F16":
        return torch.from_numpy(raw.bits.view(np.float16))
    return torch.from_numpy(to_float32(raw.dtype, raw.bits))
