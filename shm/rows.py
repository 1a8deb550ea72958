"""Single rows of numbers, each readable alone: the channels of `shm/floe.py`.

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

import numpy as np

from shm.formats import ENCODED_ROWS, Bytes, Float32, round_to_bf16, widen_bf16
from shm.quantize import ROW_GROUP, encode_rows, row_head_bytes, row_line_bytes

LINE = 64  # bytes


class RowFormat(ABC):
    """How the numbers of one row become bytes. Stateless."""

    name: str
    bits: int

    @abstractmethod
    def row_bytes(self, k: int) -> int:
        """Bytes of a row of k numbers, whole lines."""

    @abstractmethod
    def encode(self, w: Float32, out: Bytes) -> None:
        """Write the rows w [n, k] (any strides) into out, uint8 [n, row_bytes], a row's bytes contiguous.
        Raises WeightsUnusable."""

    @abstractmethod
    def decode(self, rows: Bytes, k: int) -> Float32:
        """The numbers of rows, float32 [n, k]. rows: uint8 [n, row_bytes(k)]."""


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

    def decode(self, rows: Bytes, k: int) -> Float32:
        return widen_bf16(np.ascontiguousarray(rows[:, : 2 * k]).view("<u2"))


class QuantizedRows(RowFormat):
    """4 bits, asymmetric, or 8 bits, symmetric."""

    def __init__(self, bits: int) -> None:
        self.name = f"int{bits}"
        self.bits = bits

    def row_bytes(self, k: int) -> int:
        return row_head_bytes(k, self.bits) + row_line_bytes(k, self.bits)

    def encode(self, w: Float32, out: Bytes) -> None:
        encode_rows(w, self.bits, out)

    def decode(self, rows: Bytes, k: int) -> Float32:
        lines, groups = row_head_bytes(k, self.bits), -(-k // ROW_GROUP)
        codes = rows[:, lines:].reshape(len(rows), -1, 1, 16, 4)  # line, half, i, b
        if self.bits == 4:
            codes = np.concatenate((codes & 15, codes >> 4), axis=2)
            pairs = rows[:, :lines].reshape(2 * len(rows), -1)[:, : 2 * groups]
            head = widen_bf16(np.ascontiguousarray(pairs).view("<u2")).reshape(len(rows), 2, groups)
            scales, zeros = head[:, 0, :, None], head[:, 1, :, None]
        else:
            scales = np.ascontiguousarray(rows[:, : 4 * groups]).view("<f4")[..., None]
            zeros = np.full_like(scales, 128)
        q = codes.swapaxes(-1, -2).reshape(len(rows), -1, ROW_GROUP)[:, :groups].astype(np.float32)
        return np.ascontiguousarray(((q - zeros) * scales).reshape(len(rows), -1)[:, :k])
