"""Chooses the kernels of the device `cuda`: compiled ones, or torch where these cannot be had."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.arrays import FloatArray, IntArray
from pipeline.device.base import Added, Device, DeviceChannelKernel, DeviceKernel, LayerSum
from pipeline.device.tile_sums import TileByTile
from pipeline.errors import UsageError
from shm.blocks import BlockFormat
from shm.expert_math import SWIGLU, ExpertMath
from shm.floe import FloeFormat
from shm.formats import Bytes, MatrixFormat, TileFormat
from shm.fp8 import FP8
from shm.layout import StoreLayout
from workers.cuda import CudaError
from workers.kernels.cuda import attention
from workers.kernels.cuda.attention import DecodeAttention
from workers.kernels.cuda.compiler import Program
from workers.kernels.cuda.experts import NO_LIMIT, CudaExperts, Inputs
from workers.kernels.cuda.launcher import CudaLauncher
from workers.kernels.cuda.matrix import CudaChannels, CudaFp8Matrix, CudaMatrix, DeviceMatrix
from workers.kernels.cuda.sums import TERM, OutputSums, Weighted
from workers.kernels.native import best
from workers.kernels.reference import ReferenceChannels, ReferenceKernel

log = logging.getLogger(__name__)


class TorchKernel(ReferenceKernel, TileByTile):
    """Plain torch operations, tile by tile: formats without CUDA kernels, and where those cannot be had."""

    def __init__(self, layout: StoreLayout, upload: Callable[[NDArray[Any]], Tensor]) -> None:
        super().__init__(layout)
        self.upload = upload


class FewRows:
    """CUDA kernels where an expert's rows are few; torch's matrix products where they are more."""

    def __init__(self, few: CudaExperts, many: TorchKernel) -> None:
        self._few, self._many = few, many

    def inputs(self, rows: int) -> Inputs | None:
        """Memory for x, as DeviceKernel says, where no expert can have many rows."""
        return self._few.inputs(rows) if rows <= self._few.most_rows else None

    def begin(
        self, x: Any, cuts: IntArray, offsets: IntArray, rows: IntArray, weights: FloatArray
    ) -> LayerSum:
        """Begin a share, as DeviceKernel says."""
        few = np.diff(offsets).max(initial=0) <= self._few.most_rows
        kernel: DeviceKernel = self._few if few else self._many
        return kernel.begin(x, cuts, offsets, rows, weights)


class KernelDevice(Device):
    """A device whose tiles and matrices kernels compute. Each program is compiled once. Used by the engine's
    thread alone."""

    def __init__(self, cache: Path | None, in_torch: bool) -> None:
        """`cache`: a folder of compiled kernels. `in_torch`: torch computes all tiles, for comparison."""
        self._cache, self._in_torch = cache, in_torch
        self._launchers: dict[Program, CudaLauncher] = {}
        self._sums: OutputSums | None = None

    def launcher(self, program: Program) -> CudaLauncher:
        """Return the compiled kernels. Raises CudaError."""
        if program not in self._launchers:
            place = self.torch_device, self._cache
            self._launchers[program] = CudaLauncher(program, *place, self.from_host)
        return self._launchers[program]

    @property
    def sums(self) -> OutputSums | None:
        """What adds up a layer's outputs; None where torch does."""
        if self._sums is None:
            with suppress(CudaError):  # of which whatever needs kernels has told
                self._sums = OutputSums(self.launcher(Program.of_sums()))
        return self._sums

    def weighted_lines(self, lines: Tensor, chosen: IntArray, weights: FloatArray) -> Added:
        if self.sums is None:
            return super().weighted_lines(lines, chosen, weights)
        terms = np.zeros(chosen.size, TERM)
        terms["first"], terms["parts"], terms["weight"] = chosen.reshape(-1), 1, weights.reshape(-1)
        offsets = np.arange(len(chosen) + 1, dtype=np.int32) * chosen.shape[1]
        return Weighted(lines.data_ptr(), terms, offsets, lines)

    def _program(self, format: TileFormat, math: ExpertMath = SWIGLU) -> Program | None:
        """Return the kernels of a format's tiles or matrices; None where torch computes them."""
        return Program.of_format(format, best().variant != "portable", math)

    def expert_kernel(self, layout: StoreLayout) -> DeviceKernel:
        in_torch, program = (
            TorchKernel(layout, self.from_host),
            self._program(layout.format, layout.shape.math),
        )
        if program is None or self._in_torch:
            return in_torch
        try:
            experts = CudaExperts(self.launcher(program), layout)
        except CudaError as e:
            log.warning(f"torch computes experts on the GPU, which takes many times as long: {e}")
            return in_torch
        return experts if experts.most_rows == NO_LIMIT else FewRows(experts, in_torch)

    def channel_kernel(self, layout: StoreLayout) -> DeviceChannelKernel:
        assert isinstance(layout.format, FloeFormat)
        program = self._program(layout.format.up)
        if program is None or self._in_torch:
            return ReferenceChannels(layout)
        try:
            return CudaChannels(self.launcher(program), layout)
        except CudaError as e:
            log.warning(f"torch computes up matrices on the GPU, which takes many times as long: {e}")
            return ReferenceChannels(layout)

    def _matrix_launcher(self, format: MatrixFormat) -> CudaLauncher:
        """Return the kernels of a backbone's matrices. Raises CudaError."""
        return self.launcher(Program.of_matrices(format, best().variant != "portable"))

    def check_quantized(self, format: MatrixFormat) -> None:
        try:
            self._matrix_launcher(format)
        except CudaError as e:
            raise UsageError(
                f"--backbone-dtype {format.name} needs kernels that cannot be had here: {e}; use bf16"
            ) from None

    def quantized_matrix(self, format: MatrixFormat, data: Bytes, shape: tuple[int, int]) -> DeviceMatrix:
        launcher = self._matrix_launcher(format)
        if isinstance(format, FP8):
            return CudaFp8Matrix(launcher, format, data, shape)
        assert isinstance(format, BlockFormat)
        return CudaMatrix(launcher, format, data, shape)

    def decode_attention(
        self, streams: Sequence[tuple[int, int]], dtype: torch.dtype, context: int
    ) -> DecodeAttention | None:
        if self._in_torch or not attention.fits(streams):
            return None
        try:
            return DecodeAttention(self.launcher(attention.program(dtype)), context)
        except CudaError as e:
            log.warning(f"torch computes attention on the GPU, one sequence after the other: {e}")
            return None
