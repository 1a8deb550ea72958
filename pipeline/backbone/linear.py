"""The matrices of a backbone, in whatever form they are kept: x -> x @ W.T."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.backbone.disk_cache import BackboneCache
from pipeline.device.base import Device
from pipeline.errors import ModelError
from shm.blocks import BlockFormat
from shm.errors import WeightsUnusable
from shm.layout import FORMATS, Float32
from workers.kernels.matrix import HostMatrix, quantized
from workers.kernels.reference import DTYPES

Going = Callable[[], bool]  # whether to go on


class Movable(Protocol):
    """Weights that a start has left in a file."""

    @property
    def bytes(self) -> int:
        """What they take in memory."""

    def move(self, going: Going) -> None:
        """Have them in memory, unless `going` says no meanwhile; for any thread, while they are used."""


class Linear(Protocol):
    """One matrix [outputs, inputs]."""

    @property
    def bytes(self) -> int:
        """Device memory of its weights."""

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [R, inputs]: float32 [R, outputs]."""


class DenseLinear:
    """A matrix of plain numbers; products are done in its dtype."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    @property
    def bytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x.to(self.weight.dtype), self.weight).float()


class Biased:
    """A matrix whose products have a bias added."""

    def __init__(self, matrix: Linear, bias: Tensor) -> None:
        """`bias`: float32 [outputs]."""
        self._matrix = matrix
        self._bias = bias

    @property
    def bytes(self) -> int:
        return self._matrix.bytes + self._bias.numel() * self._bias.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        return self._matrix(x).add_(self._bias)


class QuantizedLinear:
    """A matrix of a quantized format, through the expert kernels of the host."""

    def __init__(self, matrix: HostMatrix) -> None:
        self._matrix = matrix

    @property
    def bytes(self) -> int:
        return self._matrix.bytes

    def __call__(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self._matrix.product(x.numpy()))


class Precision:
    """`--backbone-dtype`: how matrices are kept, and the dtype of everything else that is stored."""

    def __init__(self, name: str, device: Device, cache: BackboneCache | None = None) -> None:
        """`name`: f32, bf16, int8 or int4; `cache`: where quantized matrices are kept between starts. Raises
        UsageError where the device cannot compute it."""
        format = FORMATS[name]
        self.device = device
        self._format = format if isinstance(format, BlockFormat) else None
        self.cache = cache
        if self._format is not None:
            device.check_quantized()
        self.dtype = DTYPES.get(name, torch.bfloat16)  # of embeddings and of the KV cache
        self.unmoved: list[Movable] = []  # used from their files as yet

    @property
    def quantized(self) -> bool:
        return self._format is not None

    def quantized_linear(
        self, name: str, shape: tuple[int, int], numbers: Callable[[], Float32], followed: bool
    ) -> Linear:
        """A matrix [outputs, inputs] in the quantized format, from the cache or from its `numbers`. `name`:
        what it is called in the checkpoint; `followed`: another product is due soon after one of this. Raises
        ModelError where it cannot be quantized."""
        assert self._format is not None
        data = None if self.cache is None else self.cache.take(name, self._format.matrix_bytes(*shape))
        if data is None:
            try:
                data = quantized(self._format, numbers())
            except WeightsUnusable as e:
                raise ModelError(f"{name}: {e}") from None
            if self.cache is not None:
                self.cache.keep(name, data)
            return QuantizedLinear(HostMatrix(self._format, data, shape, self.device.team, followed))
        matrix = HostMatrix(self._format, data, shape, self.device.team, followed)
        self.unmoved.append(matrix)
        return QuantizedLinear(matrix)
