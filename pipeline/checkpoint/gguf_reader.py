"""Reads the tensors of GGUF files, whole by their names in a checkpoint of Hugging Face, or by rows.

Tensors whose numbers are codes times a scale for each 32 of them are read as such, those of floats as their
bits, and all others as numbers, by the gguf package. A row is whole blocks, so rows are read alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import IQ4_NL, dequantize
from numpy.typing import NDArray

from pipeline.checkpoint.gguf_names import Source
from pipeline.checkpoint.index import BITS, CheckpointIndex
from pipeline.checkpoint.reader import Bits, RawTensor, TensorReader, numbers_of, raw_tensor, together
from pipeline.models.architecture import TensorRows
from shm.codes import Codes, format_of_all
from shm.huge import private
from shm.layout import Bytes, Float32

DEQUANTIZED = (
    *("Q4_1", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "IQ4_XS"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
)
CHUNK = 1 << 21  # numbers that are dequantized at a time


# Blocks of 32 numbers. numpy copies 16 bytes as one item many times faster than as sixteen.
Q4_0_BLOCK = np.dtype([("scale", np.uint16), ("codes", "V16")])
Q5_0_BLOCK = np.dtype([("scale", np.uint16), ("fifth", np.uint8, 4), ("codes", "V16")])
Q8_0_BLOCK = np.dtype([("scale", np.uint16), ("codes", "V32")])
IQ4_NL_CODES: Bytes = (np.array(IQ4_NL.kvalues, np.int16) + 128).astype(np.uint8)
MXFP4_BLOCK = np.dtype([("scale", np.uint8), ("codes", "V16")])


def _scales(data: Bytes, block: np.dtype[np.void]) -> NDArray[Any]:
    return np.ascontiguousarray(data.view(block)["scale"])


def _nibbles(data: Bytes, block: np.dtype[np.void]) -> Bytes:
    """Codes [rows, k]: a block's first 16 are low halves of its bytes."""
    codes = np.empty((len(data), data.shape[1] // block.itemsize, 2), "V16")
    codes[..., 0] = (data & 15).view(block)["codes"]
    codes[..., 1] = (data >> 4).view(block)["codes"]
    return codes.view(np.uint8).reshape(len(data), 32 * codes.shape[1])


def _q4_0(data: Bytes) -> Codes:
    return Codes("q4_0", _nibbles(data, Q4_0_BLOCK), _scales(data, Q4_0_BLOCK))


def _q5_0(data: Bytes) -> Codes:
    """Codes of q8_0: a number is 16 less than 5 bits, of which the fifth ones are together."""
    fifth = np.unpackbits(np.ascontiguousarray(data.view(Q5_0_BLOCK)["fifth"]), axis=-1, bitorder="little")
    codes = _nibbles(data, Q5_0_BLOCK)
    codes += fifth.reshape(codes.shape) * np.uint8(16) + np.uint8(128 - 16)
    return Codes("q8_0", codes, _scales(data, Q5_0_BLOCK))


def _iq4_nl(data: Bytes) -> Codes:
    """Codes of q8_0: a number is one of 16 of 8 bits."""
    return Codes("q8_0", IQ4_NL_CODES.take(_nibbles(data, Q4_0_BLOCK)), _scales(data, Q4_0_BLOCK))


def _q8_0(data: Bytes) -> Codes:
    """int8 of the file, plus 128."""
    codes = np.ascontiguousarray((data ^ np.uint8(0x80)).view(Q8_0_BLOCK)["codes"])
    return Codes(
        "q8_0", codes.view(np.uint8).reshape(len(data), 32 * codes.shape[1]), _scales(data, Q8_0_BLOCK)
    )


def _mxfp4(data: Bytes) -> Codes:
    return Codes("mxfp4", _nibbles(data, MXFP4_BLOCK), _scales(data, MXFP4_BLOCK))


class Coded(NamedTuple):
    """A type that is read as codes."""

    format: str  # which keeps them
    codes: Callable[[Bytes], Codes]  # of rows [n, bytes]


CODED = {
    "Q4_0": Coded("q4_0", _q4_0),
    "Q5_0": Coded("q8_0", _q5_0),
    "Q8_0": Coded("q8_0", _q8_0),
    "IQ4_NL": Coded("q8_0", _iq4_nl),
    "MXFP4": Coded("mxfp4", _mxfp4),
}
TYPES = (*BITS, *CODED, *DEQUANTIZED)


def format_of(types: Collection[str]) -> str | None:
    """The format that keeps matrices of all these types without loss; None where there is none, or where it
    is not one of codes."""
    if not CODED.keys() >= set(types):
        return None
    return format_of_all({CODED[name].format for name in types})


def decode(read: Callable[[int, int], Bytes], dtype: str, columns: int, lo: int, hi: int) -> Codes | Float32:
    """Rows [lo, hi) of a quantized matrix: its codes, or the numbers [hi - lo, columns] of types without.
    `read` gives the bytes [b - a, bytes of a row] of rows [a, b)."""
    if dtype in CODED:
        return CODED[dtype].codes(read(lo, hi))
    kind, step = GGMLQuantizationType[dtype], max(1, CHUNK // columns)
    numbers = private(4 * (hi - lo) * columns).view(np.float32).reshape(hi - lo, columns)
    for begin in range(lo, hi, step):
        end = min(begin + step, hi)
        with np.errstate(all="ignore"):  # infinite or not a number: whoever reads them refuses them
            numbers[begin - lo : end - lo] = dequantize(read(begin, end), kind)
    return numbers


class GgufReader:
    """Reads the tensors of one model, in any number of threads. A context manager."""

    def __init__(self, index: CheckpointIndex, sources: Callable[[str, tuple[int, ...]], Source]) -> None:
        """`index`: by the files' names, of matrices [all rows, a row]. `sources`: where a tensor of the
        checkpoint, of this name and shape, is; raises ModelError."""
        self._reader = TensorReader(index)
        self._tensors = index.tensors
        self._sources = sources

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read

    def float32(self, name: str, shape: tuple[int, ...]) -> Float32:
        """A tensor's numbers, exact. Raises ModelError as `stacked`."""
        return numbers_of(self._whole(self._sources(name, shape), shape)).reshape(shape)

    def stacked(self, tensors: Sequence[tuple[str, tuple[int, ...]]]) -> RawTensor | Codes:
        """Tensors stacked by rows, as the files have them; their numbers where kinds differ. Raises
        ModelError."""
        return together([self._whole(self._sources(name, shape), shape) for name, shape in tensors])

    def rows(self, part: TensorRows, lo: int, hi: int) -> RawTensor | Codes:
        """Returns rows as TensorReader.rows does, of a tensor by its name in the file."""
        if not 0 <= lo <= hi <= part.rows:
            raise ValueError(f"no rows {lo} to {hi} in {part}")
        return self._rows(part.name, part.first + lo, part.first + hi)

    def advise(self, part: TensorRows, advice: int) -> int:
        """Implements TensorReader.advise."""
        return self._reader.advise(part, advice)

    def __enter__(self) -> GgufReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def _whole(self, source: Source, shape: tuple[int, ...]) -> RawTensor | Codes:
        """A tensor of this shape; codes only of a matrix."""
        parts = [self._rows(name, 0, self._tensors[name].shape[0]) for name, _ in source.parts]
        if source.made is not None and len(parts) > 1:
            of_parts = zip(parts, source.parts, strict=True)
            return raw_tensor(source.made(*(numbers_of(part).reshape(size) for part, (_, size) in of_parts)))
        whole = together(parts)
        if isinstance(whole, Codes) and (len(shape) != 2 or source.made is not None):
            whole = raw_tensor(whole.values())
        if isinstance(whole, Codes):
            return _ordered_codes(whole, source)
        bits = whole.bits.reshape(shape)
        bits = bits if source.rows is None else bits[source.rows]
        bits = bits if source.columns is None else bits[:, source.columns]
        whole = RawTensor(whole.dtype, shape, bits)
        return whole if source.made is None else raw_tensor(source.made(numbers_of(whole)))

    def _rows(self, name: str, lo: int, hi: int) -> RawTensor | Codes:
        """Rows [lo, hi) of a tensor of the file; the caller owns them."""
        entry = self._tensors[name]
        shape, row = (hi - lo, entry.shape[1]), entry.nbytes // entry.shape[0]
        if entry.dtype in BITS:
            bits: Bits = self._reader.part(name, lo, hi).view(BITS[entry.dtype])
            return RawTensor(entry.dtype, shape, bits.reshape(shape))
        part = self._reader.part
        decoded = decode(lambda a, b: part(name, a, b).reshape(b - a, row), entry.dtype, shape[1], lo, hi)
        return decoded if isinstance(decoded, Codes) else raw_tensor(decoded)


def _ordered_codes(codes: Codes, source: Source) -> RawTensor | Codes:
    """A matrix in the order of its checkpoint: columns keep their scales where whole groups are moved."""
    if source.rows is not None:
        codes = codes[source.rows]
    if source.columns is None:
        return codes
    group = codes.kind.group
    first = source.columns[::group]
    groups = (first[:, None] + np.arange(group)).reshape(-1)
    if (first % group).any() or not np.array_equal(groups, source.columns):
        return raw_tensor(codes.values()[:, source.columns])
    return Codes(codes.format, codes.codes[:, groups], codes.scales[:, first // group])
