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

Formats of files, which keep their codes without loss (`shm/codes.py` says what a code means). A record holds
the scales of each of its groups for 16 outputs, then lines of codes packed as int4's or int8's:

    record          inputs   bytes     head
    q4_0            32       288       | 16 scales, binary16 |
    q8_0            32       544       | 16 scales, binary16 |
    mxfp4           64       544       | 16 scales, E8M0 | 16 scales of the second 32 inputs |
    nvfp4           32       288       | 16 scales, E4M3 | 16 scales of the second 16 inputs |
    int4-f16[-gG]   G        64 + 8*G  | 16 scales, binary16 | 16 zeros, bf16 |

nvfp4 has a float32 factor of each matrix, too. A tile has one line of 64 bytes behind its matrices, at a
multiple of 64, with their factors in the matrices' order; a matrix of the backbone one behind its blocks:

    | gate [T, H] | up [T, H] | down [H, T] | factors of gate, up and down, float32, zeros |

Outputs that only pad have scale 0 and zero 0 (int2, int4) or scale 0 (int8), so they are exactly 0. Inputs
that only pad have q = 0 (int2, int4) or u = 128 (int8); a kernel's activations are 0 there.

    a tile of T channels (T a multiple of G):  | gate [T, H] | up [T, H] | down [H, T] |

Ungated experts have no gate; biases follow as in `shm/formats.py`.
Groups run along the axis that is summed over: hidden for gate and up, the tile's channels for down.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from shm.codes import CODE_FORMATS, Codes, largest_factor, rounded
from shm.expert_math import ExpertMath
from shm.formats import LINE, NO_HEAD, Bytes, Float32, MatrixFormat, round_to_bf16, there, whole_lines
from shm.quantize import HEAD_BYTES, LANES, encode_blocks

__all__ = ["HEAD_BYTES", "LANES", "BlockFormat", "FileFormat", "Int2", "Int4", "Int8", "Scales"]

SCALES_BYTES = 32  # of 16 outputs in a record of files' formats
BF16_BYTES = round_to_bf16(np.arange(256, dtype=np.float32))  # bit patterns of all bytes' numbers


class Scales(IntEnum):
    """The kind of a record's head; the numbers are those of the C kernels."""

    OWN = 0  # of int2, int4 and int8
    F16 = 1  # binary16
    F16_ZEROS = 2  # binary16, and zeros in bfloat16
    E8M0 = 3
    E4M3 = 4


