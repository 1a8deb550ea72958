"""Rows of a matrix as a quantized file has them: codes, and the scales of groups along a row.

    format           group   value of a code                               codes   bits of a scale
    q4_0             32      scale * (q - 8)                               0..15   binary16
    q8_0             32      scale * (u - 128)                             0..255  binary16
    mxfp4            32      scale * E2M1[q]                               0..15   E8M0
    nvfp4            16      (factor * scale) * E2M1[q]                    0..15   E4M3
    int4-f16-g32     32      scale * (q - zero), zero 0..16 of each group  0..15   binary16
    int4-f16         64      the same
    int4-f16-g128    128     the same
    fp8              128     scale * E4M3[q]                               0..255  a float32 number

Files have u - 128 of `q8_0` as an int8. E2M1 and E4M3 are a sign, exponent and mantissa in 4 and 8 bits, E8M0
is a power of two (OCP Microscaling Formats, 1.0). `shm/blocks.py` says how a store keeps these codes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shm.errors import WeightsUnusable
from shm.formats import Bytes, Float32
from shm.quantize import UNUSABLE

SIGN = np.array((1, -1), np.float32)[:, None]
E2M1: Float32 = (SIGN * np.array((0, 0.5, 1, 1.5, 2, 3, 4, 6), np.float32)).ravel()
# 2^(e - 127), of which the first is below the normal numbers; 255 is not a number.
E8M0: Float32 = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))


def _e4m3() -> Float32:
    """4 bits of an exponent with bias 7, 3 of a mantissa; there is no infinity, and 127 is not a number."""
    exponent, mantissa = np.divmod(np.arange(128), 8)
    values = np.where(exponent > 0, 8 + mantissa, mantissa) * 2.0 ** (np.maximum(exponent, 1) - 10)
    values[127] = np.nan
    return (SIGN * values.astype(np.float32)).ravel()


E4M3: Float32 = _e4m3()
LARGEST = 2.0**120  # a weight beyond, infinite or not a number is refused, as in `quantize.c`
SMALLEST = 2.0**-120  # a group with smaller steps is all zeros


class CodeFormat(NamedTuple):
    """The meaning of a format's codes and scales."""

    group: int  # consecutive numbers of a row that share a scale
    values: Float32  # of the codes, before their scale: [16] or [256]
    scales: Float32 | None = None  # of the 8 bits of a scale, [256]; None: they are numbers
    bits: type[np.generic] = np.uint8  # a scale's type: uint16 are the bits of binary16
    zeros: bool = False  # groups have a code that means 0, which is taken from `values`
    zero: int = 0  # else the code that means 0


_NIBBLES: Float32 = np.arange(16, dtype=np.float32)
CODE_FORMATS = {
    "q4_0": CodeFormat(32, _NIBBLES - 8, bits=np.uint16, zero=8),
    "q8_0": CodeFormat(32, np.arange(-128, 128, dtype=np.float32), bits=np.uint16, zero=128),
    "mxfp4": CodeFormat(32, E2M1, E8M0),
    "nvfp4": CodeFormat(16, E2M1, E4M3),
    "int4-f16-g32": CodeFormat(32, _NIBBLES, bits=np.uint16, zeros=True),
    "int4-f16": CodeFormat(64, _NIBBLES, bits=np.uint16, zeros=True),
    "int4-f16-g128": CodeFormat(128, _NIBBLES, bits=np.uint16, zeros=True),
    "fp8": CodeFormat(128, E4M3, bits=np.float32),
}
AT_ONCE = 1 << 16  # numbers whose codes become indices of 8 bytes: those of a whole table take gigabytes
# Formats whose codes, less the one that means 0, q8_0 has too; their groups are one of its own or several.
IN_Q8_0 = frozenset(("q4_0", "q8_0", "int4-f16-g32", "int4-f16", "int4-f16-g128"))
LARGEST_CODES = {name: float(np.nanmax(np.abs(kind.values))) for name, kind in CODE_FORMATS.items()}


def format_of_all(formats: Collection[str]) -> str | None:
    """The format that keeps codes of each of these formats without loss; None where there is none."""
    if len(formats) == 1:
        return next(iter(formats))
    return "q8_0" if formats and IN_Q8_0.issuperset(formats) else None


