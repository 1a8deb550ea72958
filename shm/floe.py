"""The formats whose channels are read one by one: all of up in few bits, gate and down channel by channel.

What a channel adds to the output is silu(gate . x) * (up . x) times its column of down. So a kernel that has
computed up . x of all channels can leave out the channels where it is small, and read gate's row and down's
column of the others only (FloE, 2025). A tile of T channels is in two places of the store, its head and its
body:

    head:  up [T, H], a matrix of a block format (`shm/blocks.py`) with groups of 64 along H
    body:  | channel 0: gate's row | down's column | channel 1: gate's row | down's column | ...

Rows and columns are H numbers, records of a row format (`shm/rows.py`). T is a multiple of 16: a tile is the
blocks of its head and the channels of its body, so any 16 of its channels are a smaller tile, and the tiles
of an expert together are as one tile.

    floe[-u4|-u8][-int8|-int4]:  up in 2 bits (-u4: 4, -u8: 8), channels in bf16 (or int8, int4)

The channels that pad an expert have rows of zeros in up (2 and 4 bits: scale 0 and zero 0; 8 bits: u = 128),
gate and down.
"""

from __future__ import annotations

import numpy as np

from shm.blocks import BlockFormat, Int2, Int4, Int8
from shm.formats import NO_HEAD, Bytes, Float32, TileFormat
from shm.quantize import LANES
from shm.rows import BF16Rows, QuantizedRows, RowFormat

UP_GROUP = 64  # numbers of up that share a scale


class FloeFormat(TileFormat):
    """A head of blocks, a body of channels."""

    def __init__(self, up: BlockFormat, rows: RowFormat) -> None:
        self.up = up
        self.rows = rows
        bits = "" if up.bits == 2 else f"-u{up.bits}"
        self.name = f"floe{bits}" + ("" if rows.name == "bf16" else f"-{rows.name}")

    @property
    def granularity(self) -> int:
        return LANES

    def channel_bytes(self, hidden: int) -> int:
        """Bytes of one channel in the body: gate's row and down's column."""
        return 2 * self.rows.row_bytes(hidden)

    def head_bytes(self, hidden: int, tile: int) -> int:
        return self.up.matrix_bytes(tile, hidden)

    def tile_bytes(self, hidden: int, tile: int) -> int:
        if tile % LANES:
            raise ValueError(f"a tile of {self.name} needs a multiple of {LANES} channels, not {tile}")
        return tile * self.channel_bytes(hidden)

    def encode(self, gate: Float32, up: Float32, down: Float32, out: Bytes, head: Bytes = NO_HEAD) -> None:
        tile, hidden = gate.shape
        channels = self._channels(out, hidden, tile, head)
        self.up.encode_matrix(up, head)
        for part, w in enumerate((gate, down)):
            self.rows.encode(w, channels[:, part])

    def decode(self, data: Bytes, hidden: int, tile: int, head: Bytes = NO_HEAD) -> Float32:
        channels = self._channels(data, hidden, tile, head)
        gate, down = (self.rows.decode(channels[:, part], hidden) for part in range(2))
        return np.stack((gate, self.up.decode_matrix(head, tile, hidden), down))

    def _channels(self, data: Bytes, hidden: int, tile: int, head: Bytes) -> Bytes:
        """The rows of a body, [T, 2, row_bytes]. Raises ValueError where body or head have other sizes."""
        sizes = self.tile_bytes(hidden, tile), self.head_bytes(hidden, tile)
        if (data.shape, head.shape) != ((sizes[0],), (sizes[1],)):
            raise ValueError(f"a tile of {sizes} bytes does not fit {data.shape} and {head.shape}")
        return data.reshape(tile, 2, -1)


FLOE_FORMATS = tuple(
    FloeFormat(up, rows)
    for up in (Int2(UP_GROUP), Int4(UP_GROUP), Int8(UP_GROUP))
    for rows in (BF16Rows(), QuantizedRows(8), QuantizedRows(4))
)
