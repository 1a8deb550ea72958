"""Tensors of a backbone on their way to what computes with them: read by role, kept as their kind says."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from pipeline.models.architecture import Want
from pipeline.models.linear import Biased, Linear, Precision
from pipeline.models.source import Tensors
from shm.layout import Float32


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

    def numbers(self, role: str) -> Float32:
        """The tensor as it is in the model, float32."""
        want = self._wants[role]
        return self._tensors.float32(want.name, want.shape)

    def vector(self, role: str) -> Tensor:
        """Float32, on the device: norms, routers."""
        return self._keep(self.numbers(role), torch.float32)

    def dense(self, role: str) -> Tensor:
        """In the dtype of what is never quantized, on the device."""
        return self._keep(self.numbers(role), self._precision.dtype)

    def linear(self, *roles: str, followed: bool = False) -> Linear:
        """The matrices of these roles as one, each below the one before it, with their biases. `followed`:
        another product is due soon after one of this."""
        biases = None
        if any(f"{role}_bias" in self for role in roles):
            biases = [
                self.numbers(f"{role}_bias")
                if f"{role}_bias" in self
                else np.zeros(self._wants[role].shape[0], np.float32)
                for role in roles
            ]
        return self.made(roles, [self.numbers(role) for role in roles], biases, followed)

    def made(
        self,
        roles: tuple[str, ...],
        matrices: list[Float32],
        biases: list[Float32] | None,
        followed: bool = False,
    ) -> Linear:
        """As `linear`, of numbers that the caller has: matrices [outputs, inputs], biases [outputs]."""
        names = ", ".join(self._wants[role].name for role in roles)
        whole = matrices[0] if len(matrices) == 1 else np.concatenate(matrices)
        linear = self._precision.linear(names, whole, followed)
        self.bytes += linear.bytes
        return linear if biases is None else Biased(linear, self._keep(np.concatenate(biases), torch.float32))

    def _keep(self, numbers: Float32, dtype: torch.dtype) -> Tensor:
        tensor = torch.from_numpy(numbers).to(device=self._precision.device.torch_device, dtype=dtype)
        self.bytes += tensor.numel() * tensor.element_size()
        return tensor
