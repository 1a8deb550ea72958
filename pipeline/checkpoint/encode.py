"""Encodes a checkpoint's experts into the store, on all cores.

A core reads and encodes a chunk, some rows of an expert's matrices, without the interpreter's lock. Meanwhile
the kernel reads the next experts ahead, and drops the encoded ones from the page cache: they are not read
again, and would evict what the engine's start reads next. Together the chunks of an expert write the same
bytes as `StoreLayout.encode_expert`, in a small part of its memory.

A quantized matrix consists of blocks of 16 outputs, so any multiple of 16 rows of gate, up or down can be
encoded alone; such rows of down have records in every tile. A plain tile, and one that is read by channel,
has down transposed: its rows are columns of the checkpoint's matrix, which is therefore held in memory as a
whole. Biases are a chunk of their own. Where the checkpoint has all matrices transposed (`architecture.py`,
interleaved), so are all, once each, whatever the format. Rows that a file has as codes of the store's format
are written without loss (`shm/codes.py`), all other codes by way of the numbers that they mean.

Memory beyond the store and the page cache: two `down` matrices, or READ_AHEAD_BYTES / 3 of smaller ones (none
for formats of quantized blocks), or whole experts where they are transposed, and CHUNK_BYTES for each core,
whatever the model's size.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.checkpoint.reader import RawTensor, codes_or_numbers, numbers_of, raw_tensor
from pipeline.errors import ModelError
from pipeline.models.architecture import ExpertRows, TensorRows
from shm.codes import Codes
from shm.errors import WeightsUnusable
from shm.fp8 import BLOCK, FP8, encode_rows, transposed
from shm.layout import BlockFormat, Bytes, Float32, FloeFormat, StoreLayout
from shm.store import StoreBuilder

READ_AHEAD_BYTES = 1 << 27  # of experts that are not yet encoded; two experts in any case
DOWN_READERS = 2  # threads that read whole `down` matrices

LocateExpert = Callable[[int, int], ExpertRows]  # layer of the store, expert -> location in the checkpoint
CHUNK_NUMBERS = 1 << 19  # of one matrix, about
STRIP = 64  # columns transposed at a time, of TRANSPOSED_ROWS rows: a block that stays in the cache
TRANSPOSED_ROWS = 256
LINE = 32  # 16-bit numbers of a cache line
SAME_BITS = {"BF16": "bf16", "F32": "f32"}  # dtype -> the format that stores its bits unchanged
CHUNK_BYTES = 1 << 25  # at most, of memory that a core needs for a chunk, unless 16 rows need more

Chunk = Callable[[], None]  # reads and encodes its rows; for any thread; raises ModelError


class _Pending(NamedTuple):
    layer: int
    expert: int
    rows: ExpertRows
    nbytes: int  # in the checkpoint
    chunks: list[Future[None]]


def encode_experts(
    reader: Experts, locate: LocateExpert, builder: StoreBuilder, progress: Callable[[int], None]
) -> None:
    """`progress` is called in this thread with the bytes of the store encoded so far. Raises ModelError where
    a tensor is missing, has another shape or weights that cannot be encoded, or its file changed."""
    layout = builder.layout
    shape = layout.shape
    stride = layout.layer_stride // shape.experts
    pending: deque[_Pending] = deque()

    def retire() -> int:
        """Wait for the oldest expert's chunks; its bytes in the checkpoint."""
        oldest = pending.popleft()
        begin = layout.before(oldest.layer, oldest.expert)
        for done, chunk in enumerate(oldest.chunks, 1):
            chunk.result()
            progress(begin + stride * done // len(oldest.chunks))
        if oldest.expert == shape.experts - 1:
            builder.filled(oldest.layer)
        for rows in oldest.rows:
            reader.advise(rows, os.POSIX_FADV_DONTNEED)
        return oldest.nbytes

    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(DOWN_READERS) as downs, ThreadPoolExecutor(cores) as pool:
        try:
            ahead = nbytes = 0
            for layer in range(shape.layers):
                for expert in range(shape.experts):
                    # All experts have one size: this one has that of the one before it.
                    while len(pending) >= 2 and ahead + nbytes > READ_AHEAD_BYTES:
                        ahead -= retire()
                    matrices = locate(layer, expert)
                    target = builder.expert(layer, expert), builder.heads(layer, expert)
                    chunks = expert_chunks(reader, downs, layout, matrices, *target)
                    submitted = [pool.submit(chunk) for chunk in chunks]
                    nbytes = sum(reader.advise(rows, os.POSIX_FADV_WILLNEED) for rows in matrices)
                    pending.append(_Pending(layer, expert, matrices, nbytes, submitted))
                    ahead += nbytes
            while pending:
                retire()
        except BaseException:
            for threads in (downs, pool):
                threads.shutdown(wait=False, cancel_futures=True)
            raise


class Rows(Protocol):
    """A source of tensor rows: a TensorReader, or arrays in memory."""

    def rows(self, part: TensorRows, lo: int, hi: int) -> RawTensor | Codes:
        """See TensorReader.rows; for any thread. Codes: where the file has them, and of no tensor that is
        transposed or that has every `step`-th column only."""


class Experts(Rows, Protocol):
    """A source of a checkpoint's experts."""

    def advise(self, part: TensorRows, advice: int) -> int:
        """See TensorReader.advise."""


def expert_chunks(
    reader: Rows,
    downs: ThreadPoolExecutor,
    layout: StoreLayout,
    expert: ExpertRows,
    out: Bytes,
    heads: Bytes,
) -> list[Chunk]:
    """The chunks of an expert, for any order and threads. `downs`: reads `down` where it is needed whole. out
    uint8 [expert_stride], heads uint8 [head_stride]."""
    shape = layout.shape
    layout.clear_padding(out, heads)
    if len(expert) != shape.math.matrices + shape.math.biases:
        raise ValueError(f"{len(expert)} parts of an expert of {shape.math}")
    if any(part.transposed for part in expert):
        reader = Transposed(reader, downs, expert)
    *wide, down = matrices = expert[: shape.math.matrices]
    biases = expert[shape.math.matrices :]
    chunks: list[Chunk] = [partial(_encode_biases, reader, layout, biases, out, heads)] if biases else []
    if isinstance(layout.format, BlockFormat):
        sizes = [(shape.padded, shape.hidden)] * len(wide) + [(shape.hidden, shape.padded)]
        for matrix, (part, (rows, columns)) in enumerate(zip(matrices, sizes, strict=True)):
            factor = downs.submit(_factor, reader, layout.format, part) if layout.format.factors else None
            chunks += [
                partial(_encode_blocks, reader, layout, layout.format, matrix, part, factor, lo, hi, out)
                for lo, hi in _ranges(rows, max(16, CHUNK_NUMBERS // columns // 16 * 16))
            ]
        return chunks
    whole_down = downs.submit(reader.rows, down, 0, down.height)
    step = max(1, CHUNK_NUMBERS // shape.hidden)
    if isinstance(layout.format, FloeFormat):  # the tiles of an expert are as one tile
        return chunks + [
            partial(_encode_channels, reader, layout, layout.format, matrices, whole_down, lo, hi, out, heads)
            for lo, hi in _ranges(shape.padded, max(16, step // 16 * 16))
        ]
    if isinstance(layout.format, FP8):
        return chunks + [
            partial(_encode_fp8, reader, layout, layout.format, matrices, whole_down, tile, lo, hi, out)
            for tile in range(shape.tiles)
            for lo, hi in _ranges(shape.tile, max(BLOCK, step // BLOCK * BLOCK))
        ]
    return chunks + [
        partial(_encode_plain, reader, layout, wide, whole_down, tile, lo, hi, out)
        for tile in range(shape.tiles)
        for lo, hi in _ranges(shape.tile, step)
    ]


class Transposed:
    """Rows of an expert whose matrices a checkpoint has transposed, not quantized. Each is read once, as a
    whole; matrices with alternating columns lie in the same rows."""

    def __init__(self, reader: Rows, readers: ThreadPoolExecutor, expert: ExpertRows) -> None:
        """Begins to read, in the threads of `readers`."""
        self._wholes = {
            part.stored: readers.submit(reader.rows, part.stored, 0, part.rows)
            for part in dict.fromkeys(part.stored for part in expert)
        }

    def rows(self, part: TensorRows, lo: int, hi: int) -> RawTensor:
        whole = self._wholes[part.stored].result()
        assert isinstance(whole, RawTensor)
        dtype, _, bits = whole
        columns = bits[:, part.start :: part.step]
        rows = _transposed(columns[:, lo:hi]) if part.transposed else columns[lo:hi]
        return RawTensor(dtype, rows.shape, rows)


def _ranges(rows: int, step: int) -> list[tuple[int, int]]:
    return [(lo, min(lo + step, rows)) for lo in range(0, rows, step)]


def _encode_biases(reader: Rows, layout: StoreLayout, biases: ExpertRows, out: Bytes, heads: Bytes) -> None:
    """Write an expert's biases, each one row of I numbers."""
    shape = layout.shape
    raw = [reader.rows(part, 0, 1) for part in biases]
    numbers = [_padded(numbers_of(one), 1, shape.padded)[0] for one in raw]
    for tile in range(shape.tiles):
        for to, of_expert in zip(layout.biases_of(out, heads, tile), numbers, strict=True):
            to[:] = of_expert[tile * shape.tile : (tile + 1) * shape.tile]


def _encode_blocks(
    reader: Rows,
    layout: StoreLayout,
    blocks: BlockFormat,
    matrix: int,
    part: TensorRows,
    factor: Future[float] | None,
    lo: int,
    hi: int,
    out: Bytes,
) -> None:
    """Encode rows [lo, hi) of one of the expert's matrices, of which the last is down, with its factor where
    the format has one. Those of gate and up are channels, and zero from I on; those of down are outputs,
    which have records in every tile."""
    shape = layout.shape
    wide = matrix < shape.math.matrices - 1
    columns, tile_columns = (shape.hidden, shape.hidden) if wide else (shape.padded, shape.tile)
    raw = _rows(reader, part, lo, hi)
    numbers = codes_or_numbers(raw, blocks)
    if isinstance(numbers, Codes):
        numbers = numbers.padded(hi - lo, columns)
    else:
        numbers = _padded(numbers, hi - lo, columns)
    scale = 1.0 if factor is None else factor.result()
    for tile in range(lo // shape.tile, -(-hi // shape.tile)) if wide else range(shape.tiles):
        begin, end = tile * shape.tile, (tile + 1) * shape.tile
        first, last = (max(lo, begin), min(hi, end)) if wide else (lo, hi)
        if wide:
            rows = numbers[first - lo : last - lo]
        else:
            rows = numbers.columns(begin, end) if isinstance(numbers, Codes) else numbers[:, begin:end]
        above = first - begin if wide else first  # rows of the tile's matrix before these
        of_tile = out[tile * layout.tile_bytes : (tile + 1) * layout.tile_bytes]
        start = matrix * blocks.blocks_bytes(shape.tile, shape.hidden)
        start += blocks.blocks_bytes(above, tile_columns)
        records = of_tile[start : start + blocks.blocks_bytes(last - first, tile_columns)]
        with _naming(part):
            blocks.encode_part(rows, records, scale)
        if factor is not None:  # by each chunk: they write the same
            size = blocks.matrices_bytes(shape.hidden, shape.tile, shape.math.matrices)
            blocks.factors_of(of_tile[:size])[matrix] = scale


def _factor(reader: Rows, blocks: BlockFormat, part: TensorRows) -> float:
    """The factor of a matrix: the file's, or one that suits its largest number."""
    largest = np.zeros(1, np.float32)
    for lo, hi in _ranges(part.height, max(1, CHUNK_NUMBERS // part.shape[-1])):
        rows = reader.rows(part, lo, hi)
        if isinstance(rows, Codes) and rows.format == blocks.name:
            return rows.factor
        np.maximum(largest, np.abs(numbers_of(rows)).max(), out=largest)
    return blocks.factor_of(largest)


@contextmanager
def _naming(part: TensorRows) -> Iterator[None]:
    """Turn weights that cannot be encoded into a ModelError that names their tensor."""
    try:
        yield
    except WeightsUnusable as e:
        raise ModelError(f"{e}, in the tensor {part.name}") from None


def _rows(reader: Rows, part: TensorRows, lo: int, hi: int) -> RawTensor | Codes:
    """Rows [lo, hi) of `part`; rows past its end are left out."""
    lo = min(lo, part.height)
    return reader.rows(part, lo, max(lo, min(hi, part.height)))


def _transposed(bits: NDArray[Any]) -> NDArray[Any]:
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
    wide: Sequence[TensorRows],
    down: Future[RawTensor | Codes],
    tile: int,
    lo: int,
    hi: int,
    out: Bytes,
) -> None:
    """Encode channels [lo, hi) of a tile, which is matrices of whole rows. Where the format has the
    checkpoint's bits, they are copied; else the channels are encoded as a smaller tile, and its matrices are
    then copied to their places. `down`: the whole matrix, being read."""
    shape, tile_format = layout.shape, layout.format
    first, count = tile * shape.tile + lo, hi - lo
    last = max(first, min(first + count, shape.intermediate))
    start = tile * layout.tile_bytes
    number = shape.math.matrices
    size = tile_format.matrices_bytes(shape.hidden, shape.tile, number)
    whole = out[start : start + size].reshape(number, shape.tile, -1)
    matrices = _channels(reader, wide, down, first, last)
    if all(SAME_BITS.get(raw.dtype) == tile_format.name for raw in matrices):
        for target, raw in zip(whole, matrices, strict=True):
            target[lo : lo + last - first] = raw.bits.view(np.uint8)
            target[lo + last - first : hi] = 0
        return
    scratch = np.empty(tile_format.matrices_bytes(shape.hidden, count, number), np.uint8)
    *gate, up, columns = (_padded(numbers_of(raw), count, shape.hidden) for raw in matrices)
    tile_format.encode(gate[0] if gate else None, up, columns, scratch)
    whole[:, lo:hi] = scratch.reshape(number, count, -1)


def _encode_fp8(
    reader: Rows,
    layout: StoreLayout,
    tile_format: FP8,
    expert: ExpertRows,
    down: Future[RawTensor | Codes],
    tile: int,
    lo: int,
    hi: int,
    out: Bytes,
) -> None:
    """Encode channels [lo, hi) of a tile, whole blocks of its matrices. `down`: as of _encode_plain."""
    shape = layout.shape
    first, last = (min(tile * shape.tile + at, shape.intermediate) for at in (lo, hi))
    of_tile, sizes = out[tile * layout.tile_bytes :], (shape.tile, shape.hidden, shape.math.matrices)
    tile_format.clear_padding(of_tile, *sizes)
    places = zip(*tile_format.parts(of_tile, *sizes), strict=True)
    rows = [
        *(_rows(reader, part, first, last) for part in expert[:-1]),
        _fp8_columns(down.result(), first, last),
    ]
    for part, one, (codes, scales) in zip(expert, rows, places, strict=True):
        numbers = one if isinstance(one, Codes) else numbers_of(one)
        with _naming(part):
            encode_rows(numbers, codes[lo:hi], scales[lo // BLOCK : hi // BLOCK])


def _fp8_columns(down: RawTensor | Codes, first: int, last: int) -> RawTensor | Codes:
    """Channels [first, last) of down, transposed; codes of fp8 as such."""
    if isinstance(down, Codes) and down.format == "fp8" and first % BLOCK == 0:
        some = down.columns(first, last)
        if (kept := transposed(some, _transposed(some.codes))) is not None:
            return kept
    return _transposed_columns(down, first, last)


def _encode_channels(
    reader: Rows,
    layout: StoreLayout,
    tile_format: FloeFormat,
    expert: ExpertRows,
    down: Future[RawTensor | Codes],
    lo: int,
    hi: int,
    out: Bytes,
    heads: Bytes,
) -> None:
    """Encode channels [lo, hi) of an expert: a smaller tile of a format that is read by channel."""
    shape = layout.shape
    first, last = (min(place, shape.intermediate) for place in (lo, hi))
    gate, up, columns = (
        _padded(numbers_of(raw), hi - lo, shape.hidden)
        for raw in _channels(reader, expert[:2], down, first, last)
    )
    head, size = (tile_format.head_bytes(shape.hidden, channels) for channels in (lo, hi - lo))
    channel = tile_format.channel_bytes(shape.hidden, shape.math)
    with _naming(expert[1]):
        tile_format.up.encode_matrix(up, heads[head : head + size])
    rows = tile_format.rows_of(out[lo * channel : hi * channel], shape.hidden, hi - lo)
    for part, numbers, to in zip((expert[0], expert[2]), (gate, columns), rows, strict=True):
        with _naming(part):
            tile_format.rows.encode(numbers, to)


def _channels(
    reader: Rows, wide: Sequence[TensorRows], down: Future[RawTensor | Codes], first: int, last: int
) -> list[RawTensor]:
    """Channels [first, last) of gate, where there is one, of up and of down, transposed: each [last - first,
    H]."""
    columns = _transposed_columns(down.result(), first, last)
    return [*(_as_numbers(_rows(reader, part, first, last)) for part in wide), columns]


def _transposed_columns(whole: RawTensor | Codes, first: int, last: int) -> RawTensor:
    """Columns [first, last) as rows of numbers."""
    if isinstance(whole, Codes):
        begin = first // whole.kind.group * whole.kind.group
        some = _as_numbers(whole.columns(begin, -(-last // whole.kind.group) * whole.kind.group))
        dtype, bits = some.dtype, some.bits[:, first - begin : last - begin]
    else:
        dtype, bits = whole.dtype, whole.bits[:, first:last]
    return RawTensor(dtype, bits.T.shape, _transposed(bits))


def _as_numbers(rows: RawTensor | Codes) -> RawTensor:
    """Codes as the numbers that they mean."""
    return rows if isinstance(rows, RawTensor) else raw_tensor(rows.values())
