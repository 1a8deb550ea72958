"""How often each expert was used in earlier starts, `<cache folder>/<fingerprint>/heat.json`, for policies
that begin with what is used here (`Policy.keeps_heat`). The fingerprint is that of the model's experts in
their format.

The file is one JSON object, an `_Heat`. It is written completely or not at all, and readable by its owner
alone. One that is damaged, of another version or shape, or possibly written by another user is removed: the
experts are then counted anew. Errors never fail a start. Of two engines of one model that count at the same
time, the counts of the one that writes last stay.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from pipeline.arrays import Counts
from pipeline.policies.view import ModelShape
from shm.atomic_file import keep, read_kept
from shm.disk_cache import CacheRecord, note_use

NAME = "heat.json"
MAX_BYTES = 1 << 24
LASTING_TOKENS = 16384  # of earlier starts, that count at most: what is used changes
ENOUGH_TOKENS = 256  # new ones that are worth writing the file while the engine goes on

Count = Annotated[int, Meta(ge=0, le=1 << 40)]

log = logging.getLogger(__name__)


class _Heat(msgspec.Struct):
    counts: list[list[Count]]  # by layer
    version: Literal[1] = 1


class Heat:
    """One model's counts on disk. Used by one thread."""

    def __init__(self, folder: Path, record: CacheRecord, shape: ModelShape) -> None:
        """`folder`: that of the experts' fingerprint; `record`: what the folder is of."""
        self._path, self._record, self._shape = folder / NAME, record, shape
        self._written = 0  # tokens of this start that the file has
        self.earlier = self._read()  # of earlier starts; None without any

    def keep(self, counted: Counts, least: int) -> None:
        """Write the file where it lacks `least` tokens of this start, whose counts [L, E] are given. A
        failure is logged."""
        tokens = int(counted[0].sum()) // self._shape.top_k
        if tokens - self._written < least:
            return
        self._written = tokens
        every = counted if self.earlier is None else counted + self.earlier
        unkept = f"the use of experts could not be kept in {self._path}"
        if keep(self._path, msgspec.json.encode(_Heat(every.tolist())), log, unkept):
            note_use(self._path.parent, self._record)

    def _read(self) -> Counts | None:
        counts = read_kept(self._path, MAX_BYTES, self._parsed, log, "experts are counted anew")
        if counts is None:
            return None
        note_use(self._path.parent, self._record)
        tokens = int(counts[0].sum()) // self._shape.top_k
        if tokens > LASTING_TOKENS:
            counts = (counts * (LASTING_TOKENS / tokens)).astype(np.int64)
        return counts if counts.any() else None

    def _parsed(self, raw: bytes) -> Counts:
        counts = np.array(msgspec.json.decode(raw, type=_Heat).counts, np.int64)
        if counts.shape != (self._shape.layers, self._shape.experts):
            raise ValueError("it is of another shape")
        return counts
