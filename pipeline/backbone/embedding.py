"""Token embeddings, read from the checkpoint on demand and copied into memory later: a step needs few rows,
so an engine is ready before the whole matrix is read."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoint.reader import RawTensor, TensorReader, to_float32
from pipeline.models.architecture import TensorRows
from shm.huge import private

# Numbers that `materialize` converts at a time: few enough that torch uses the calling thread alone.
CHUNK_NUMBERS = (1 << 15) - 1


class Embedding:
    """[rows, width] numbers of a checkpoint's tensor. Its file stays open until all rows are in memory."""

    def __init__(self, reader: TensorReader, name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
        """`reader`: closed by this object. `dtype`: of the rows returned. Raises ModelError as `rows`."""
        self.bytes = shape[0] * shape[1] * dtype.itemsize
        self._source = TensorRows(name, shape, 0, shape[0])
        self._dtype = dtype
        self._reader = reader
        weakref.finalize(self, reader.close)
        reader.rows(self._source, 0, 0)  # opens the file now, so that replacing it later has no effect
        self._lock = threading.Lock()  # of reads of single rows against closing the file
        self._matrix: Tensor | None = None

    def __getitem__(self, tokens: Tensor) -> Tensor:
        """int64 [R]: [R, width]. Raises ModelError where the checkpoint's file was changed."""
        if self._matrix is None:
            with self._lock:
                if self._matrix is None:
                    return self._read(tokens)
        return self._matrix[tokens]

    def materialize(self, proceed: Callable[[], bool]) -> None:
        """Read all rows into memory and close the file, unless `proceed` returns False in between. Other
        threads may read rows meanwhile. Raises ModelError, and OSError where memory is short."""
        if self._matrix is not None:
            return
        rows, width = self._source.shape
        step = max(1, CHUNK_NUMBERS // width)
        matrix = torch.from_numpy(private(self.bytes)).view(self._dtype).view(rows, width)
        for lo in range(0, rows, step):
            if not proceed():
                return
            raw = self._reader.rows(self._source, lo, min(lo + step, rows))
            matrix[lo : lo + step] = tensor_of(raw)
        with self._lock:
            self._matrix = matrix
            self._reader.close()

    def _read(self, tokens: Tensor) -> Tensor:
        unique, inverse = torch.unique(tokens, return_inverse=True)
        found = [self._reader.rows(self._source, token, token + 1) for token in unique.tolist()]
        bits = np.concatenate([raw.bits for raw in found])
        return tensor_of(RawTensor(found[0].dtype, bits.shape, bits)).to(self._dtype)[inverse]


def tensor_of(raw: RawTensor) -> Tensor:
    """A tensor of the same bits."""
    if raw.dtype == "BF16":
        return torch.from_numpy(raw.bits.view(np.int16)).view(torch.bfloat16)
    if raw.dtype == "F16":
        return torch.from_numpy(raw.bits.view(np.float16))
    return torch.from_numpy(to_float32(raw.dtype, raw.bits))
