"""Linear layers of the backbone, dense or quantized: x -> x @ W.T."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.backbone.disk_cache import BackboneCache
from pipeline.device.base import Device
from pipeline.errors import ModelError
from shm.blocks import BlockFormat
from shm.codes import Codes
from shm.errors import WeightsUnusable
from shm.layout import FORMATS, Float32
from workers.kernels.cuda.matrix import CudaMatrix
from workers.kernels.layer import Projection
from workers.kernels.matrix import HostMatrix, quantized
from workers.kernels.reference import DTYPES

FEW_ROWS = 16  # of a dense matrix's products on the host that C computes: more are faster by torch


class Linear(Protocol):
    """A matrix [outputs, inputs], perhaps with a bias."""

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [R, inputs]: float32 [R, outputs]."""

    def on_host(self) -> Projection | None:
        """Returns what the host's kernels read; None where they cannot."""


class DenseLinear:
    """A matrix that is not quantized; products are computed in its dtype, for a few rows on the host by C."""

    def __init__(self, weight: Tensor, device: Device) -> None:
        self.weight = weight
        self.host: HostMatrix | None = None
        if device.library is not None and weight.dtype in (torch.float32, torch.bfloat16):
            self.weight = weight.contiguous()
            outputs, inputs = weight.shape
            data = self.weight.detach().view(torch.uint8).view(-1).numpy()
            plain = FORMATS["f32" if weight.dtype == torch.float32 else "bf16"]
            self.host = HostMatrix(device.library, device.team, plain, (outputs, inputs), data)

    def __call__(self, x: Tensor) -> Tensor:
        if self.host is not None and len(x) <= FEW_ROWS and not x.requires_grad:
            return torch.from_numpy(self.host.product(x.numpy()))
        return functional.linear(x.to(self.weight.dtype), self.weight).float()

    def on_host(self) -> Projection | None:
        return None if self.host is None else Projection(self.host)


@dataclass(frozen=True)
class BiasedLinear:
    """A matrix and a bias: x @ W.T + b."""

    matrix: Linear
    bias: Tensor  # float32 [outputs]

    def __call__(self, x: Tensor) -> Tensor:
        return self.matrix(x).add_(self.bias)

    def on_host(self) -> Projection | None:
        plain = self.matrix.on_host()
        return None if plain is None else replace(plain, bias=self.bias.data_ptr())


@dataclass(frozen=True)
class QuantizedLinear:
    """A matrix of a quantized format, multiplied by the expert kernels of the host or the device."""

    matrix: HostMatrix | CudaMatrix

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self.matrix, HostMatrix):
            return torch.from_numpy(self.matrix.product(x.numpy()))
        return self.matrix.product(x)

    def on_host(self) -> Projection | None:
        return Projection(self.matrix) if isinstance(self.matrix, HostMatrix) else None


class Precision:
    """`--backbone-dtype`: the format of matrices, and the dtype of everything else that is stored."""

    def __init__(self, name: str, device: Device, cache: BackboneCache | None = None) -> None:
        """`name`: f32, bf16, int8 or int4; `cache` keeps quantized matrices. Raises UsageError where the
        device cannot compute in it."""
        format = FORMATS[name]
        self.device, self._cache = device, cache
        self._format = format if isinstance(format, BlockFormat) else None
        if self._format is not None:
            device.check_quantized(self._format)
        self.dtype = DTYPES.get(name, torch.bfloat16)  # of embeddings and of the KV cache

    @property
    def quantized(self) -> bool:
        return self._format is not None

    def quantized_matrix(
        self, name: str, shape: tuple[int, int], rows: Callable[[], Float32 | Codes]
    ) -> HostMatrix | CudaMatrix:
        """A quantized matrix [outputs, inputs]: from the cache under `name`, or made from its `rows`. Raises
        ModelError, which has the `name`, where they cannot be quantized."""
        assert self._format is not None
        data = None
        if self._cache is not None:
            data = self._cache.take(name, self._format.matrix_bytes(*shape))
        if data is None:
            try:
                data = quantized(self._format, rows())
            except WeightsUnusable as e:
                raise ModelError(f"{name}: {e}") from None
            if self._cache is not None:
                self._cache.keep(name, data)
        return self.device.quantized_matrix(self._format, data, shape)
