"""Attention of a decode step by the CUDA kernels: new keys and values are written, each chunk of a sequence
is attended to, and the chunks are added up. Nothing here depends on a sequence's length or blocks: the
kernels read those from a table on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workers.kernels.cuda.compiler import Program
from workers.kernels.cuda.launcher import Launcher

THREADS = {"append": 128, "attend": 256, "merge": 128}
STEP, MOST_CHUNKS = 128, 64  # tokens of the smallest chunk; chunks of a sequence
MOST_KEY, MOST_VALUE = 576, 512  # numbers of a key and of a value
HEADS = (1, 2, 4, 8)  # most query heads of a block, of the kernels that there are
VECTOR_BYTES = 16  # that a thread reads together
EXTRA = 2  # numbers of a chunk beside its values
ROW_NUMBERS = 1 << 19  # of the chunks of a row together: models with many wide heads have fewer chunks


def program(dtype: torch.dtype) -> Program:
    """Returns the program for keys and values of this dtype, float32, bfloat16 or int8."""
    return Program("attention.cu", (("BITS", 8 * dtype.itemsize),))


def fits(streams: Sequence[tuple[int, int]], dtype: torch.dtype) -> bool:
    """Tells whether the kernels take streams of these heads and widths."""
    most, vector = MOST_KEY if len(streams) == 1 else MOST_VALUE, VECTOR_BYTES // dtype.itemsize
    return all(width <= most and width % vector == 0 for _, width in streams)


@dataclass(frozen=True)
class Rows:
    """The places of a layer's numbers of each row, by addresses on the device."""

    number: int
    positions: int  # of int64 [R], of the new tokens; -1: no sequence
    blocks: int  # of int64 [most blocks, `stride`], of the rows' blocks
    stride: int
    streams: tuple[int, ...]  # slabs: of keys and values, or the one that has both
    scales: tuple[int, ...]  # of these, where they are int8; else 0


class DecodeAttention:
    """Attention for sequences of at most `context` tokens."""

    def __init__(self, launcher: Launcher, context: int) -> None:
        """`launcher` has the `program` of the cache's dtype."""
        self._launcher = launcher
        self.context = context

    def chunks_of(self, seen: int, heads: int, value_width: int) -> int:
        """Most chunks of a row that attends to `seen` tokens at most: the same for all batches of a model."""
        most = min(MOST_CHUNKS, max(1, ROW_NUMBERS // (heads * (value_width + EXTRA))))
        return min(most, -(-seen // STEP))

    def append(self, rows: Rows, *new: Tensor) -> None:
        """Write the rows' new numbers [R, heads, width] of each stream, in the dtype of queries; a row's lie
        together."""
        first, last = new[0], new[-1]
        self._launch(
            "append", rows.number * len(new),
            first.data_ptr(), first.stride(0), last.data_ptr(), last.stride(0),
            *_places(rows),
            first.shape[1], first.shape[2], len(new),
        )  # fmt: skip

    def attend(
        self,
        rows: Rows,
        q: Tensor,
        kv_heads: int,
        value_width: int,
        window: int | None,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of q [R, heads, width] to the tokens up to the new one: float32 [R, heads * value_width].
        Queries are of the cache's dtype, with int8 bfloat16. `window`: the last tokens that count. Values are
        the first numbers of the last stream, whose rows are as wide as keys where it is the only one. `sinks`
        float32 [heads]: more scores, whose value is 0."""
        number, heads, width = q.shape
        group = heads // kv_heads
        limit = next((limit for limit in HEADS if group <= limit), HEADS[-1])
        chunks = self.chunks_of(min(window or self.context, self.context), heads, value_width)
        wide = width if len(rows.streams) == 1 else value_width
        parts = torch.empty(
            number * heads * chunks * (value_width + EXTRA), dtype=torch.float32, device=q.device
        )
        out = torch.empty((number, heads * value_width), dtype=torch.float32, device=q.device)
        self._launch(
            f"attend_{limit}", number * kv_heads * -(-group // limit) * chunks,
            q.data_ptr(), q.stride(0), *_places(rows),
            kv_heads, group, width, value_width, wide, window or 0, chunks,
            int(np.float32(scale).view(np.uint32)), parts.data_ptr(),
        )  # fmt: skip
        self._launch(
            "merge", number * heads,
            parts.data_ptr(), rows.positions, heads, value_width, window or 0, chunks,
            0 if sinks is None else sinks.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def _launch(self, kernel: str, blocks: int, *arguments: int) -> None:
        self._launcher.launch(kernel, blocks, THREADS[kernel.partition("_")[0]], *arguments)


def _places(rows: Rows) -> tuple[int, ...]:
    """Of one stream twice, and of its scales."""
    both = rows.streams[0], rows.streams[-1], rows.scales[0], rows.scales[-1]
    return rows.positions, rows.blocks, rows.stride, *both
