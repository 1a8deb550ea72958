"""The things that C kernels compute with: shape and format of weights, activations as they read them, the
structures of `c/kernels.h` for ctypes, what its functions return, and memory that a kernel keeps from call to
call."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shm.blocks import BlockFormat, Scales
from shm.expert_math import SWIGLU, ExpertMath, Glu, Relu2
from shm.floe import FloeFormat
from shm.formats import BF16, LINE, Bytes, Float32, MatrixFormat, TileFormat, whole_lines
from shm.fp8 import FP8
from shm.layout import StoreLayout


class Kept:
    """Scratch memory that is kept between calls, and grows to what is asked for."""

    def __init__(self) -> None:
        self.bytes: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._address = 0

    def reserve(self, size: int) -> int:
        """The address of the first `size` of `bytes`, at the beginning of a cache line; valid until the next
        call."""
        if size > len(self.bytes):
            raw = np.empty(size + LINE, np.uint8)
            start = -raw.ctypes.data % LINE
            self.bytes = raw[start : start + size]
            self._address = raw.ctypes.data + start
        return self._address


POINTER, SIZE = ctypes.c_void_p, ctypes.c_int64
BF16_BITS, FLOAT32_BITS, FP8_BITS = 16, 32, 64  # as C names the formats: fp8 has 8

Codes = NDArray[np.int8] | Float32


SWIGLU_KIND, GLU_KIND, RELU2_KIND = range(3)
GLU_NUMBERS = tuple(field.name for field in fields(Glu))


class Kind(ctypes.Structure):
    """An ExpertMath, and where biases are."""

    _fields_ = (
        ("kind", SIZE),
        ("biases", SIZE),
        *((name, ctypes.c_float) for name in (*GLU_NUMBERS, "unused")),
    )


class Weights(ctypes.Structure):
    """A matrix, or with `channels` tiles. `channel_bits`: of gate and down, where they lie by channel."""

    _fields_ = (
        *((name, SIZE) for name in ("bits", "scales", "group", "inputs", "outputs")),
        *((name, SIZE) for name in ("channels", "factors", "channel_bits", "tile_bytes")),
        ("math", Kind),
    )


@dataclass(frozen=True)
class Geometry:
    """A matrix [outputs, inputs] of any format without heads, or tiles of `channels` with H = inputs =
    outputs. Of a format whose gate and down lie by channel, `bits` and `group` are those of up."""

    format: TileFormat
    inputs: int
    outputs: int
    channels: int = 0
    math: ExpertMath = SWIGLU

    @classmethod
    def of_tiles(cls, layout: StoreLayout) -> Geometry:
        """The geometry of a store's tiles."""
        shape = layout.shape
        return cls(layout.format, shape.hidden, shape.hidden, shape.tile, shape.math)

    def __post_init__(self) -> None:
        if self.channels % self.format.granularity:
            raise ValueError(f"{self.channels} channels are no whole records of {self.format.granularity}")

    @property
    def bits(self) -> int:
        blocks = self._blocks
        if blocks is not None:
            return blocks.bits
        if isinstance(self.format, FP8):
            return FP8_BITS
        return BF16_BITS if isinstance(self.format, BF16) else FLOAT32_BITS

    @property
    def group(self) -> int:
        blocks = self._blocks
        return 1 if blocks is None else blocks.group

    @property
    def channel_bits(self) -> int:
        """Bits of gate and down, where they lie by channel; else 0."""
        return self.format.rows.bits if isinstance(self.format, FloeFormat) else 0

    @property
    def weights(self) -> Weights:
        """Returns the structure of C."""
        scales = Scales.OWN if self._blocks is None else self._blocks.scales
        sizes = self.bits, scales, self.group, self.inputs, self.outputs, self.channels
        return Weights(*sizes, self._factors, self.channel_bits, self.tile_bytes, self._kind)

    @property
    def _kind(self) -> Kind:
        activation = self.math.activation
        if isinstance(activation, Relu2):
            return Kind(RELU2_KIND, self.biases)
        kind = SWIGLU_KIND if activation == Glu() else GLU_KIND
        return Kind(kind, self.biases, *(getattr(activation, name) for name in GLU_NUMBERS))

    @property
    def biases(self) -> int:
        """Where biases are, in bytes from the beginning of a tile, or of a channel; 0: there are none."""
        if not self.math.bias:
            return 0
        if isinstance(self.format, FloeFormat):
            return self.format.channel_bytes(self.inputs)
        return whole_lines(self.format.matrices_bytes(self.inputs, self.channels, self.math.matrices))

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile that is matrices, with its biases; else 0."""
        if not self.channels or self.channel_bits:
            return 0
        return self.format.tile_bytes(self.inputs, self.channels, self.math)

    @property
    def padded(self) -> int:
        """Inputs in whole records."""
        record = 1 if self._blocks is None else self._blocks.inputs
        return -(-self.inputs // record) * record

    @property
    def matrix_bytes(self) -> int:
        """Bytes of a matrix [outputs, inputs]."""
        if isinstance(self.format, MatrixFormat):
            return self.format.matrix_bytes(self.outputs, self.inputs)
        return self.outputs * self.inputs * self.bits // 8

    @property
    def _factors(self) -> int:
        """Where the matrices' factors are, in bytes from the beginning of a tile, or of a matrix; 0: there are
        none."""
        if self._blocks is None or not self._blocks.factors:
            return 0
        if not self.channels:
            return self.matrix_bytes - LINE
        return self._blocks.matrices_bytes(self.inputs, self.channels, self.math.matrices) - LINE

    @property
    def _blocks(self) -> BlockFormat | None:
        format = self.format.up if isinstance(self.format, FloeFormat) else self.format
        return format if isinstance(format, BlockFormat) else None


@dataclass(frozen=True)
class Quantized:
    """Activations as a kernel reads them. Quantized formats: codes int8 [R, padded], factors float32
    [R, groups, 2]; bf16, f32, fp8: codes float32 [R, inputs], factors empty."""

    codes: Codes
    factors: Float32


FAULTS = {
    1: "a row outside x",
    2: "offsets that do not fit the rows",
    3: "an item outside the layer",
    4: "buffers too small",
    5: "a position outside the KV cache",
    6: "no such layer",
    7: "arrays larger than their memory",
    8: "an item's rows are not ascending",
    9: "a crash while it was computed",
    10: "a mask that its format does not have, or no mask at all",
    11: "a Work of another generation",
}
SMALL_BUFFERS = 4


class Matrix(ctypes.Structure):
    _fields_ = (("of", Weights), ("data", POINTER), ("bias", POINTER))


class Activations(ctypes.Structure):
    _fields_ = (("codes", POINTER), ("factors", POINTER))


class Host(ctypes.Structure):
    _fields_ = (
        ("team", POINTER),
        ("weights", Weights),
        ("tiles_data", POINTER),
        ("heads_data", POINTER),
        *((name, SIZE) for name in ("generation", "layers", "experts", "tiles")),
        *(
            (name, SIZE)
            for name in (
                "layer_bytes",
                "expert_bytes",
                "tile_bytes",
                "head_stride",
                "head_bytes",
                "up_biases",
            )
        ),
        *((name, POINTER) for name in ("ticks", "memory")),
        *((name, SIZE) for name in ("memory_bytes", "needed")),
    )


class TallyNumbers(ctypes.Structure):
    _fields_ = (
        ("mass", ctypes.c_double),
        ("left", ctypes.c_double),
        ("kept", SIZE),
        ("channels", SIZE),
    )


def check_weights(data: Bytes, unit: int) -> None:
    """Raises ValueError unless these are whole units of so many contiguous bytes."""
    if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
        raise ValueError("weights are contiguous bytes")
    if unit == 0 or len(data) == 0 or len(data) % unit:
        raise ValueError(f"{len(data)} bytes of weights are not whole units of {unit}")


def checked(fault: int) -> None:
    """Raises IndexError if a function has refused the numbers in its arrays."""
    if fault:
        raise IndexError(FAULTS[fault])


def typed(function: Any, *arguments: Any, result: Any = None) -> Any:
    """A C function with the types of its arguments and of its result: `checked` for one that can
    refuse its arrays."""
    function.argtypes, function.restype = arguments, result
    return function
