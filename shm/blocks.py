"""The quantized formats: groups of weights that share a scale, in blocks of 16 interleaved outputs.

A matrix [N outputs, K inputs] is cut into groups of G inputs of one output; the last group of an output is
padded to G inputs, and N to a multiple of 16. A block is 16 outputs; blocks follow one another, and a block
is the records of its ceil(K / G) groups in order:

    | block 0: record of group 0 | record of group 1 | ... | block 1: record of group 0 | ...

A record holds 16 numbers per column, one for each output of its block ("lane"), so that one vector
instruction multiplies four inputs of all 16 outputs and no sum ever runs across lanes.

    int4 record, 64 + 8*G bytes; value = scale * (q - zero), q = 0..15, zero any bfloat16 number:

        byte 0            32               64
        | 16 scales, bf16 | 16 zeros, bf16 | G/8 times 64 bytes |

        the j-th 64 bytes; byte 4*i + b, lane i = 0..15, b = 0..3:
            low nibble: q of input 8*j + b          high nibble: q of input 8*j + 4 + b

    int2 record, 64 + 4*G bytes; as int4, q = 0..3, G a multiple of 16:

        | 16 scales, bf16 | 16 zeros, bf16 | G/16 times 64 bytes |

        the j-th 64 bytes; byte 4*i + b, bits 2*f and 2*f + 1, f = 0..3: q of input 16*j + 4*f + b

    int8 record, 64 + 16*G bytes; value = scale * (u - 128), u = 1..255:

        byte 0               64
        | 16 scales, float32 | G/4 times 64 bytes |

        the j-th 64 bytes; byte 4*i + b: u of input 4*j + b

Outputs that only pad have scale 0 and zero 0 (int2, int4) or scale 0 (int8), so they are exactly 0. Inputs
that only pad have q = 0 (int2, int4) or u = 128 (int8); a kernel's activations are 0 there.

    a tile of T channels (T a multiple of G):  | gate [T, H] | up [T, H] | down [H, T] |

Ungated experts have no gate; biases follow as in `shm/formats.py`.
Groups run along the axis that is summed over: hidden for gate and up, the tile's channels for down.
"""

from __future__ import annotations

from shm.formats import NO_HEAD, Bytes, Float32, TileFormat, there
from shm.quantize import HEAD_BYTES, LANES, encode_blocks

__all__ = ["HEAD_BYTES", "LANES", "BlockFormat", "Int2", "Int4", "Int8"]


class BlockFormat(TileFormat):
    """Base of the quantized formats: matrices of records."""

    def __init__(self, name: str, group: int, bits: int) -> None:
        self.name = name
        self.group = group
        self.bits = bits
        self.record_bytes = HEAD_BYTES + LANES * group * bits // 8

    @property
    def granularity(self) -> int:
        return self.group

    def matrix_bytes(self, n: int, k: int) -> int:
        """Bytes of a matrix of n outputs and k inputs."""
        return -(-n // LANES) * -(-k // self.group) * self.record_bytes

    def encode_matrix(self, w: Float32, out: Bytes) -> None:
        """Quantize w [n, k] (any strides) into out, uint8 [matrix_bytes(n, k)]. Raises WeightsUnusable."""
        encode_blocks(w, self.bits, self.group, out)

    def matrices_bytes(self, hidden: int, tile: int, matrices: int = 3) -> int:
        if tile % self.group:
            raise ValueError(f"a tile of {self.name} needs a multiple of {self.group} channels, not {tile}")
        return (matrices - 1) * self.matrix_bytes(tile, hidden) + self.matrix_bytes(hidden, tile)

    def encode(
        self, gate: Float32 | None, up: Float32, down: Float32, out: Bytes, head: Bytes = NO_HEAD
    ) -> None:
        start = 0
        for w in there(gate, up, down.T):
            size = self.matrix_bytes(*w.shape)
            self.encode_matrix(w, out[start : start + size])
            start += size


class Int8(BlockFormat):
    """8 bits, symmetric, a float32 scale per group."""

    def __init__(self, group: int = 128) -> None:
        super().__init__("int8" if group == 128 else f"int8-g{group}", group, bits=8)


class Int4(BlockFormat):
    """4 bits, two codes in a byte; asymmetric, a bfloat16 scale and zero per group."""

    def __init__(self, group: int) -> None:
        super().__init__("int4" if group == 64 else f"int4-g{group}", group, bits=4)


class Int2(BlockFormat):
    """2 bits, four codes in a byte; else as Int4."""

    def __init__(self, group: int) -> None:
        super().__init__("int2" if group == 64 else f"int2-g{group}", group, bits=2)
