"""The pieces in which an expert is encoded: some rows of its matrices, read and encoded by one core.

What they write is exactly what `StoreLayout.encode_expert` would, and needs a small part of its memory.

A quantized matrix is blocks of 16 outputs, so any multiple of 16 rows of gate, up or down can be encoded
alone; of down, such rows have a share in every tile. A plain tile has down transposed: its rows are columns
of the checkpoint's, for which that matrix is in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

import numpy as np

from pipeline.checkpoint.reader import Bits, RawTensor, to_float32
from pipeline.errors import ModelError
from pipeline.models.architecture import Part
from shm.errors import WeightsUnusable
from shm.layout import BlockFormat, Bytes, Float32, StoreLayout

PIECE_NUMBERS = 1 << 19  # of one matrix, about
STRIP = 64  # columns turned over at a time, of so many rows: what is read stays in the cache meanwhile
TURNED_ROWS = 256
LINE = 32  # 16-bit numbers of a cache line
SAME_BITS = {"BF16": "bf16", "F32": "f32"}  # dtypes and the formats that hold their numbers as they are
PIECE_BYTES = 1 << 25  # of memory that a core needs for one piece, at most, unless 16 rows need more

Parts = tuple[Part, Part, Part]  # gate [I, H], up [I, H], down [H, I]
Piece = Callable[[], None]


class Rows(Protocol):
    """Where the rows of parts come from: a TensorReader, or memory."""

    def rows(self, part: Part, lo: int, hi: int) -> RawTensor:
        """As TensorReader.rows; for any thread."""


def expert_pieces(
    reader: Rows, downs: ThreadPoolExecutor, layout: StoreLayout, parts: Parts, out: Bytes
) -> list[Piece]:
    """The pieces of an expert, to be encoded in any order by any number of threads, each of which raises
    ModelError. `downs` reads the whole `down` matrix where that is needed. out: uint8 [expert_stride]."""
    out[layout.tile_bytes * layout.shape.tiles :] = 0
    if isinstance(layout.format, BlockFormat):
        return _quantized(reader, layout, layout.format, parts, out)
    down = downs.submit(reader.rows, parts[2], 0, parts[2].rows)
    return PlainExpert(reader, layout, parts, down, out).pieces()


def _quantized(
    reader: Rows, layout: StoreLayout, blocks: BlockFormat, parts: Parts, out: Bytes
) -> list[Piece]:
    shape = layout.shape
    pieces: list[Piece] = []
    for matrix, part in enumerate(parts[:2]):
        for lo, hi in _ranges(shape.padded, shape.hidden):
            pieces.append(partial(_encode_wide, reader, layout, blocks, matrix, part, lo, hi, out))
    for lo, hi in _ranges(shape.hidden, shape.padded):
        pieces.append(partial(_encode_down, reader, layout, blocks, parts[2], lo, hi, out))
    return pieces


def _ranges(rows: int, columns: int) -> list[tuple[int, int]]:
    step = max(16, PIECE_NUMBERS // columns // 16 * 16)
    return [(lo, min(lo + step, rows)) for lo in range(0, rows, step)]


def _encode_wide(
    reader: Rows,
    layout: StoreLayout,
    blocks: BlockFormat,
    matrix: int,
    part: Part,
    lo: int,
    hi: int,
    out: Bytes,
) -> None:
    """Channels [lo, hi) of gate (matrix 0) or up (1); those from I on are zero."""
    shape = layout.shape
    raw = _rows(reader, part, lo, hi)
    numbers = _padded(to_float32(raw.dtype, raw.bits), hi - lo, shape.hidden)
    for tile in range(lo // shape.tile, -(-hi // shape.tile)):
        begin = tile * shape.tile
        first, last = max(lo, begin), min(hi, begin + shape.tile)
        start = tile * layout.tile_bytes + matrix * blocks.matrix_bytes(shape.tile, shape.hidden)
        records = out[
            start + blocks.matrix_bytes(first - begin, shape.hidden) : start
            + blocks.matrix_bytes(last - begin, shape.hidden)
        ]
        _encode_matrix(blocks, part, numbers[first - lo : last - lo], records)


def _encode_down(
    reader: Rows,
    layout: StoreLayout,
    blocks: BlockFormat,
    part: Part,
    lo: int,
    hi: int,
    out: Bytes,
) -> None:
    """Outputs [lo, hi) of down, which have their records in every tile."""
    shape = layout.shape
    raw = _rows(reader, part, lo, hi)
    numbers = _padded(to_float32(raw.dtype, raw.bits), hi - lo, shape.padded)
    wide = 2 * blocks.matrix_bytes(shape.tile, shape.hidden)
    for tile in range(shape.tiles):
        start = tile * layout.tile_bytes + wide
        records = out[
            start + blocks.matrix_bytes(lo, shape.tile) : start + blocks.matrix_bytes(hi, shape.tile)
        ]
        _encode_matrix(blocks, part, numbers[:, tile * shape.tile : (tile + 1) * shape.tile], records)


def _rows(reader: Rows, part: Part, lo: int, hi: int) -> RawTensor:
    """Rows [lo, hi) of a part, as far as it has them."""
    lo = min(lo, part.rows)
    return reader.rows(part, lo, max(lo, min(hi, part.rows)))


def _turned(bits: Bits) -> Bits:
    """[H, n] to [n, H], contiguous; as bit patterns, which are narrower than numbers."""
    rows, columns = bits.shape
    turned = np.empty((columns, rows), bits.dtype)
    # An odd number of cache lines from row to row: where it is a power of two, a column's numbers drive one
    # another out of the cache, and this takes ten times as long.
    room = np.empty((TURNED_ROWS, (columns // LINE + 1 | 1) * LINE), bits.dtype)
    for at in range(0, rows, TURNED_ROWS):
        block = room[: min(TURNED_ROWS, rows - at), :columns]
        block[:] = bits[at : at + TURNED_ROWS]
        for lo in range(0, columns, STRIP):
            turned[lo : lo + STRIP, at : at + TURNED_ROWS] = block[:, lo : lo + STRIP].T
    return turned


def _padded(numbers: Float32, rows: int, columns: int) -> Float32:
    """The numbers with zeros below and to the right, up to this shape."""
    if numbers.shape == (rows, columns):
        return numbers
    return np.pad(numbers, ((0, rows - numbers.shape[0]), (0, columns - numbers.shape[1])))


def _encode_matrix(blocks: BlockFormat, part: Part, numbers: Float32, records: Bytes) -> None:
    try:
        blocks.encode_matrix(numbers, records)
    except WeightsUnusable as e:
        raise ModelError(f"{e}, in the tensor {part.name}") from None


class PlainExpert:
    """An expert in a plain format."""

    def __init__(
        self, reader: Rows, layout: StoreLayout, parts: Parts, down: Future[RawTensor], out: Bytes
    ) -> None:
        """down: that matrix, on its way into memory. out: uint8 [expert_stride]."""
        self._reader = reader
        self._layout = layout
        self._gate, self._up, _ = parts
        self._down = down
        self._out = out

    def pieces(self) -> list[Piece]:
        shape = self._layout.shape
        step = max(1, PIECE_NUMBERS // shape.hidden)
        return [
            partial(self._encode, tile, lo, min(lo + step, shape.tile))
            for tile in range(shape.tiles)
            for lo in range(0, shape.tile, step)
        ]

    def _encode(self, tile: int, lo: int, hi: int) -> None:
        """Channels [lo, hi) of a tile, which is three equal parts of whole rows. Where the checkpoint's bits
        are those of the format, they are copied; else the channels are encoded as a tile of so many, whose
        parts then go to their places."""
        shape, tile_format = self._layout.shape, self._layout.format
        first, count = tile * shape.tile + lo, hi - lo
        last = max(first, min(first + count, shape.intermediate))
        start = tile * self._layout.tile_bytes
        whole = self._out[start : start + self._layout.tile_bytes].reshape(3, shape.tile, -1)
        down = self._down.result()
        matrices = (
            _rows(self._reader, self._gate, first, last),
            _rows(self._reader, self._up, first, last),
            RawTensor(down.dtype, (last - first, shape.hidden), _turned(down.bits[:, first:last])),
        )
        if all(SAME_BITS.get(raw.dtype) == tile_format.name for raw in matrices):
            for target, raw in zip(whole, matrices, strict=True):
                target[lo : lo + last - first] = raw.bits.view(np.uint8)
                target[lo + last - first : hi] = 0
            return
        room = np.empty(tile_format.tile_bytes(shape.hidden, count), np.uint8)
        gate, up, columns = (
            _padded(to_float32(raw.dtype, raw.bits), count, shape.hidden) for raw in matrices
        )
        tile_format.encode(gate, up, columns, room)
        whole[:, lo:hi] = room.reshape(3, count, -1)
