"""Matrices in host memory: products with rows of activations, on a team's cores.

The C function of a whole layer (`layer.py`) reads them too.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from shm.blocks import LANES, BlockFormat
from shm.codes import Codes
from shm.formats import Bytes, Float32, MatrixFormat, TileFormat
from shm.fp8 import BLOCK, FP8, encode_rows
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


def quantized(format: MatrixFormat, w: Float32 | Codes) -> Bytes:
    """w [outputs, inputs] in the format's bytes, encoded on all cores; its codes without loss. Raises
    WeightsUnusable."""
    if isinstance(w, Codes) and w.format != format.name:
        w = w.values()
    out = private(format.matrix_bytes(*w.shape))
    if isinstance(format, FP8):
        parts = _fp8_parts(format, w, out)
    else:
        assert isinstance(format, BlockFormat)
        parts = _block_parts(format, w, out)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for part in [pool.submit(part) for part in parts]:
            part.result()
    return out


def _fp8_parts(format: FP8, w: Float32 | Codes, out: Bytes) -> Iterator[Callable[[], None]]:
    outputs, inputs = w.shape
    format.clear_padding(out, outputs, inputs)
    (codes,), (scales,) = format.parts(out, outputs, inputs)
    step = max(1, PART_NUMBERS // (inputs * BLOCK))  # blocks
    for lo in range(0, len(scales), step):
        rows = slice(lo * BLOCK, (lo + step) * BLOCK)
        yield partial(encode_rows, w[rows], codes[rows], scales[lo : lo + step])


def _block_parts(format: BlockFormat, w: Float32 | Codes, out: Bytes) -> Iterator[Callable[[], None]]:
    outputs, inputs = w.shape
    blocks = out[: format.blocks_bytes(outputs, inputs)]
    factor = format.factor_of(w)
    if format.factors:
        out[len(blocks) :] = 0
        format.factors_of(out)[0] = factor
    rows = max(1, PART_NUMBERS // (inputs * LANES)) * LANES
    size = format.blocks_bytes(rows, inputs)
    for n, lo in enumerate(range(0, outputs, rows)):
        yield partial(format.encode_part, w[lo : lo + rows], blocks[n * size : (n + 1) * size], factor)
