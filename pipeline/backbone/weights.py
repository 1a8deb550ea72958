"""Tensors of a backbone on their way to what computes with them: read by role, kept as their kind says."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.backbone.embedding import Table, tensor_of
from pipeline.backbone.linear import Biased, DenseLinear, Linear, Precision
from pipeline.checkpoint.model_source import Tensors
from pipeline.models.architecture import Want
from shm.layout import Float32

Rows = Mapping[str, NDArray[np.int64]]  # role -> its rows in another order
AS_THEY_ARE: Rows = {}


class Weights:
    """The tensors of one layer, or those outside the layers. `bytes` counts the device memory of what was
    made of them. All methods raise ModelError for a tensor that is missing or of another shape."""

    def __init__(self, wants: Mapping[str, Want], tensors: Tensors, precision: Precision) -> None:
        self.bytes = 0
        self._wants = wants
        self._tensors = tensors
        self._precision = precision

    def __contains__(self, role: str) -> bool:
        return role in self._wants

    def vector(self, role: str) -> Tensor:
        """Float32, on the device: norms, routers."""
        return self._keep(torch.from_numpy(self._numbers(role)), torch.float32)

    def dense(self, *roles: str) -> Tensor:
        """In the dtype of what is never quantized, on the device; several of them one below the other."""
        wanted = [(self._wants[role].name, self._wants[role].shape) for role in roles]
        return self._keep(tensor_of(self._tensors.stacked(wanted)), self._precision.dtype)

    def table(self, role: str) -> Tensor | Table:
        """For what is used by row alone: a `Table` of a checkpoint on the host, else a tensor."""
        want, precision = self._wants[role], self._precision
        reader = self._tensors.again() if precision.device.on_host else None
        if reader is None:
            return self.dense(role)
        table = Table(reader, want.name, (want.shape[0], want.shape[1]), precision.dtype)
        precision.unmoved.append(table)
        self.bytes += table.bytes
        return table

    def linear(self, *roles: str, rows: Rows = AS_THEY_ARE, followed: bool = False) -> Linear:
        """The matrices of these roles as one, each below the one before it, with their biases. `rows`: of
        those whose rows, and biases, are wanted in another order. `followed`: another product is due soon
        after one of this."""
        linear: Linear
        if self._precision.quantized:
            linear = self._quantized(roles, rows, followed)
            self.bytes += linear.bytes
        elif rows:
            linear = DenseLinear(torch.cat([self._ordered(role, rows) for role in roles]))
        else:
            linear = DenseLinear(self.dense(*roles))
        if not any(f"{role}_bias" in self for role in roles):
            return linear
        biases = np.concatenate([self._bias(role, rows) for role in roles])
        return Biased(linear, self._keep(torch.from_numpy(biases), torch.float32))

    def _ordered(self, role: str, rows: Rows) -> Tensor:
        matrix = self.dense(role)
        return matrix[torch.from_numpy(rows[role])] if role in rows else matrix

    def _quantized(self, roles: tuple[str, ...], rows: Rows, followed: bool) -> Linear:
        wants = [self._wants[role] for role in roles]

        def numbers() -> Float32:
            parts = [self._numbers(role) for role in roles]
            parts = [x[rows[r]] if r in rows else x for r, x in zip(roles, parts, strict=True)]
            return parts[0] if len(parts) == 1 else np.concatenate(parts)

        shape = (sum(want.shape[0] for want in wants), wants[0].shape[1])
        names = ", ".join(want.name for want in wants)
        return self._precision.quantized_linear(names, shape, numbers, followed)

    def _bias(self, role: str, rows: Rows) -> Float32:
        """Zeros where it has none."""
        if f"{role}_bias" not in self:
            return np.zeros(self._wants[role].shape[0], np.float32)
        bias = self._numbers(f"{role}_bias")
        return bias[rows[role]] if role in rows else bias

    def _numbers(self, role: str) -> Float32:
        want = self._wants[role]
        return self._tensors.float32(want.name, want.shape)

    def _keep(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        kept = tensor.to(device=self._precision.device.torch_device, dtype=dtype)
        self.bytes += kept.numel() * kept.element_size()
        return kept
