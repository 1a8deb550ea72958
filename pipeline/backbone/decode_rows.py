"""Rows of a step that are single tokens of sequences, for kernels on the device. A table there has their
tokens and positions, and where their keys and values lie; one copy brings it. What reads it is the same for
every step, so also a CUDA graph can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pipeline.backbone.kv_cache import SequenceKV
from workers.kernels.cuda.attention import DecodeAttention, Rows

TOKENS, ROPE, POSITIONS, CAPACITIES, STREAMS = range(5)  # lines of the table, and the first of the addresses
NUMBER = 8  # bytes


def table_of(
    sequences: Sequence[SequenceKV], tokens: Sequence[int], rope: Sequence[int], rows: int
) -> NDArray[np.int64]:
    """int64 [4 + layers * streams, rows], of at least as many rows as sequences; the others have none."""
    addresses = [kv.stream_addresses.ravel() for kv in sequences]
    table = np.zeros((STREAMS + len(addresses[0]), rows), np.int64)
    table[POSITIONS] = -1
    used = table[:, : len(sequences)]
    used[TOKENS], used[ROPE] = tokens, rope
    used[POSITIONS] = [kv.length for kv in sequences]
    used[CAPACITIES] = [kv.capacity for kv in sequences]
    used[STREAMS:] = np.stack(addresses, axis=1)
    return table


@dataclass(frozen=True)
class DecodeRows:
    """The rows, and the kernels that append to their sequences and attend to them."""

    table: Tensor  # as `table_of`, on the device
    streams: int  # of a layer
    kernels: DecodeAttention

    @property
    def tokens(self) -> Tensor:
        return self.table[TOKENS]

    @property
    def rope(self) -> Tensor:
        return self.table[ROPE]

    def append(self, layer: int, *new: Tensor) -> None:
        """As `DecodeAttention.append`."""
        self.kernels.append(self._of(layer), *new)

    def attend(
        self, layer: int, q: Tensor, kv_heads: int, value_width: int, window: int | None, scale: float
    ) -> Tensor:
        """As `DecodeAttention.attend`."""
        return self.kernels.attend(self._of(layer), q, kv_heads, value_width, window, scale)

    def _of(self, layer: int) -> Rows:
        rows, first = self.table.shape[1], self.table.data_ptr()
        positions, capacities = (first + NUMBER * rows * line for line in (POSITIONS, CAPACITIES))
        lines = range(STREAMS + layer * self.streams, STREAMS + (layer + 1) * self.streams)
        return Rows(rows, positions, capacities, tuple(first + NUMBER * rows * line for line in lines))
