"""Reads a checkpoint's tensors, whole or by rows, without torch.

Tensors are read into new memory (pread), not mapped: a file that shrinks in between raises an error instead
of SIGBUS, and memory holds only arrays that are still referenced.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.checkpoint.headers import TensorEntry
from pipeline.checkpoint.index import BITS, CheckpointIndex
from pipeline.errors import ModelError
from pipeline.models.architecture import TensorRows
from protocol.files import open_regular
from shm.codes import Codes, format_of_all
from shm.huge import private
from shm.layout import Bytes, Float32, MatrixFormat

Bits = NDArray[np.uint16 | np.uint32]
STORED = {  # safetensors' dtype -> that of the array which has its bits
    **dict.fromkeys(("U8", "BOOL", "F8_E4M3", "F8_E8M0"), np.uint8),
    **{"I8": np.int8, "I32": np.int32, "I64": np.int64},
    **{"BF16": np.uint16, "F16": np.float16, "F32": np.float32},
}

READ_BYTES = 1 << 26  # of one pread: the kernel cuts short those of 2 GiB and more


class RawTensor(NamedTuple):
    """A tensor's bit patterns, writable and owned by the caller, so that torch neither copies nor warns."""

    dtype: str  # BF16 | F16 | F32
    shape: tuple[int, ...]
    bits: Bits


