"""Chooses the kernels of the device `cuda`: compiled ones, and torch for what these do not compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
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
from shm.floe import FloeFormat
from shm.formats import Bytes, MatrixFormat
from shm.layout import StoreLayout
from workers.cuda import CudaError
from workers.kernels.cuda import attention
from workers.kernels.cuda.attention import DecodeAttention
from workers.kernels.cuda.compiler import Program
from workers.kernels.cuda.experts import NO_LIMIT, CudaExperts, Inputs
from workers.kernels.cuda.launcher import CudaLauncher
from workers.kernels.cuda.matrix import CudaChannels, CudaMatrix
from workers.kernels.cuda.sums import TERM, OutputSums, Weighted
from workers.kernels.native import best
from workers.kernels.reference import ReferenceKernel


class TorchKernel(ReferenceKernel, TileByTile):
    """Plain torch operations, tile by tile: formats without CUDA kernels, and many rows of bf16 and fp8."""

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

    def __init__(self, cache: Path | None) -> None:
        """`cache`: a folder of compiled kernels."""
        self._cache = cache
        self._launchers: dict[Program, CudaLauncher] = {}

    def launcher(self, program: Program) -> CudaLauncher:
        """Return the compiled kernels. Raises UsageError where they cannot be compiled."""
        if program not in self._launchers:
            place = self.torch_device, self._cache
            try:
                self._launchers[program] = CudaLauncher(program, *place, self.from_host)
            except CudaError as e:
                raise UsageError(f"--device cuda: no kernels for this GPU: {e}; use --device cpu") from None
        return self._launchers[program]

    def check_kernels(self) -> None:
        """Raise UsageError where no kernels can be compiled for this GPU, or the host's have other bits."""
        if best().variant == "portable":
            raise UsageError("--device cuda: the CPU has no fused additions (AVX2 and FMA); use --device cpu")
        self.launcher(Program.of_sums())

    @cached_property
    def sums(self) -> OutputSums:
        """What adds up a layer's outputs."""
        return OutputSums(self.launcher(Program.of_sums()))

    def weighted_lines(self, lines: Tensor, chosen: IntArray, weights: FloatArray) -> Added:
        terms = np.zeros(chosen.size, TERM)
        terms["first"], terms["parts"], terms["weight"] = chosen.reshape(-1), 1, weights.reshape(-1)
        offsets = np.arange(len(chosen) + 1, dtype=np.int32) * chosen.shape[1]
        return Weighted(lines.data_ptr(), terms, offsets, lines)

    def expert_kernel(self, layout: StoreLayout) -> DeviceKernel:
        in_torch = TorchKernel(layout, self.from_host)
        program = Program.of_format(layout.format, layout.shape.math)
        if program is None:
            return in_torch
        experts = CudaExperts(self.launcher(program), layout)
        return experts if experts.most_rows == NO_LIMIT else FewRows(experts, in_torch)

    def channel_kernel(self, layout: StoreLayout) -> DeviceChannelKernel:
        assert isinstance(layout.format, FloeFormat)
        program = Program.of_matrices(layout.format.up)
        channels = Program.of_channels(layout.format.rows.bits, layout.shape.math)
        return CudaChannels(self.launcher(program), self.launcher(channels), layout)

    def quantized_matrix(self, format: MatrixFormat, data: Bytes, shape: tuple[int, int]) -> CudaMatrix:
        return CudaMatrix(self.launcher(Program.of_matrices(format)), format, data, shape)

    def decode_attention(
        self, streams: Sequence[tuple[int, int]], dtype: torch.dtype, context: int
    ) -> DecodeAttention | None:
        if not attention.fits(streams, dtype):
            return None
        return DecodeAttention(self.launcher(attention.program(dtype)), context)
