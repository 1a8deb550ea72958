"""The input of one step: new tokens of sequences, laid out as rows, and the rows that need logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor

from pipeline.backbone.host_rows import HostRows
from pipeline.backbone.kv_blocks import BlockPool
from pipeline.backbone.kv_cache import BLOCKS, POSITIONS, ROPE, TOKENS, SequenceKV
from pipeline.backbone.rope import RopeTables
from workers.kernels.cuda.attention import DecodeAttention, Rows


@dataclass(frozen=True)
class TokenSpan:
    """Consecutive new tokens of one sequence in a step. The last `drafted` of them are guesses, whose KV is
    written and does not count."""

    kv: SequenceKV
    tokens: Sequence[int]
    drafted: int = 0

    @property
    def decodes(self) -> bool:
        """Returns whether it is one token of a stored sequence, and guesses."""
        return len(self.tokens) == 1 + self.drafted and self.kv.stored

    @property
    def positions(self) -> range:
        return range(self.kv.length, self.kv.length + len(self.tokens))


@dataclass(frozen=True)
class StepInput:
    """A span, and which of its tokens need logits. No counter or observer has a step of uncounted spans."""

    span: TokenSpan
    # last: and of the one before each guess; greedy: as last, the device's choice is enough
    logits: Literal["none", "last", "all", "greedy"]
    counted: bool = True


NUMBER = 8  # bytes

# By sliding window, for each span [T, N] bool; None where every row attends to all N tokens.
Masks = dict[int | None, list[Tensor | None]]


@dataclass(frozen=True)
class DecodeRows:
    """Rows of spans that decode, and the device's kernels that append to these and attend to
    them. A table on the device has their tokens, positions and blocks; one copy brings it. What reads it is
    the same for every step, so also a CUDA graph can."""

    table: Tensor  # as `table_of`, on the device
    pool: BlockPool  # of the rows' blocks
    kernels: DecodeAttention

    @property
    def tokens(self) -> Tensor:
        return self.table[TOKENS]

    @property
    def rope(self) -> Tensor:
        return self.table[ROPE]

    def append(self, layer: int, *new: Tensor) -> None:
        """Appends, as `DecodeAttention.append` does."""
        self.kernels.append(self._of(layer), *new)

    def attend(
        self,
        layer: int,
        q: Tensor,
        kv_heads: int,
        value_width: int,
        window: int | None,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attends, as `DecodeAttention.attend` does."""
        return self.kernels.attend(self._of(layer), q, kv_heads, value_width, window, scale, sinks)

    def _of(self, layer: int) -> Rows:
        rows, first = self.table.shape[1], self.table.data_ptr()
        positions, blocks = (first + NUMBER * rows * line for line in (POSITIONS, BLOCKS))
        slabs = self.pool.slabs[layer]
        streams = tuple(slab.numbers.data_ptr() for slab in slabs)
        scales = tuple(0 if slab.scales is None else slab.scales.data_ptr() for slab in slabs)
        return Rows(rows, positions, blocks, rows, streams, scales)


@dataclass(frozen=True)
class Batch:
    """The tokens of all spans, span after span, one row each; made by `Backbone.batch`."""

    spans: Sequence[TokenSpan]
    rows: int
    tokens: Tensor  # [R] int64, on the device
    rope: RopeTables
    rope_rows: list[int]  # of these tables, of the rows' positions
    find_masks: Callable[[Sequence[TokenSpan]], Masks]
    flash: bool  # as of the device
    widths: tuple[int, int]  # of hidden states, and of a router's logits
    decode: DecodeRows | None = None  # where each span decodes and the device has kernels for that

    @cached_property
    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """Rotary cosines and sines of the rows' positions, [R, 1, width] each. Found on first use: the host's
        kernel of a layer reads the tables."""
        return self.found_cos_sin()

    def found_cos_sin(self) -> tuple[Tensor, Tensor]:
        """Returns `cos_sin` computed anew: of rows on the device the positions may have changed."""
        return self.rope[self.rope_rows] if self.decode is None else self.rope.at(self.decode.rope)

    @cached_property
    def masks(self) -> Masks:
        """Found on first use: the host's kernels need none."""
        return self.find_masks(self.spans)

    @cached_property
    def decodes(self) -> bool:
        """Returns whether each span does: kernels then take the rows one by one, each at its position."""
        return all(span.decodes for span in self.spans)

    @cached_property
    def stored(self) -> bool:
        """Returns whether all spans' keys and values are stored: not in a step that torch computes
        gradients of."""
        return all(span.kv.stored for span in self.spans)

    @cached_property
    def host(self) -> HostRows:
        """The rows for the host's kernels of layers, where each span decodes."""
        turns = zip(*self.rope.addresses(self.rope_rows), strict=True)
        rows = []
        for span in self.spans:
            kv = span.kv
            of_all = kv.pool.addresses, kv.blocks.ctypes.data, kv.state_addresses, kv.capacity
            rows += [(*next(turns), *of_all, position) for position in span.positions]
        return HostRows(rows, *self.widths)


def logit_rows(inputs: Sequence[StepInput]) -> tuple[list[int], list[int]]:
    """The rows of the step that need logits, and how many of them belong to each input."""
    rows: list[int] = []
    counts = []
    start = 0
    for item in inputs:
        end = start + len(item.span.tokens)
        first = {"none": end, "all": start}.get(item.logits, end - 1 - item.span.drafted)
        chosen = range(first, end)
        rows.extend(chosen)
        counts.append(len(chosen))
        start = end
    return rows, counts
