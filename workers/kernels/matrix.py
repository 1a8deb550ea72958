"""Matrices in host memory: products with rows of activations, on a team's cores.

The C function of a whole layer (`layer.py`) reads them too.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from shm.blocks import LANES, BlockFormat
from shm.formats import Bytes, Float32
from shm.huge import private
from workers.kernels.c_types import POINTER, SIZE, Geometry, Kept, Matrix, Weights, typed
from workers.kernels.native import Library, Team, best

Address = int
PART_NUMBERS = 1 << 20  # quantized at a time by one core


class HostMatrix:
    """W [outputs, inputs] of a quantized format, made from float32 numbers. Used by one thread at a time."""

    def __init__(
        self,
        format: BlockFormat,
        data: Bytes,
        shape: tuple[int, int],
        team: Team | None,
    ) -> None:
        """`data`: the matrix [outputs, inputs] of this `shape` in the format's bytes, see `quantized`."""
        outputs, inputs = shape
        self._data = data
        self.address: Address = data.ctypes.data
        self.facts = Weights(format.bits, format.group, inputs, outputs)
        geometry = Geometry(format, inputs, outputs)
        self._kernel = best().kernel(geometry, team)

    @property
    def bytes(self) -> int:
        return len(self._data)

    def product(self, x: Float32) -> Float32:
        """x @ W.T, x float32 [R, inputs]: float32 [R, outputs]."""
        return self._kernel.matmul(self._data, self._kernel.quantize(x))


class DenseMatrix:
    """W [outputs, inputs], row-major in bf16 or float32: products with a few rows. Used by one thread at a
    time."""

    def __init__(
        self, library: Library, team: Team | None, bits: int, shape: tuple[int, int], data: Address
    ) -> None:
        """`data` stays valid as long as this object; of `bits` a number, 16 (bf16) or 32."""
        self._outputs, self._inputs = shape
        self._team = team
        self._scratch = Kept()
        self.facts = Weights(bits, 1, self._inputs, self._outputs)
        self.address = data
        self._structure = Matrix(self.facts, data, None)
        types = (*[POINTER] * 3, SIZE, POINTER, POINTER, SIZE)
        self._product = typed(library.functions.tandem_product, *types)
        self._scratch_bytes = typed(library.functions.tandem_product_scratch, POINTER, SIZE, result=SIZE)

    def product(self, x: Float32) -> Float32:
        """x @ W.T, x float32 [R, inputs], rounded to bf16 for a matrix in bf16: float32 [R, outputs]."""
        x = np.require(x, np.float32, ["C", "A"])
        if x.ndim != 2 or x.shape[1] != self._inputs:
            raise ValueError(f"activations {x.shape} for {self._inputs} inputs")
        rows, structure = len(x), ctypes.byref(self._structure)
        y = np.empty((rows, self._outputs), np.float32)
        scratch = self._scratch.reserve(self._scratch_bytes(structure, rows))
        team = None if self._team is None else self._team.handle
        self._product(team, structure, x.ctypes.data, rows, y.ctypes.data, scratch, 0)
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
