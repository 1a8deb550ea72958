"""Reads the backbone's tensors by role and stores each in the form that its kind requires."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.backbone.linear import (
    BiasedLinear,
    DenseLinear,
    Linear,
    Precision,
    QuantizedLinear,
)
from pipeline.checkpoint.model_source import Tensors
from pipeline.checkpoint.reader import RawTensor, codes_or_numbers, to_float32
from pipeline.errors import ModelError
from pipeline.models.architecture import TensorSpec
from shm.codes import Codes
from shm.layout import Float32, MatrixFormat
from workers.kernels.cuda.matrix import CudaMatrix
from workers.kernels.matrix import HostMatrix

RowOrder = Mapping[str, NDArray[np.int64]]  # role -> a permutation of its matrix's rows
UNCHANGED: RowOrder = {}
Rows = TypeVar("Rows", Float32, Tensor)


class Weights:
    """The tensors of one decoder layer, or those outside the layers. Of all weights made so far, `bytes` is
    the device memory, and `quantized` says whether all matrices are. Every method raises ModelError for a
    tensor that is missing or of another shape."""

    def __init__(self, specs: Mapping[str, TensorSpec], tensors: Tensors, precision: Precision) -> None:
        """`specs`: by role."""
        self.bytes = 0
        self.quantized = True
        self._specs = specs
        self._tensors = tensors
        self._precision = precision

    def __contains__(self, role: str) -> bool:
        return role in self._specs

    def vector(self, role: str) -> Tensor:
        """A norm or a router: float32, on the device. Raises ModelError where it is not finite: a router's
        NaN chooses experts silently, and these are few numbers."""
        return self._keep(torch.from_numpy(self.on_host(role)), torch.float32)

    def on_host(self, role: str) -> Float32:
        """The same on the host, for the router's formula."""
        numbers = self._float32(role)
        if self._specs[role].plus:
            numbers = numbers + np.float32(self._specs[role].plus)
        if not np.isfinite(numbers).all():
            raise ModelError(f"the tensor {self._specs[role].name} holds numbers that are not finite")
        return numbers

    def dense(self, *roles: str, dtype: torch.dtype | None = None) -> Tensor:
        """Matrices that are never quantized, stacked by rows, on the device, in this dtype or the usual
        one."""
        stacked = [(self._specs[role].name, self._specs[role].shape) for role in roles]
        return self._keep(tensor_of(self._tensors.stacked(stacked)), dtype or self._precision.dtype)

    def format_of(self, *roles: str) -> MatrixFormat | None:
        """The format of these roles' matrix; None where it is not quantized."""
        return self._precision.format_of([self._specs[role].name for role in roles])

    def linear(self, *roles: str, order: RowOrder = UNCHANGED) -> Linear:
        """The matrices of these roles stacked by rows, with their biases. `order`: of the rows and biases of
        a role."""
        linear: Linear
        format = self.format_of(*roles)
        self.quantized &= format is not None
        if format is not None:
            linear = QuantizedLinear(self._quantized(format, roles, order))
        elif order:
            dense = torch.cat([_ordered(self.dense(role), role, order) for role in roles])
            linear = DenseLinear(dense, self._precision.device)
        else:
            linear = DenseLinear(self.dense(*roles), self._precision.device)
        if not any(f"{role}_bias" in self for role in roles):
            return linear
        biases = np.concatenate([self._bias(role, order) for role in roles])
        return BiasedLinear(linear, self._keep(torch.from_numpy(biases), torch.float32))

    def _quantized(
        self, format: MatrixFormat, roles: tuple[str, ...], order: RowOrder
    ) -> HostMatrix | CudaMatrix:
        specs = [self._specs[role] for role in roles]
        shape = (sum(spec.shape[0] for spec in specs), specs[0].shape[1])

        def numbers() -> Float32 | Codes:
            stacked = self._tensors.stacked([(spec.name, spec.shape) for spec in specs])
            w = codes_or_numbers(stacked, format)
            if not order:
                return w
            each = [order.get(role, np.arange(self._specs[role].shape[0])) for role in roles]
            starts = np.cumsum([0, *(len(rows) for rows in each)])
            return w[np.concatenate([rows + start for rows, start in zip(each, starts, strict=False)])]

        names = ", ".join(spec.name for spec in specs)
        matrix = self._precision.quantized_matrix(format, names, shape, numbers)
        self.bytes += matrix.bytes
        return matrix

    def _bias(self, role: str, order: RowOrder) -> Float32:
        """Zeros for a role without a bias."""
        if f"{role}_bias" not in self:
            return np.zeros(self._specs[role].shape[0], np.float32)
        return _ordered(self._float32(f"{role}_bias"), role, order)

    def _float32(self, role: str) -> Float32:
        spec = self._specs[role]
        return self._tensors.float32(spec.name, spec.shape)

    def _keep(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        kept = tensor.to(device=self._precision.device.torch_device, dtype=dtype)
        self.bytes += kept.numel() * kept.element_size()
        return kept


def _ordered(rows: Rows, role: str, order: RowOrder) -> Rows:
    return rows[order[role]] if role in order else rows


def tensor_of(raw: RawTensor | Codes) -> Tensor:
    """A tensor of the same bits, or of what codes mean."""
    if isinstance(raw, Codes):
        return torch.from_numpy(raw.values())
    if raw.dtype == "BF16":
        return torch.from_numpy(raw.bits.view(np.int16)).view(torch.bfloat16)
    if raw.dtype == "F16":
        return torch.from_numpy(raw.bits.view(np.float16))
    return torch.from_numpy(to_float32(raw.dtype, raw.bits))
