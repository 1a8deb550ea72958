"""Experts that can only be read as a whole: in other layouts than rows, or by way of transformers."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from pipeline.checkpoint.encode import LocateExpert
from pipeline.checkpoint.reader import RawTensor
from pipeline.models.architecture import ExpertRows, TensorRows
from shm.codes import Codes

Part = RawTensor | Codes  # a matrix or a bias of an expert


class WholeExperts:
    """The experts of a checkpoint, for `encode_experts`. Each is read once, by threads of its own, and kept
    until the encoder has done with it. A context manager."""

    def __init__(self, locate: LocateExpert, read: Callable[[int, int], Sequence[Part]]) -> None:
        """`locate`: the parts of an expert of a layer, by name and shape; `read`: reads them, for any
        thread."""
        self._locate, self._read_expert = locate, read
        self._threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        self._parts: dict[str, tuple[Future[Sequence[Part]], int]] = {}  # being read, or read; by name

    def locate(self, layer: int, expert: int) -> ExpertRows:
        """Implements `LocateExpert`; begins to read the expert."""
        located = self._locate(layer, expert)
        whole = self._threads.submit(self._read_expert, layer, expert)
        for n, part in enumerate(located):
            self._parts[part.name] = whole, n
        return located

    def rows(self, part: TensorRows, lo: int, hi: int) -> Part:
        """Implements `Rows.rows`."""
        expert, n = self._parts[part.name]
        whole = expert.result()[n]
        if isinstance(whole, Codes):
            return whole.rows(lo, hi)
        return RawTensor(whole.dtype, whole.bits[lo:hi].shape, whole.bits[lo:hi])

    def advise(self, part: TensorRows, advice: int) -> int:
        """Implements `TensorReader.advise`: a part that is not needed any more is dropped."""
        if advice == os.POSIX_FADV_DONTNEED:
            self._parts.pop(part.name, None)
        return 4 * math.prod(part.shape)

    def __enter__(self) -> WholeExperts:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
