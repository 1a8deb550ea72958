"""Linear layers of the backbone, dense or quantized: x -> x @ W.T."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.backbone.disk_cache import BackboneCache
from pipeline.checkpoint.model_source import OwnMatrix
from pipeline.config import KvDType
from pipeline.device.base import Device
from pipeline.errors import ModelError
from shm.blocks import Int8
from shm.codes import Codes, format_of_all
from shm.errors import WeightsUnusable
from shm.fp8 import FP8, in_blocks
from shm.layout import FORMATS, Float32, MatrixFormat
from workers.kernels.cuda.matrix import CudaMatrix
from workers.kernels.layer import Projection
from workers.kernels.matrix import HostMatrix, quantized
from workers.kernels.reference import DTYPES

MIXED = Int8()  # keeps matrices of several formats, factors or grids of blocks, that are stacked
NOTHING: Mapping[str, OwnMatrix] = MappingProxyType({})
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


KV_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


class Precision:
    """`--backbone-dtype`: the format of matrices, and the dtype of everything else that is stored;
    `--kv-dtype`: that of the KV cache."""

    def __init__(
        self,
        name: str,
        device: Device,
        cache: BackboneCache | None = None,
        own: Mapping[str, OwnMatrix] = NOTHING,
        kv: KvDType | None = None,
    ) -> None:
        """`name`: f32, bf16, fp8, int8, int4 or own, for which `own` are the matrices that the file has
        quantized; `cache` keeps those that are quantized here; `kv`: None as `dtype`."""
        self.device, self._cache = device, cache
        self._own = own if name == "own" else None
        format = FORMATS.get(name)
        self._format = format if isinstance(format, MatrixFormat) else None
        self.dtype = DTYPES.get(name, torch.bfloat16)  # of embeddings
        self.kv_dtype = self.dtype if kv is None else KV_DTYPES[kv]
        # of queries, and of keys and values where they are multiplied
        self.attention_dtype = torch.float32 if self.kv_dtype == torch.float32 else torch.bfloat16

    @property
    def quantized(self) -> bool:
        """Returns whether any matrix may be."""
        return self._format is not None or bool(self._own)

    def format_of(self, names: Sequence[str]) -> MatrixFormat | None:
        """The format of a matrix that is stacked from tensors of these names; None: it is not quantized."""
        if self._own is None:
            return self._format
        kept = {self._own[name].format if name in self._own else "" for name in names}
        if "" in kept:
            return None
        of_all = format_of_all(kept)
        format = FORMATS[of_all] if of_all else MIXED
        assert isinstance(format, MatrixFormat)
        return format

    def quantized_matrix(
        self,
        format: MatrixFormat,
        name: str,
        shape: tuple[int, int],
        numbers: Callable[[], Float32 | Codes],
    ) -> HostMatrix | CudaMatrix:
        """A quantized matrix [outputs, inputs]: from the cache under `name`, or made from its `numbers`, in
        the file's own format only if they are codes of it. Raises ModelError, which has the `name`, where
        they cannot be quantized."""
        data = None
        if self._cache is not None:
            data = self._cache.take(name, format.matrix_bytes(*shape))
        if data is None:
            try:
                w = numbers()
                if self._own is not None and not _is_kept(format, w):
                    format = MIXED
                data = quantized(format, w)
            except WeightsUnusable as e:
                raise ModelError(f"{name}: {e}") from None
            if self._cache is not None:
                self._cache.keep(name, data)
        return self.device.quantized_matrix(format, data, shape)


def _is_kept(format: MatrixFormat, w: Float32 | Codes) -> bool:
    """Returns whether a format keeps what a file has without loss."""
    return isinstance(w, Codes) and w.format == format.name and (not isinstance(format, FP8) or in_blocks(w))
