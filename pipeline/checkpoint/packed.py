"""Quantized matrices as safetensors checkpoints have them, each in several tensors, read as one matrix.

    AWQ                 qweight I32 [K, N/8], outputs of a word in the order 0 2 4 6 1 3 5 7; qzeros I32
                        [groups, N/8] alike; scales [groups, N]: scale * (q - zero)
    GPTQ                qweight I32 [K*b/32, N], inputs of a word in order; qzeros I32 [groups, N*b/32], in
                        version 1 less 1; scales [groups, N]; g_idx I32 [K], the group of each input
    compressed-tensors  weight_packed I32 [N, K*b/32] (int) or weight I8 [N, K]; weight_scale [N, groups];
                        weight_zero_point I32 [N*b/32, groups] or I8 [N, groups]
    FP8                 weight F8_E4M3 [N, K]; a scale for each block, group, output, or one
    MXFP4               two codes in a byte, U8 [N, K/2] or [N, K/32, 16], the first in the low bits; E8M0
                        scales U8 [N, K/32]
    NVFP4               the same, scales F8_E4M3 [N, K/16], and one F32 scale of the matrix

Words are little endian, their first number in the low bits. N outputs, K inputs; FP8 and MXFP4 may have all
experts of a layer in one tensor. A matrix answers with its codes where a native format keeps them without
loss, and with numbers otherwise: another group, or order of inputs, or zero, or scales beyond binary16.
`quantized.py` finds these matrices in headers and has checked the shapes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipeline.checkpoint.headers import TensorEntry
from pipeline.errors import ModelError
from shm.codes import E4M3, E8M0, Codes
from shm.fp8 import BLOCK
from shm.layout import Bytes, Float32

Numbers = NDArray[Any]
Read = Callable[[TensorEntry, int, int], Numbers]  # places [lo, hi) of a tensor's first axis
Matrix = Codes | Float32

NATIVE_GROUPS = {128: "int4-f16-g128", 64: "int4-f16", 32: "int4-f16-g32"}
AWQ_ORDER = (0, 2), (4, 6), (1, 3), (5, 7)  # the outputs of each byte of a word
UNCHECKED: Any = {"invalid": "ignore", "over": "ignore"}  # numbers that are not finite: their encoder refuses
TRANSPOSED = 16  # rows of words that are transposed at a time: those of a line of 64 bytes


@dataclass(frozen=True)
class Packed(ABC):
    """A quantized matrix, or those of all experts of a layer."""

    shape: tuple[int, ...]  # as a checkpoint that is not quantized has it
    weight: TensorEntry
    scale: TensorEntry

    whole: ClassVar[bool] = False  # it can only be read as a whole
    transposed: ClassVar[bool] = False  # it has the matrix [K, N], and answers with [N, K]

    @property
    def outputs(self) -> int:
        return self.shape[-1 if self.transposed else -2]

    @property
    def inputs(self) -> int:
        return self.shape[-2 if self.transposed else -1]

    @property
    @abstractmethod
    def kind(self) -> str:
        """For the user."""

    @property
    @abstractmethod
    def format(self) -> str | None:
        """The native format of its codes, if the numbers in its file are as usual; else None."""

    @abstractmethod
    def rows(self, read: Read, lo: int, hi: int, place: int | None = None) -> Matrix:
        """Rows [lo, hi) of the matrix, or of that at this place of the first axis."""


@dataclass(frozen=True)
class Integers(Packed):
    """Codes of `bits` bits; groups of inputs share a scale, and perhaps a zero."""

    zeros: TensorEntry | None
    bits: int
    group: int
    usual: bool  # inputs in order, and 8 bits are symmetric

    method: ClassVar[str]

    @property
    def kind(self) -> str:
        return f"{self.method}int{self.bits}"

    @property
    def format(self) -> str | None:
        return integer_format(self.bits, self.group) if self.usual else None


@dataclass(frozen=True)
class Awq(Integers):
    whole, method = True, "AWQ "

    def rows(self, read: Read, lo: int, hi: int, place: int | None = None) -> Matrix:
        assert self.zeros is not None
        groups = self.scale.shape[0]
        codes = _awq_outputs(read(self.weight, 0, self.weight.shape[0]))
        zeros = _awq_outputs(read(self.zeros, 0, groups))
        scales = _float32(self.scale, read(self.scale, 0, groups)).T
        return of_integers(codes, scales, zeros, self.group, self.bits)[lo:hi]


@dataclass(frozen=True)
class Gptq(Integers):
    whole, method = True, "GPTQ "
    offset: int  # what a stored zero lacks: 1 in version 1
    order: TensorEntry | None  # the group of each input

    def rows(self, read: Read, lo: int, hi: int, place: int | None = None) -> Matrix:
        assert self.zeros is not None
        inputs, groups = self.shape[1], self.scale.shape[0]
        codes = _numbers(_transposed(read(self.weight, 0, self.weight.shape[0])), self.bits)
        zeros = _numbers(read(self.zeros, 0, groups), self.bits).T.astype(np.uint16) + np.uint16(self.offset)
        scales = _float32(self.scale, read(self.scale, 0, groups)).T
        if self.order is not None:
            order = read(self.order, 0, inputs)
            if order.min() < 0 or order.max() >= groups:
                raise ModelError(f"{self.order.file} is damaged: a g_idx is not one of {groups} groups")
            if not np.array_equal(order, np.arange(inputs) // self.group):
                numbers: Float32 = codes.astype(np.float32)
                numbers -= zeros[:, order]
                with np.errstate(**UNCHECKED):
                    numbers *= scales[:, order]
                return numbers[lo:hi]
        return of_integers(codes, scales, zeros, self.group, self.bits)[lo:hi]


@dataclass(frozen=True)
class PackedIntegers(Integers):
    """Integers of compressed-tensors, in words or, where they have 8 bits, as signed bytes."""

    method = ""

    def rows(self, read: Read, lo: int, hi: int, place: int | None = None) -> Matrix:
        inputs, middle = self.shape[1], 1 << self.bits - 1
        stored = read(self.weight, lo, hi)
        if self.weight.dtype == "I8":
            codes = stored.view(np.uint8) ^ np.uint8(128)
        else:
            codes = _numbers(stored, self.bits)[:, :inputs]
        scales = _scales(self.scale, read, lo, hi)
        zeros: Numbers = np.full((1, 1), middle, np.uint16)
        if self.zeros is not None and self.zeros.dtype == "I8":
            zeros = (_scales(self.zeros, read, lo, hi) + middle).astype(np.uint16)
        elif self.zeros is not None:
            words, each = self.zeros.shape[0], 32 // self.bits
            first, last = lo // each, min(words, -(-hi // each))
            packed = read(self.zeros, first, last)
            zeros = _numbers(packed.T.copy(), self.bits).T[lo - first * each : hi - first * each]
        return of_integers(codes, scales, zeros, self.group, self.bits)


@dataclass(frozen=True)
class Fp8(Packed):
    """E4M3 codes; blocks share a scale."""

    block: tuple[int, int]  # rows and columns

    @property
    def kind(self) -> str:
        return "FP8"

    @property
    def format(self) -> str | None:
        rows, columns = self.shape[-2:]
        fits = all(
            step % BLOCK == 0 or step >= size for step, size in zip(self.block, (rows, columns), strict=True)
        )
        return "fp8" if fits else None

    def rows(self, read: Read, lo: int, hi: int, place: int | None = None) -> Matrix:
        high, wide = self.block
        codes = _rows(self.weight, read, lo, hi, place)
        columns = codes.shape[1]
        first, last = lo // high, -(-hi // high)
        if self.scale.shape and self.scale.shape != (1,):
            stored = _rows(self.scale, read, first, last, place)
        else:
            stored = read(self.scale, 0, 1)
        of_blocks = _float32(self.scale, stored).reshape(-1, -(-columns // wide))
        scales = of_blocks[np.arange(lo, hi) // high - first]  # of rows
        if self.format is not None:
            each = np.arange(-(-columns // BLOCK)) * BLOCK // wide
            return Codes("fp8", codes, np.ascontiguousarray(scales[:, each]))
        numbers = E4M3.take(codes)
        numbers *= scales.repeat(wide, axis=1)[:, :columns]
        return numbers


@dataclass(frozen=True)
class Fp4(Packed):
    """E2M1 codes, two in a byte; 32 inputs share an E8M0 scale, or 16 an E4M3 scale, beside one of the whole
    matrix."""

    factor: TensorEntry | None
    inverse: bool  # the whole matrix is divided by its factor

    @property
    def kind(self) -> str:
        return "MXFP4" if self.factor is None else "NVFP4"

    @property
    def format(self) -> str | None:
        return self.kind.lower()

    def rows(self, read: Read, lo: int, hi: int, place: int | None = None) -> Matrix:
        stored = _rows(self.weight, read, lo, hi, place)
        codes = _nibbles(stored.reshape(len(stored), self.inputs // 2))
        scales = _rows(self.scale, read, lo, hi, place).view(np.uint8)
        if self.factor is None:
            return Codes("mxfp4", codes, scales)
        factor = _float32(self.factor, read(self.factor, 0, 1)).reshape(-1)[0]
        if not 0 < factor < np.inf:
            raise ModelError(f"{self.factor.file} is damaged: the scale of a whole matrix is {factor}")
        return Codes("nvfp4", codes, scales, factor=float(1 / factor if self.inverse else factor))


@dataclass(frozen=True)
class TransposedFp4(Fp4):
    """Fp4 of families whose experts' matrices are [K, N] where they are not quantized."""

    transposed = True


