"""Matrices in host memory: products with rows of activations, on a team's cores.

The C function of a whole layer (`layer.py`) reads them too.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from shm.blocks import LANES, BlockFormat
from shm.codes import Codes
from shm.formats import Bytes, Float32, TileFormat
from shm.huge import private
from workers.kernels.c_types import POINTER, SIZE, Geometry, Kept, Matrix, check_weights, typed
from workers.kernels.native import Library, Team, handle_of

Address = int
PART_NUMBERS = 1 << 20  # quantized at a time by one core


class HostMatrix:
    """W [outputs, inputs] in the bytes of a quantized format, or row-major in bf16 or float32. Used by one
    thread at a time."""

    def __init__(
        self, library: Library, team: Team | None, format: TileFormat, shape: tuple[int, int], data: Bytes
    ) -> None:
        """`data`: the matrix [outputs, inputs] of this `shape` in the format's bytes, see `quantized`. Raises
        ValueError where they are not as many."""
        self._outputs, self._inputs = shape
        geometry = Geometry(format, self._inputs, self._outputs)
        check_weights(data, geometry.matrix_bytes)
        self._data, self._team = data, team
        self._scratch = Kept()
        self.facts = geometry.weights
        self.address: Address = data.ctypes.data
        self._structure = Matrix(self.facts, self.address, None)
        self._structure_address = ctypes.addressof(self._structure)
        self._sized, self._scratch_size = 0, 0  # rows of the scratch, and its bytes
        types = (*[POINTER] * 3, SIZE, POINTER, POINTER, SIZE)
        self._product = typed(library.functions.tandem_product, *types)
        self._scratch_bytes = typed(library.functions.tandem_product_scratch, POINTER, SIZE, result=SIZE)

    @property
    def bytes(self) -> int:
        return len(self._data)

    def product(self, x: Float32) -> Float32:
        """x @ W.T, x float32 [R, inputs], rounded as the format's kernels do: float32 [R, outputs]."""
        x = np.require(x, np.float32, ["C", "A"])
        if x.ndim != 2 or x.shape[1] != self._inputs:
            raise ValueError(f"activations {x.shape} for {self._inputs} inputs")
        y = np.empty((len(x), self._outputs), np.float32)
        self.multiply(x.ctypes.data, len(x), y.ctypes.data)
        return y

    def set_bias(self, bias: Address) -> None:
        """Add a bias float32 [outputs], which the caller keeps, to every product from now on."""
        self._structure.bias = bias

    def multiply(self, x: Address, rows: int, y: Address) -> None:
        """Write x @ W.T to y, for x [rows, inputs] and y [rows, outputs], contiguous float32."""
        if rows != self._sized:
            self._sized, self._scratch_size = rows, self._scratch_bytes(self._structure_address, rows)
        scratch = self._scratch.reserve(self._scratch_size)
        self._product(handle_of(self._team), self._structure_address, x, rows, y, scratch, 0)


def quantized(format: BlockFormat, w: Float32 | Codes) -> Bytes:
    """w [outputs, inputs] in the format's bytes, encoded on all cores; its codes without loss. Raises
    WeightsUnusable."""
    if isinstance(w, Codes) and w.format != format.name:
        w = w.values()
    outputs, inputs = w.shape
    out = private(format.matrix_bytes(outputs, inputs))
    blocks = out[: format.blocks_bytes(outputs, inputs)]
    factor = w.factor if isinstance(w, Codes) else format.factor_of(w)
    rows = max(1, PART_NUMBERS // (inputs * LANES)) * LANES
    size = format.blocks_bytes(rows, inputs)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        parts = [
            pool.submit(format.encode_part, w[lo : lo + rows], blocks[n * size : (n + 1) * size], factor)
            for n, lo in enumerate(range(0, outputs, rows))
        ]
        for part in parts:
            part.result()
    if format.factors:
        out[len(blocks) :] = 0
        format.factors_of(out)[0] = factor
    return out
