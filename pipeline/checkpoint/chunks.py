"""Divides the encoding of an expert into chunks: some rows of its matrices, read and encoded by one core.

Together the chunks write the same bytes as `StoreLayout.encode_expert`, in a small part of its memory.

A quantized matrix consists of blocks of 16 outputs, so any multiple of 16 rows of gate, up or down can be
encoded alone; such rows of down have records in every tile. A plain tile has down transposed: its rows are
columns of the checkpoint's matrix, which is therefore held in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

import numpy as np

from pipeline.checkpoint.reader import Bits, RawTensor, to_float32
from pipeline.errors import ModelError
from pipeline.models.architecture import ExpertRows, TensorRows
from shm.errors import WeightsUnusable
from shm.layout import BlockFormat, Bytes, Float32, StoreLayout

CHUNK_NUMBERS = 1 << 19  # of one matrix, about
STRIP = 64  # columns transposed at a time, of TRANSPOSED_ROWS rows: a block that stays in the cache
TRANSPOSED_ROWS = 256
LINE = 32  # 16-bit numbers of a cache line
SAME_BITS = {"BF16": "bf16", "F32": "f32"}  # dtype -> the format that stores its bits unchanged
CHUNK_BYTES = 1 << 25  # at most, of memory that a core needs for a chunk, unless 16 rows need more

Chunk = Callable[[], None]  # reads and encodes its rows; for any thread; raises ModelError


class Rows(Protocol):
    """A source of tensor rows: a TensorReader, or arrays in memory."""

    def rows(self, part: TensorRows, lo: int, hi: int) -> RawTensor:
        """See TensorReader.rows; for any thread."""


def expert_chunks(
    reader: Rows, downs: ThreadPoolExecutor, layout: StoreLayout, expert: ExpertRows, out: Bytes
) -> list[Chunk]:
    """The chunks of an expert, for any order and threads. `downs`: reads `down` where it is needed whole."""
    shape = layout.shape
    out[layout.tile_bytes * shape.tiles :] = 0
    if isinstance(layout.format, BlockFormat):
        sizes = ((shape.padded, shape.hidden), (shape.padded, shape.hidden), (shape.hidden, shape.padded))
        return [
            partial(_encode_blocks, reader, layout, layout.format, matrix, part, lo, hi, out)
            for matrix, (part, (rows, columns)) in enumerate(zip(expert, sizes, strict=True))
            for lo, hi in _ranges(rows, max(16, CHUNK_NUMBERS // columns // 16 * 16))
        ]
    down = downs.submit(reader.rows, expert[2], 0, expert[2].rows)
    return [
        partial(_encode_plain, reader, layout, expert, down, tile, lo, hi, out)
        for tile in range(shape.tiles)
        for lo, hi in _ranges(shape.tile, max(1, CHUNK_NUMBERS // shape.hidden))
    ]


def _ranges(rows: int, step: int) -> list[tuple[int, int]]:
    return [(lo, min(lo + step, rows)) for lo in range(0, rows, step)]


def _encode_blocks(
    reader: Rows,
    layout: StoreLayout,
    blocks: BlockFormat,
    matrix: int,
    part: TensorRows,
    lo: int,
    hi: int,
    out: Bytes,
) -> None:
    """Encode rows [lo, hi) of gate (matrix 0), up (1) or down (2). Those of gate and up are channels, and
    zero from I on; those of down are outputs, which have records in every tile."""
    shape = layout.shape
    wide = matrix < 2
    columns, tile_columns = (shape.hidden, shape.hidden) if wide else (shape.padded, shape.tile)
    raw = _rows(reader, part, lo, hi)
    numbers = _padded(to_float32(raw.dtype, raw.bits), hi - lo, columns)
    for tile in range(lo // shape.tile, -(-hi // shape.tile)) if wide else range(shape.tiles):
        begin, end = tile * shape.tile, (tile + 1) * shape.tile
        first, last = (max(lo, begin), min(hi, end)) if wide else (lo, hi)
        rows = numbers[first - lo : last - lo] if wide else numbers[:, begin:end]
        above = first - begin if wide else first  # rows of the tile's matrix before these
        start = tile * layout.tile_bytes + matrix * blocks.matrix_bytes(shape.tile, shape.hidden)
        start += blocks.matrix_bytes(above, tile_columns)
        records = out[start : start + blocks.matrix_bytes(last - first, tile_columns)]
        try:
            blocks.encode_matrix(rows, records)
        except WeightsUnusable as e:
            raise ModelError(f"{e}, in the tensor {part.name}") from None


def _rows(reader: Rows, part: TensorRows, lo: int, hi: int) -> RawTensor:
    """Rows [lo, hi) of `part`; rows past its end are left out."""
    lo = min(lo, part.rows)
    return reader.rows(part, lo, max(lo, min(hi, part.rows)))


def _transposed(bits: Bits) -> Bits:
    """[H, n] to contiguous [n, H]; of bit patterns, which are narrower than float32."""
    rows, columns = bits.shape
    transposed = np.empty((columns, rows), bits.dtype)
    # An odd number of cache lines from row to row: with a power of two, the numbers of a column evict each
    # other from the cache, and this takes ten times as long.
    scratch = np.empty((TRANSPOSED_ROWS, (columns // LINE + 1 | 1) * LINE), bits.dtype)
    for at in range(0, rows, TRANSPOSED_ROWS):
        block = scratch[: min(TRANSPOSED_ROWS, rows - at), :columns]
        block[:] = bits[at : at + TRANSPOSED_ROWS]
        for lo in range(0, columns, STRIP):
            transposed[lo : lo + STRIP, at : at + TRANSPOSED_ROWS] = block[:, lo : lo + STRIP].T
    return transposed


def _padded(numbers: Float32, rows: int, columns: int) -> Float32:
    """Padded with zeros below and to the right to this shape."""
    if numbers.shape == (rows, columns):
        return numbers
    return np.pad(numbers, ((0, rows - numbers.shape[0]), (0, columns - numbers.shape[1])))


def _encode_plain(
    reader: Rows,
    layout: StoreLayout,
    expert: ExpertRows,
    down: Future[RawTensor],
    tile: int,
    lo: int,
    hi: int,
    out: Bytes,
) -> None:
    """Encode channels [lo, hi) of a tile, which is three matrices of whole rows. Where the format has the
    checkpoint's bits, they are copied; else the channels are encoded as a smaller tile, and its matrices are
    then copied to their places. `down`: the whole matrix, being read."""
    shape, tile_format = layout.shape, layout.format
    first, count = tile * shape.tile + lo, hi - lo
    last = max(first, min(first + count, shape.intermediate))
    start = tile * layout.tile_bytes
    whole = out[start : start + layout.tile_bytes].reshape(3, shape.tile, -1)
    dtype, _, bits = down.result()
    matrices = (
        _rows(reader, expert[0], first, last),
        _rows(reader, expert[1], first, last),
        RawTensor(dtype, (last - first, shape.hidden), _transposed(bits[:, first:last])),
    )
    if all(SAME_BITS.get(raw.dtype) == tile_format.name for raw in matrices):
        for target, raw in zip(whole, matrices, strict=True):
            target[lo : lo + last - first] = raw.bits.view(np.uint8)
            target[lo + last - first : hi] = 0
        return
    scratch = np.empty(tile_format.tile_bytes(shape.hidden, count), np.uint8)
    gate, up, columns = (_padded(to_float32(raw.dtype, raw.bits), count, shape.hidden) for raw in matrices)
    tile_format.encode(gate, up, columns, scratch)
    whole[:, lo:hi] = scratch.reshape(3, count, -1)