# --- integers ---------------------------------------------------------------------------------------------


def integer_format(bits: int, group: int) -> str | None:
    """The native format of symmetric 8-bit codes, or of 4-bit ones, with such groups."""
    if bits == 8:
        return None if group % 32 else "q8_0"
    return next((name for native, name in NATIVE_GROUPS.items() if group % native == 0), None)


def of_integers(codes: Bytes, scales: Float32, zeros: Numbers, group: int, bits: int) -> Matrix:
    """scale * (code - zero); codes [n, k]; scales and zeros [n or 1, groups or 1]."""
    rows, inputs = codes.shape
    name = integer_format(bits, group)
    with np.errstate(over="ignore"):
        half = scales.astype(np.float16)
    least, most = (128, 128) if bits == 8 else (0, 16)
    kept = np.isfinite(half).all() and np.array_equal(half.astype(np.float32), scales)
    if name is not None and kept and np.all((least <= zeros) & (zeros <= most)):
        native = 32 if bits == 8 else next(n for n, found in NATIVE_GROUPS.items() if found == name)
        groups = np.arange(-(-inputs // native)) * native // group

        def each(of_groups: Numbers) -> Numbers:
            spread = np.broadcast_to(of_groups, (rows, of_groups.shape[1]))
            return spread.take(groups if of_groups.shape[1] > 1 else groups * 0, axis=1)

        of_codes = None if bits == 8 else each(zeros.astype(np.uint8))
        return Codes(name, codes, each(half.view(np.uint16)), of_codes)

    def over(of_groups: Numbers) -> Numbers:
        return of_groups.repeat(group, axis=1)[:, :inputs] if of_groups.shape[1] > 1 else of_groups

    numbers: Float32 = codes.astype(np.float32)
    numbers -= over(zeros.astype(np.float32))
    with np.errstate(**UNCHECKED):
        numbers *= over(scales)
    return numbers


def _awq_outputs(words: NDArray[np.int32]) -> Bytes:
    """[rows, N/8] to [N, rows]."""
    turned = _transposed(words)
    codes = np.empty((turned.shape[0], 8, turned.shape[1]), np.uint8)
    stored = turned.view(np.uint8).reshape(*turned.shape, 4)
    for byte, (low, high) in enumerate(AWQ_ORDER):
        np.bitwise_and(stored[..., byte], 15, out=codes[:, low])
        np.right_shift(stored[..., byte], 4, out=codes[:, high])
    return codes.reshape(-1, turned.shape[1])


def _numbers(words: NDArray[np.int32], bits: int) -> Bytes:
    """[rows, n] words, contiguous, to [rows, n * 32 / bits]."""
    stored = words.view(np.uint8)
    return stored if bits == 8 else _nibbles(stored)


def _nibbles(stored: Bytes) -> Bytes:
    """[rows, n] to [rows, 2 n], the low bits first."""
    codes = np.empty((*stored.shape, 2), np.uint8)
    np.bitwise_and(stored, 15, out=codes[..., 0])
    np.right_shift(stored, 4, out=codes[..., 1])
    return codes.reshape(len(stored), 2 * stored.shape[1])


def _transposed(words: NDArray[np.int32]) -> NDArray[np.int32]:
    """Contiguous."""
    turned = np.empty(words.shape[::-1], words.dtype)
    for at in range(0, len(words), TRANSPOSED):
        turned[:, at : at + TRANSPOSED] = words[at : at + TRANSPOSED].T
    return turned


# --- tensors ----------------------------------------------------------------------------------------------


def _rows(entry: TensorEntry, read: Read, lo: int, hi: int, place: int | None) -> Numbers:
    """Rows of a tensor, or of its matrix at this place."""
    return read(entry, lo, hi) if place is None else read(entry, place, place + 1)[0][lo:hi]


def _scales(entry: TensorEntry, read: Read, lo: int, hi: int) -> Float32:
    """Returns the rows' factors [hi - lo or 1, groups or 1], whether each row has some or all the same."""
    one = not entry.shape or entry.shape[0] == 1
    stored = read(entry, 0, 1) if one else read(entry, lo, hi)
    return _float32(entry, stored.reshape(len(stored), entry.shape[1] if len(entry.shape) == 2 else 1))


def _float32(entry: TensorEntry, stored: Numbers) -> Float32:
    """The values of stored numbers, exact."""
    if entry.dtype == "BF16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if entry.dtype == "F8_E4M3":
        return E4M3.take(stored)
    if entry.dtype in ("U8", "F8_E8M0"):
        return E8M0.take(stored)
    return stored.astype(np.float32)