@dataclass(frozen=True)
class Codes:
    """Rows of a matrix as a quantized file has them. Arrays may have any strides."""

    format: str  # the name in CODE_FORMATS, and of the format that keeps them without loss
    codes: Bytes  # [n, k], one a byte
    scales: NDArray[Any]  # [n, ceil(k / group)]: bit patterns uint16 or uint8; of fp8 float32 numbers
    zeros: Bytes | None = None  # [n, ceil(k / group)], the code that means 0, of int4-f16 only
    factor: float = 1.0  # float32, of the whole matrix; of nvfp4 only

    @property
    def kind(self) -> CodeFormat:
        return CODE_FORMATS[self.format]

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's rows and columns."""
        return self.codes.shape

    def __post_init__(self) -> None:
        n, k = self.codes.shape
        groups = (n, -(-k // self.kind.group))
        wrong = self.codes.dtype != np.uint8 or self.scales.dtype != self.kind.bits
        if wrong or self.scales.shape != groups:
            raise ValueError(f"these are no {n} x {k} codes of {self.format}")
        if self.factor != 1 and self.format != "nvfp4":
            raise ValueError(f"codes of {self.format} have no factor")
        if self.kind.zeros != (self.zeros is not None and self.zeros.shape == groups):
            raise ValueError(f"these zeros are none of {n} x {k} codes of {self.format}")

    def __getitem__(self, rows: Any) -> Codes:
        """The rows of a slice, or of an array of indices."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], zeros=zeros)

    def kept_in(self, format: str) -> Codes | None:
        """The same numbers as codes of this format; None where it does not keep them without loss."""
        if self.format == format:
            return self
        if format != "q8_0" or self.format not in IN_Q8_0:
            return None
        k, group = self.codes.shape[1], CODE_FORMATS["q8_0"].group
        if self.zeros is None:
            codes = self.codes + np.uint8(128 - self.kind.zero)
        else:
            codes = self.codes + (np.uint8(128) - self.zeros).repeat(self.kind.group, axis=1)[:, :k]
        scales = self.scales.repeat(self.kind.group // group, axis=1)[:, : -(-k // group)]
        return Codes("q8_0", codes, scales)

    def rows(self, lo: int, hi: int) -> Codes:
        """Rows [lo, hi), views; those past the last are left out."""
        return self[lo:hi]

    def columns(self, lo: int, hi: int) -> Codes:
        """Columns [lo, hi), views; those past the last are left out. Raises ValueError where `lo`, or `hi`
        before the last column, is within a group."""
        group, k = self.kind.group, self.codes.shape[1]
        if lo % group or (hi < k and hi % group):
            raise ValueError(f"columns {lo} to {hi} are no whole groups of {group}")
        of_groups = slice(lo // group, -(-hi // group))
        zeros = None if self.zeros is None else self.zeros[:, of_groups]
        return replace(self, codes=self.codes[:, lo:hi], scales=self.scales[:, of_groups], zeros=zeros)

    def padded(self, n: int, k: int) -> Codes:
        """Padded below and to the right to this shape, with scales, and codes, that mean 0."""
        if self.codes.shape == (n, k):
            return self
        codes = np.full((n, k), self.kind.zero, np.uint8)
        codes[: len(self.codes), : self.codes.shape[1]] = self.codes
        zeros = None if self.zeros is None else self._padded_groups(self.zeros, n, k)
        return replace(self, codes=codes, scales=self._padded_groups(self.scales, n, k), zeros=zeros)

    def _padded_groups(self, of_groups: NDArray[Any], n: int, k: int) -> NDArray[Any]:
        rows, groups = of_groups.shape
        return np.pad(of_groups, ((0, n - rows), (0, -(-k // self.kind.group) - groups)))

    def group_scales(self) -> Float32:
        """The scales' values, float32 [n, groups], times the factor."""
        if self.kind.scales is None:
            half = self.kind.bits == np.uint16
            return self.scales.view(np.float16).astype(np.float32) if half else self.scales
        scales = self.kind.scales.take(self.scales)
        return scales if self.factor == 1 else scales * np.float32(self.factor)

    def values(self) -> Float32:
        """The numbers that the file means, float32 [n, k], contiguous."""
        n, k = self.codes.shape
        numbers = np.empty((n, k), np.float32)
        step = max(1, AT_ONCE // max(k, 1))
        for lo in range(0, n, step):
            self[lo : lo + step]._write_values(numbers[lo : lo + step])
        return numbers

    def _write_values(self, numbers: Float32) -> None:
        n, k = self.codes.shape
        self.kind.values.take(self.codes, out=numbers, mode="clip")  # other modes copy
        scales = self.group_scales()
        groups = n, k // self.kind.group, self.kind.group
        parts = numbers if k % self.kind.group else numbers.reshape(groups)

        def each(of_groups: NDArray[Any]) -> NDArray[Any]:
            return (
                of_groups[..., None] if parts.ndim == 3 else of_groups.repeat(self.kind.group, axis=1)[:, :k]
            )

        with np.errstate(invalid="ignore", over="ignore"):  # infinite: whoever reads them refuses them
            if self.zeros is not None:
                parts -= each(self.zeros.astype(np.float32))
            parts *= each(scales)

    def check(self) -> None:
        """Raises WeightsUnusable where a number could be infinite, not a number, or beyond 2^120."""
        with np.errstate(invalid="ignore", over="ignore"):
            largest = np.abs(self.group_scales()).max(initial=0) * LARGEST_CODES[self.format]
        if not largest < LARGEST:
            raise WeightsUnusable(
                "some scales are infinite, not a number, or beyond 1e36: they cannot be kept"
            )


# --- from numbers ----------------------------------------------------------------------------------------

E2M1_LARGEST, E4M3_LARGEST = 6.0, 448.0
E2M1_MIDDLES = (E2M1[:7] + E2M1[1:8]) / 2
E4M3_MIDDLES = (E4M3[:126] + E4M3[1:127]) / 2


def largest_factor(largest: float) -> float:
    """nvfp4's factor of a matrix with this largest magnitude, whose group then has the largest scale."""
    return float(np.float32(largest / (E2M1_LARGEST * E4M3_LARGEST))) or 1.0


def rounded(w: Float32, format: str, factor: float = 1.0) -> Codes:
    """Numbers w [n, k], any strides, rounded to codes of a format without zeros, each group with the scale of
    its largest magnitude: as llama.cpp does (q4_0, q8_0, mxfp4), nvfp4 with this `factor`. Raises
    WeightsUnusable where one is not finite, or too large for the format."""
    kind = CODE_FORMATS[format]
    n, k = w.shape
    groups = np.pad(w, ((0, 0), (0, -k % kind.group))).reshape(n, -(-k // kind.group), kind.group)
    size = np.abs(groups)
    most = size.max(axis=-1)
    if not most.max(initial=0) < LARGEST:
        raise WeightsUnusable(UNUSABLE.format("1e36"))
    steps: Float32
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        if format == "q4_0":  # the code 0, of -8 steps, is that of the largest magnitude
            at = size.argmax(axis=-1)[..., None]
            steps = np.take_along_axis(groups, at, axis=-1)[..., 0] / np.float32(-8)
            codes = (_divided(groups, steps) + np.float32(8.5)).astype(np.uint8).clip(max=15)
        elif format == "q8_0":
            steps = most / np.float32(127)
            exact = _divided(size, steps)
            whole = np.floor(exact)
            whole += exact - whole >= 0.5
            codes = (np.copysign(whole, groups) + 128).astype(np.uint8)
        else:
            bits = _exponents(most) if format == "mxfp4" else _e4m3_bits(most / (E2M1_LARGEST * factor))
            table = E8M0 if format == "mxfp4" else E4M3
            steps = table.take(bits) * np.float32(factor)
            codes = _nearest_e2m1(_divided(groups, steps))
        scales = steps.astype(np.float16).view(np.uint16) if kind.scales is None else bits
    return Codes(format, codes.reshape(n, -1)[:, :k], scales, factor=factor)


def _divided(groups: Float32, steps: Float32) -> Float32:
    """Numbers [n, groups, group] in units of their groups' steps [n, groups]."""
    inverse = np.where(np.abs(steps) < SMALLEST, np.float32(0), 1 / steps)
    numbers: Float32 = groups * inverse[..., None]
    return numbers


def _exponents(most: Float32) -> Bytes:
    """The E8M0 bits with which the largest magnitude of a group is 4 to 8 steps: beyond 6 it is 6."""
    exponents = np.frexp(most)[1] + (127 - 3)
    return np.where(most > 0, exponents.clip(0, 254), 0).astype(np.uint8)


def _e4m3_bits(numbers: Float32) -> Bytes:
    """The nearest bits of numbers that are not negative."""
    return E4M3_MIDDLES.searchsorted(numbers).astype(np.uint8)


def _nearest_e2m1(numbers: Float32) -> Bytes:
    """The nearest codes; of two, that of the smaller magnitude, as in llama.cpp."""
    size = np.abs(numbers)
    codes = np.zeros(numbers.shape, np.uint8)
    for middle in E2M1_MIDDLES:
        codes += size > middle
    return codes | ((numbers < 0) & (codes > 0)).view(np.uint8) << np.uint8(3)
