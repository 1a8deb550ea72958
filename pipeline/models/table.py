"""The table of embeddings: rows by token. A step needs few of them and a start none, so the table may be read
from the checkpoint later, when nobody waits; until then, rows are read as tokens come."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoint.reader import RawTensor, TensorReader, to_float32
from pipeline.models.architecture import Part
from shm.huge import private

READ_NUMBERS = 1 << 21  # read at a time by `move`: between two of them, it can be stopped


class Table:
    """[rows, width] numbers of a tensor of the checkpoint. `bytes`: of the whole."""

    def __init__(self, reader: TensorReader, name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
        """`reader`: this object's own, closed with `close`. `dtype`: of the rows that it gives."""
        self.bytes = shape[0] * shape[1] * dtype.itemsize
        self._part = Part(name, shape, 0, shape[0])
        self._dtype = dtype
        self._reader: TensorReader | None = reader
        self._lock = threading.Lock()  # of the reader
        self._whole: Tensor | None = None

    def __getitem__(self, tokens: Tensor) -> Tensor:
        """int64 [R]: [R, width]. Raises ModelError where the checkpoint's file changed."""
        if self._whole is None:
            with self._lock:
                if self._reader is not None:
                    return self._read(self._reader, tokens.tolist())
        assert self._whole is not None
        return self._whole[tokens]

    def move(self, going: Callable[[], bool]) -> None:
        """Have it in memory, and the checkpoint's file closed, unless `going` says no meanwhile; for any
        thread. Raises ModelError."""
        rows, width = self._part.shape
        reader, step = self._reader, max(1, READ_NUMBERS // width)
        if reader is None:
            return
        memory = private(self.bytes)
        whole = torch.from_numpy(memory).view(self._dtype).view(rows, width)
        for lo in range(0, rows, step):
            if not going():
                return
            raw = reader.rows(self._part, lo, min(lo + step, rows))
            read = tensor_of(raw)
            if read.dtype == self._dtype:  # by numpy: torch would start threads of its own for this one
                memory.view(raw.bits.dtype).reshape(rows, width)[lo : lo + step] = raw.bits
            else:
                whole[lo : lo + step] = read
        self._whole = whole
        self.close()

    def close(self) -> None:
        """No rows are read from the checkpoint any more."""
        with self._lock:
            if self._reader is not None:
                self._reader.close()
                self._reader = None

    def _read(self, reader: TensorReader, tokens: list[int]) -> Tensor:
        found = [reader.rows(self._part, token, token + 1) for token in tokens]
        bits = np.concatenate([raw.bits for raw in found])
        return tensor_of(RawTensor(found[0].dtype, bits.shape, bits)).to(self._dtype)


def tensor_of(raw: RawTensor) -> Tensor:
    """A tensor of the same bits."""
    if raw.dtype == "BF16":
        return torch.from_numpy(raw.bits.view(np.int16)).view(torch.bfloat16)
    if raw.dtype == "F16":
        return torch.from_numpy(raw.bits.view(np.float16))
    return torch.from_numpy(to_float32(raw.dtype, raw.bits))
