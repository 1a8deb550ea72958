"""The formats whose channels are read one by one: all of up in few bits, gate and down channel by channel.

What a channel adds to the output is f(gate . x, up . x) times its column of down (`shm/expert_math.py`). So
a kernel that has computed up . x of all channels can leave out the channels where it is small, and read
gate's row and down's column of the others only (FloE, 2025). A tile of T channels is in two places of the
store, its head and its body:

    head:  up [T, H], a matrix of a block format (`shm/blocks.py`) with groups of 64 along H
    body:  | channel 0: gate's row | down's column | channel 1: gate's row | down's column | ...

Rows and columns are H numbers, records of a row format (`shm/floe.py`). T is a multiple of 16: a tile is the
blocks of its head and the channels of its body, so any 16 of its channels are a smaller tile, and the tiles
of an expert together are as one tile.

With biases each channel has a line of 64 bytes more, gate's bias (float32) and zeros:

    body:  | channel 0: gate's row | down's column | its bias | channel 1: ... |

and up's biases, which are read with up, are behind the heads of all tiles of their expert. Ungated experts
have no such tiles.

    floe[-u4|-u8][-int8|-int4]:  up in 2 bits (-u4: 4, -u8: 8), channels in bf16 (or int8, int4)

The channels that pad an expert have rows of zeros in up (2 and 4 bits: scale 0 and zero 0; 8 bits: u = 128),
gate and down.

Single rows of numbers, each readable alone: the channels of `shm/floe.py`.

A row of K numbers is a record of whole lines of 64 bytes. It has groups of 64 numbers, the last one padded;
int4 has two groups in a line, and pads their number to an even one.

    bf16:  | K numbers, bf16 |

    int8, G groups; value = scale * (u - 128), u = 1..255:

        | G scales, float32 | G lines |

        line g; byte 4*i + b: u of number 64*g + 16*b + i

    int4, G groups; value = scale * (q - zero), q = 0..15, zero any bfloat16 number:

        | G scales, bf16 | G zeros, bf16 | G/2 lines |

        line j; byte 4*i + b:
            low nibble: q of number 128*j + 16*b + i        high nibble: q of number 128*j + 64 + 16*b + i

so that 16 consecutive numbers are in the 16 words of a line, at one place of each. Every part is padded with
zero bytes to whole lines. A group that only pads has scale 0 and zero 0. Numbers that only pad the last group
have q = 0 (int4: they mean nothing, and no kernel uses them) or u = 128 (int8: they are 0).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from shm.blocks import BlockFormat, Int2, Int4, Int8
from shm.expert_math import SWIGLU, ExpertMath
from shm.formats import ENCODED_ROWS, LINE, NO_HEAD, Bytes, Float32, TileFormat, round_to_bf16
from shm.quantize import LANES, encode_rows, row_head_bytes, row_line_bytes


class RowFormat(ABC):
    """The bytes of one row's numbers. Stateless."""

    name: str
    bits: int

    @abstractmethod
    def row_bytes(self, k: int) -> int:
        """Bytes of a row of k numbers, whole lines."""

    @abstractmethod
    def encode(self, w: Float32, out: Bytes) -> None:
        """Write the rows w [n, k] (any strides) into out, uint8 [n, row_bytes], a row's bytes contiguous.
        Raises WeightsUnusable."""


class BF16Rows(RowFormat):
    name, bits = "bf16", 16

    def row_bytes(self, k: int) -> int:
        return -(-2 * k // LINE) * LINE

    def encode(self, w: Float32, out: Bytes) -> None:
        k = w.shape[1]
        for lo in range(0, len(w), ENCODED_ROWS):
            part = slice(lo, lo + ENCODED_ROWS)
            out[part, : 2 * k].view("<u2")[:] = round_to_bf16(w[part])
        out[:, 2 * k :] = 0


class QuantizedRows(RowFormat):
    """4 bits, asymmetric, or 8 bits, symmetric."""

    def __init__(self, bits: int) -> None:
        self.name = f"int{bits}"
        self.bits = bits

    def row_bytes(self, k: int) -> int:
        return row_head_bytes(k, self.bits) + row_line_bytes(k, self.bits)

    def encode(self, w: Float32, out: Bytes) -> None:
        encode_rows(w, self.bits, out)


UP_GROUP = 64  # numbers of up that share a scale


class FloeFormat(TileFormat):
    """Format of single channels: a tile's head is blocks of up, its body channels of gate and down."""

    def __init__(self, up: BlockFormat, rows: RowFormat) -> None:
        self.up = up
        self.rows = rows
        bits = "" if up.bits == 2 else f"-u{up.bits}"
        self.name = f"floe{bits}" + ("" if rows.name == "bf16" else f"-{rows.name}")

    @property
    def granularity(self) -> int:
        return LANES

    def channel_bytes(self, hidden: int, math: ExpertMath = SWIGLU) -> int:
        """Bytes of one channel in the body: gate's row, down's column, and with biases gate's."""
        return 2 * self.rows.row_bytes(hidden) + (LINE if math.bias else 0)

    def head_bytes(self, hidden: int, tile: int) -> int:
        return self.up.matrix_bytes(tile, hidden)

    def matrices_bytes(self, hidden: int, tile: int, matrices: int = 3) -> int:
        if tile % LANES:
            raise ValueError(f"a tile of {self.name} needs a multiple of {LANES} channels, not {tile}")
        if matrices != 3:
            raise ValueError(f"the format {self.name} reads gate channel by channel: it needs gated experts")
        return 2 * tile * self.rows.row_bytes(hidden)

    def tile_bytes(self, hidden: int, tile: int, math: ExpertMath = SWIGLU) -> int:
        return self.matrices_bytes(hidden, tile, math.matrices) + (tile * LINE if math.bias else 0)

    def beside_matrices(self, data: Bytes, hidden: int, tile: int, math: ExpertMath) -> Bytes:
        return data.reshape(tile, -1)[:, 2 * self.rows.row_bytes(hidden) :]

    def biases(self, data: Bytes, hidden: int, tile: int, math: ExpertMath) -> Float32:
        return self.beside_matrices(data, hidden, tile, math)[:, :4].view("<f4").T

    def encode(
        self, gate: Float32 | None, up: Float32, down: Float32, out: Bytes, head: Bytes = NO_HEAD
    ) -> None:
        tile, hidden = up.shape
        sizes = [self.tile_bytes(hidden, tile, ExpertMath(bias=bias)) for bias in (False, True)]
        if gate is None or len(out) not in sizes or len(head) != self.head_bytes(hidden, tile):
            raise ValueError(f"a gated tile of {sizes} bytes does not fit {out.shape} and {head.shape}")
        self.up.encode_matrix(up, head)
        for w, rows in zip((gate, down), self.rows_of(out, hidden, tile), strict=True):
            self.rows.encode(w, rows)

    def rows_of(self, body: Bytes, hidden: int, tile: int) -> tuple[Bytes, Bytes]:
        """Gate's and down's records in the channels of a body, [T, row_bytes] each."""
        channels, row = body.reshape(tile, -1), self.rows.row_bytes(hidden)
        return channels[:, :row], channels[:, row : 2 * row]


FLOE_FORMATS = tuple(
    FloeFormat(up, rows)
    for up in (Int2(UP_GROUP), Int4(UP_GROUP), Int8(UP_GROUP))
    for rows in (BF16Rows(), QuantizedRows(8), QuantizedRows(4))
)