class BlockFormat(MatrixFormat):
    """Base of the quantized formats: matrices of records."""

    scales = Scales.OWN

    def __init__(self, name: str, group: int, bits: int, inputs: int = 0, head: int = HEAD_BYTES) -> None:
        """`inputs`: of a record, one or more groups, 0: one; `head`: bytes of its scales and zeros."""
        self.name = name
        self.group = group  # inputs that share a scale, also of a kernel's activations
        self.bits = bits
        self.inputs = inputs or group
        self.record_head = head
        self.record_bytes = head + LANES * self.inputs * bits // 8

    @property
    def granularity(self) -> int:
        return self.inputs

    def blocks_bytes(self, n: int, k: int) -> int:
        """Bytes of the blocks of n outputs and k inputs."""
        return -(-n // LANES) * -(-k // self.inputs) * self.record_bytes

    def matrix_bytes(self, n: int, k: int) -> int:
        """Bytes of a matrix of n outputs and k inputs that is in no tile: its blocks, and its factor."""
        size = self.blocks_bytes(n, k)
        return whole_lines(size) + LINE if self.factors else size

    def encode_matrix(self, w: Float32 | Codes, out: Bytes) -> None:
        """Write w [n, k] (any strides) into out, uint8 [matrix_bytes(n, k)]: codes of this format without
        loss, and else quantized. Raises WeightsUnusable."""
        if isinstance(w, Codes) and w.format != self.name:
            w = w.values()
        size, factor = self.blocks_bytes(*w.shape), self.factor_of(w)
        self.encode_part(w, out[:size], factor)
        self._put_factors(out, size, factor)

    def encode_part(self, w: Float32 | Codes, out: Bytes, factor: float = 1.0) -> None:
        """Write some rows w [n, k] of a matrix with this factor into their blocks, uint8 [blocks_bytes(n,
        k)]: codes of this format, which have their own factor, without loss, and else quantized. Raises
        WeightsUnusable."""
        encode_blocks(w.values() if isinstance(w, Codes) else w, self.bits, self.group, out)

    def factor_of(self, w: Float32 | Codes) -> float:
        """The factor of codes of this format, of a matrix that is quantized, or of one with the same largest
        magnitude; 1 where the format has none."""
        if isinstance(w, Codes):
            return w.factor
        return largest_factor(float(np.abs(w).max())) if self.factors else 1.0

    def matrices_bytes(self, hidden: int, tile: int, matrices: int = 3) -> int:
        size = self._tile_blocks(hidden, tile, matrices)
        return whole_lines(size) + LINE if self.factors else size

    def beside_matrices(self, data: Bytes, hidden: int, tile: int, math: ExpertMath) -> Bytes:
        return data[None, self._tile_blocks(hidden, tile, math.matrices) :]

    def _tile_blocks(self, hidden: int, tile: int, matrices: int) -> int:
        if tile % self.inputs:
            raise ValueError(f"a tile of {self.name} needs a multiple of {self.inputs} channels, not {tile}")
        return (matrices - 1) * self.blocks_bytes(tile, hidden) + self.blocks_bytes(hidden, tile)

    def factors_of(self, data: Bytes) -> Float32:
        """The factors behind a matrix uint8 [matrix_bytes], or a tile's matrices uint8 [matrices_bytes]: a
        view float32 [16], of which the first are used."""
        return data[len(data) - LINE :].view("<f4")

    def encode(
        self, gate: Float32 | None, up: Float32, down: Float32, out: Bytes, head: Bytes = NO_HEAD
    ) -> None:
        matrices = there(gate, up, down.T)
        self.encode_tile(matrices, [self.factor_of(w) for w in matrices], out)

    def encode_tile(self, matrices: Sequence[Float32], factors: Sequence[float], out: Bytes) -> None:
        """Write a tile's matrices, as `encode`, but down [H, T], with the factors of the matrices that they
        are parts of."""
        start = 0
        for w, factor in zip(matrices, factors, strict=True):
            size = self.blocks_bytes(*w.shape)
            self.encode_part(w, out[start : start + size], factor)
            start += size
        self._put_factors(out, start, *factors)

    def _put_factors(self, out: Bytes, blocks: int, *factors: float) -> None:
        """Write the factors of matrices whose blocks are the first bytes of `out`, where the format has
        them."""
        if self.factors:
            end = whole_lines(blocks) + LINE
            out[blocks:end] = 0
            self.factors_of(out[:end])[: len(factors)] = factors


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


class FileFormat(BlockFormat):
    """A format of files, whose codes it keeps without loss."""

    def __init__(self, name: str, scales: Scales) -> None:
        kind = CODE_FORMATS[name]
        groups = 2 if kind.scales is not None else 1  # of a record
        head = HEAD_BYTES if kind.zeros else HEAD_BYTES // 2
        bits = 4 if len(kind.values) == 16 else 8
        super().__init__(name, kind.group, bits, groups * kind.group, head)
        self.scales = scales
        self.factors = name == "nvfp4"

    def encode_part(self, w: Float32 | Codes, out: Bytes, factor: float = 1.0) -> None:
        if not isinstance(w, Codes) or w.format != self.name:
            numbers = w.values() if isinstance(w, Codes) else w
            if self.scales is Scales.F16_ZEROS:
                encode_blocks(numbers, self.bits, self.group, out, half=True)
                return
            w = rounded(numbers, self.name, factor)
        w.check()
        n, k = w.shape
        blocks, records, groups = -(-n // LANES), -(-k // self.inputs), self.inputs // self.group
        w = w.padded(blocks * LANES, records * self.inputs)
        of = out.reshape(blocks, records, self.record_bytes)
        scales = w.scales.reshape(blocks, LANES, records, groups).transpose(0, 2, 3, 1)
        of[..., :SCALES_BYTES].view(scales.dtype).reshape(blocks, records, groups, LANES)[:] = scales
        if w.zeros is not None:
            zeros = BF16_BYTES.take(w.zeros.reshape(blocks, LANES, records).transpose(0, 2, 1))
            of[..., SCALES_BYTES : self.record_head].view(np.uint16)[:] = zeros
        # Four codes at a time: they stay next to each other.
        words = np.ascontiguousarray(w.codes).view(np.uint32)
        if self.bits == 4:
            words = words[:, ::2] | words[:, 1::2] << np.uint32(4)
        lines = of[..., self.record_head :].view(np.uint32).reshape(blocks, records, -1, LANES)
        lines[:] = words.reshape(blocks, LANES, records, -1).transpose(0, 2, 3, 1)


FILE_FORMATS = (
    FileFormat("q4_0", Scales.F16),
    FileFormat("q8_0", Scales.F16),
    FileFormat("mxfp4", Scales.E8M0),
    FileFormat("nvfp4", Scales.E4M3),
    FileFormat("int4-f16-g32", Scales.F16_ZEROS),
    FileFormat("int4-f16", Scales.F16_ZEROS),
    FileFormat("int4-f16-g128", Scales.F16_ZEROS),
)