class TensorReader:
    """Reads tensors of one checkpoint, in any number of threads. A context manager."""

    def __init__(self, index: CheckpointIndex) -> None:
        self._index = index
        self.packed = index.packed
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()  # guards the files and the count
        self.bytes_read = 0

    def float32(self, name: str, shape: tuple[int, ...]) -> Float32:
        """A tensor's numbers, exact. Raises ModelError as `stacked`."""
        return numbers_of(self.stacked([(name, shape)]))

    def stacked(self, tensors: Sequence[tuple[str, tuple[int, ...]]]) -> RawTensor | Codes:
        """Tensors stacked by rows: their bits, or their codes where all have those of one format, or their
        numbers. Raises ModelError where the checkpoint lacks one of this shape, or where its file changed
        since the index was made."""
        if any(name in self.packed for name, _ in tensors):
            return together([self._whole(name, shape) for name, shape in tensors])
        entries = [self._entry(name, shape) for name, shape in tensors]
        rows = sum(entry.shape[0] for entry in entries)
        shape = (rows, *entries[0].shape[1:])
        if len({entry.dtype for entry in entries}) > 1:
            return together([self.stacked([one]) for one in tensors])
        dtype = entries[0].dtype
        kind: np.dtype[np.uint16 | np.uint32] = np.dtype(BITS[dtype])
        bits = private(math.prod(shape) * kind.itemsize).view(kind).reshape(shape)
        row = 0
        for entry in entries:
            self._read(entry, 0, bits[row : row + entry.shape[0]])
            row += entry.shape[0]
        return RawTensor(dtype, shape, bits)

    def _whole(self, name: str, shape: tuple[int, ...]) -> RawTensor | Codes:
        if name not in self.packed:
            return self.stacked([(name, shape)])
        return self.rows(TensorRows(name, shape, 0, shape[0]), 0, shape[0])

    def rows(self, part: TensorRows, lo: int, hi: int) -> RawTensor | Codes:
        """Rows [lo, hi) of `part`, counted from its first: [hi - lo, columns]. No other bytes are read but
        of a matrix that is `whole`. Raises ModelError as `stacked`; ValueError outside of `part`."""
        if not 0 <= lo <= hi <= part.rows:
            raise ValueError(f"no rows {lo} to {hi} in {part}")
        if part.name in self.packed and self.packed[part.name].shape == part.shape:
            return self.packed_rows(part.name, part.first + lo, part.first + hi)
        entry, columns = self._entry(part.name, part.shape), part.shape[-1]
        bits = np.empty((hi - lo, columns), dtype=BITS[entry.dtype])
        self._read(entry, (part.first + lo) * columns * bits.itemsize, bits)
        return RawTensor(entry.dtype, bits.shape, bits)

    def hold(self, names: Iterable[str]) -> list[tuple[int, TensorEntry]]:
        """Returns the open files of these tensors, or of quantized matrices' weights, and their places there:
        they can be read until the reader is closed, even if the files are removed. Raises ModelError."""
        packed, tensors = self.packed, self._index.tensors
        entries = [packed[name].weight if name in packed else tensors[name] for name in names]
        return [(self._open(entry), entry) for entry in entries]

    def packed_rows(self, name: str, lo: int, hi: int, place: int | None = None) -> RawTensor | Codes:
        """Rows of a quantized matrix, or of that at a place of the first axis, as `Packed.rows`."""
        matrix = self.packed[name].rows(self._stored, lo, hi, place)
        if isinstance(matrix, Codes):
            return matrix
        return raw_tensor(matrix)

    def _stored(self, entry: TensorEntry, lo: int, hi: int) -> NDArray[Any]:
        """Implements `packed.Read`; a tensor without axes has one of one place."""
        first, *others = entry.shape or (1,)
        out = np.empty((hi - lo, *others), STORED[entry.dtype])
        self._read(entry, lo * (entry.nbytes // first), out)
        return out

    def part(self, name: str, lo: int = 0, hi: int | None = None) -> Bytes:
        """The bytes of a tensor of any dtype, or of places [lo, hi) of its first axis; the caller owns them.
        Raises ModelError as `stacked`; KeyError without such a tensor."""
        entry = self._index.tensors[name]
        step = entry.nbytes if hi is None else entry.nbytes // entry.shape[0]
        out = np.empty(entry.nbytes if hi is None else (hi - lo) * step, np.uint8)
        self._read(entry, lo * step, out)
        return out

    def advise(self, part: TensorRows, advice: int) -> int:
        """Tell the kernel how `part`, of a tensor of any dtype, is used next (os.POSIX_FADV_*); returns its
        bytes. Raises as `part`."""
        matrix = self.packed.get(part.name)
        entry = self._index.tensors[part.name] if matrix is None else matrix.weight
        row = entry.nbytes // (math.prod(entry.shape[:-1]) if matrix is None else part.rows)
        os.posix_fadvise(self._open(entry), entry.offset + part.first * row, part.rows * row, advice)
        return part.rows * row

    def _entry(self, name: str, shape: tuple[int, ...]) -> TensorEntry:
        entry = self._index.tensors.get(name)
        if entry is None or entry.shape != shape or entry.dtype not in BITS:
            kinds = ", ".join(BITS)
            raise ModelError(f"{self._index.folder} has no tensor {name} of shape {list(shape)} in {kinds}")
        return entry

    def _read(self, entry: TensorEntry, begin: int, out: NDArray[Any]) -> None:
        """Fill `out` with a tensor's bytes from its byte `begin` on."""
        fill(entry.file, self._open(entry), entry.offset + begin, out.reshape(-1).view(np.uint8).data)
        with self._lock:
            self.bytes_read += out.nbytes

    def _open(self, entry: TensorEntry) -> int:
        name = entry.file.name
        with self._lock:
            if name not in self._files:
                try:
                    self._files[name] = open_regular(entry.file)
                except OSError as e:
                    raise ModelError(f"{entry.file} cannot be read: {e.strerror}") from None
            return self._files[name]

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fill(file: Path, descriptor: int, place: int, target: memoryview) -> None:
    """Read bytes of an open file from this place on. Raises ModelError."""
    done = 0
    while done < len(target):
        try:
            count = os.preadv(descriptor, [target[done : done + READ_BYTES]], place + done)
        except OSError as e:
            raise ModelError(f"{file} cannot be read: {e.strerror}") from None
        if count == 0:
            raise ModelError(f"{file} became shorter while it was read")
        done += count


def to_float32(dtype: str, bits: Bits) -> Float32:
    """The float32 values of bit patterns [..] of a BF16, F16 or F32 tensor; exact."""
    if dtype == "F32":
        return bits.view(np.float32)
    if dtype == "F16":
        return bits.view(np.float16).astype(np.float32)
    wide = bits.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def numbers_of(rows: RawTensor | Codes) -> Float32:
    """The float32 values of rows; exact."""
    return rows.values() if isinstance(rows, Codes) else to_float32(rows.dtype, rows.bits)


def codes_or_numbers(rows: RawTensor | Codes, format: MatrixFormat) -> Float32 | Codes:
    """Codes that this format keeps as its own, and all else as numbers."""
    kept = rows.kept_in(format.name) if isinstance(rows, Codes) else None
    return numbers_of(rows) if kept is None else kept


def together(parts: Sequence[RawTensor | Codes]) -> RawTensor | Codes:
    """Stacked by rows: as codes where one format keeps all, as bits where all have one dtype, else as
    numbers."""
    if len(parts) == 1:
        return parts[0]
    codes = [part for part in parts if isinstance(part, Codes)]
    of_all = format_of_all({part.format for part in codes})
    if len(codes) == len(parts) and of_all is not None and len({part.factor for part in codes}) == 1:
        codes = [kept for part in codes if (kept := part.kept_in(of_all)) is not None]
        zeros = [part.zeros for part in codes if part.zeros is not None]
        return replace(
            codes[0],
            codes=np.concatenate([part.codes for part in codes]),
            scales=np.concatenate([part.scales for part in codes]),
            zeros=np.concatenate(zeros) if zeros else None,
        )
    raw = [part for part in parts if isinstance(part, RawTensor)]
    if len(raw) == len(parts) and len({part.dtype for part in raw}) == 1:
        bits = np.concatenate([part.bits for part in raw])
        return RawTensor(raw[0].dtype, bits.shape, bits)
    return raw_tensor(np.concatenate([numbers_of(part) for part in parts]))


def raw_tensor(numbers: Float32) -> RawTensor:
    """Numbers as a tensor."""
    numbers = np.ascontiguousarray(numbers)
    return RawTensor("F32", numbers.shape, numbers.view(np.uint32))
