"""The parts of an expert whose gate and down lie by channel (`shm/floe.py`), for a caller that makes masks of
its own: up of all channels, then any of its channels."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shm.blocks import LANES
from shm.expert_math import SWIGLU, ExpertMath
from shm.floe import FloeFormat
from shm.formats import LINE, Bytes, Float32
from workers.kernels.c_types import (
    POINTER,
    SIZE,
    Activations,
    Geometry,
    Kept,
    checked,
    typed,
)
from workers.kernels.matrix import HostMatrix
from workers.kernels.native import Library, Team, handle_of


@dataclass(frozen=True)
class ChannelInputs:
    """Rows of x, and in the form that the products with gate read: uint8 [R, bytes of a row], at a cache
    line."""

    x: Float32
    gate: Bytes


class ChannelKernel:
    """Computes heads and chosen channels by the C kernels. Used by one thread at a time."""

    def __init__(
        self,
        library: Library,
        format: FloeFormat,
        hidden: int,
        team: Team | None,
        math: ExpertMath = SWIGLU,
    ) -> None:
        self._library, self._format, self._hidden, self._team = library, format, hidden, team
        self._channel_bytes = format.channel_bytes(hidden, math)
        self._weights = Geometry(format, hidden, hidden, math=math).weights
        self._address = ctypes.addressof(self._weights)
        functions = library.functions
        self._gate_bytes = typed(functions.tandem_gate_x_bytes, POINTER, result=SIZE)(self._address)
        self._arrange = typed(functions.tandem_arrange_gate_x, *[POINTER] * 3, SIZE, POINTER)
        self._size = typed(functions.tandem_channels_scratch, POINTER, SIZE, SIZE, result=SIZE)
        of_x = (POINTER, SIZE, POINTER, SIZE)
        self._compute = typed(
            functions.tandem_channels, *[POINTER] * 3, SIZE, *of_x, *[POINTER] * 3, result=checked
        )
        self._quantizer = library.kernel(Geometry(format.up, hidden, LANES))
        self._scratch = Kept()

    def activations(self, x: Float32) -> ChannelInputs:
        """Returns the rows x float32 [R, H] in the forms that the products read."""
        x = np.require(x, np.float32, ["C", "A"])
        quantized = self._quantizer.quantize(x)
        raw = np.empty(len(x) * self._gate_bytes + LINE, np.uint8)
        start = -raw.ctypes.data % LINE
        gate = raw[start : start + len(x) * self._gate_bytes].reshape(len(x), -1)
        of = Activations(quantized.codes.ctypes.data, quantized.factors.ctypes.data)
        self._arrange(self._address, x.ctypes.data, ctypes.byref(of), len(x), gate.ctypes.data)
        return ChannelInputs(x, gate)

    def up(
        self, heads: Bytes, x: ChannelInputs, rows: NDArray[np.int32], biases: Float32 | None = None
    ) -> Float32:
        """u of all channels of consecutive heads, float32 [len(rows), channels]. biases: up's [channels]."""
        channels = len(heads) // self._format.head_bytes(self._hidden, LANES) * LANES
        matrix = HostMatrix(self._library, self._team, self._format.up, (channels, self._hidden), heads)
        u = matrix.product(x.x[rows])
        return u if biases is None else u + biases

    def channels(self, records: Bytes, u: Float32, x: ChannelInputs, rows: NDArray[np.int32]) -> Float32:
        """The sum over channels of f(gate . x, u) * down: float32 [len(rows), H]. records: uint8 [channels *
        channel_bytes]; u: float32 [len(rows), channels], with its bias, 0 where a row leaves a channel out;
        channels that all leave out are not read. Raises IndexError for a row outside x."""
        size = self._channel_bytes
        rows, u = np.require(rows, np.int32, ["C", "A"]), np.require(u, np.float32, ["C", "A"])
        number = len(records) // size
        if records.dtype != np.uint8 or not records.flags.c_contiguous or records.shape != (number * size,):
            raise ValueError(f"{records.shape} bytes are no whole channels of {size}")
        if u.shape != (len(rows), number):
            raise ValueError(f"u {u.shape} for {len(rows)} rows and {number} channels")
        if x.gate.shape[1:] != (self._gate_bytes,):
            raise ValueError(f"activations {x.gate.shape} of {self._gate_bytes} bytes a row")
        y = np.zeros((len(rows), self._hidden), np.float32)
        if y.size and number:
            scratch = self._scratch.reserve(self._size(self._address, number, len(rows)))
            self._compute(
                handle_of(self._team), self._address, records.ctypes.data, number, x.gate.ctypes.data,
                len(x.gate), rows.ctypes.data, len(rows), u.ctypes.data, y.ctypes.data, scratch,
            )  # fmt: skip
        return y
