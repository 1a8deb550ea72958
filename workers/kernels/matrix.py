"""A matrix of a quantized format in host memory: products with rows of activations, on a team's cores."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from shm.blocks import LANES, BlockFormat
from shm.formats import Bytes, Float32
from shm.huge import copy_to_private, private
from workers.kernels.native import Geometry, Team, best

PART_NUMBERS = 1 << 20  # quantized at a time by one core
# Nanoseconds for which a team's threads spin for the next product. Waking a sleeping core takes long, and
# the expert workers are idle between the two products of a layer. Only for few rows: with more, the
# operations in between take longer.
SPIN_NS = 300_000
SPIN_ROWS = 4


class HostMatrix:
    """W [outputs, inputs], made from float32 numbers. Used by one thread at a time."""

    def __init__(
        self, format: BlockFormat, data: Bytes, shape: tuple[int, int], team: Team | None, spin: bool
    ) -> None:
        """`data`: the matrix [outputs, inputs] of this `shape` in the format's bytes, see `quantized`.
        `spin`: another product of the same team is due soon after this matrix's."""
        self._format = format
        self._spin_ns = SPIN_NS if spin else 0
        self._outputs, self._inputs = shape
        self._data = data
        library = best()
        geometry = Geometry(format, self._inputs, self._outputs)
        self._kernel = None if library is None else library.kernel(geometry, team)

    @property
    def bytes(self) -> int:
        return len(self._data)

    def materialize(self, proceed: Callable[[], bool]) -> None:
        """Copy the bytes into private memory, unless `proceed` returns False meanwhile; for any thread."""
        data = copy_to_private(self._data, proceed)
        self._data = self._data if data is None else data

    def product(self, x: Float32) -> Float32:
        """x @ W.T, x float32 [R, inputs]: float32 [R, outputs]."""
        if self._kernel is not None:
            spin_ns = self._spin_ns if len(x) <= SPIN_ROWS else 0
            return self._kernel.matmul(self._data, self._kernel.quantize(x), spin_ns)
        import torch

        from workers.kernels.unpack import dequantize, int8_steps

        w = dequantize(self._format, torch.from_numpy(self._data), self._outputs, self._inputs)
        y: Float32 = (int8_steps(torch.from_numpy(x), self._format.group) @ w.T).numpy()
        return y


def quantized(format: BlockFormat, w: Float32) -> Bytes:
    """w [outputs, inputs] in the format's bytes, encoded on all cores. Raises WeightsUnusable."""
    outputs, inputs = w.shape
    out = private(format.matrix_bytes(outputs, inputs))
    rows = max(1, PART_NUMBERS // (inputs * LANES)) * LANES
    size = format.matrix_bytes(rows, inputs)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        parts = [
            pool.submit(format.encode_matrix, w[lo : lo + rows], out[n * size : (n + 1) * size])
            for n, lo in enumerate(range(0, outputs, rows))
        ]
        for part in parts:
            part.result()
    return out
