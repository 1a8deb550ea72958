"""Modules in place of those of transformers that compute the same faster or from fewer bytes: linear layers
by our kernels, embeddings in the backbone's dtype or on disk, RMS norms in one pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.backbone.linear import FEW_ROWS, DenseLinear, QuantizedLinear
from pipeline.device.base import Device
from workers.kernels.layer import RMSNorm
from workers.kernels.matrix import HostMatrix


class OwnLinear(nn.Module):
    """In place of an nn.Linear."""

    def __init__(
        self,
        matrix: DenseLinear | QuantizedLinear,
        shape: tuple[int, int],
        bias: Tensor | None,
        device: torch.device,
    ) -> None:
        """`shape`: outputs, inputs; `bias`: float32, on the device."""
        super().__init__()
        self._device = device
        self.out_features, self.in_features = shape
        self.bias = bias
        self._matrix = matrix
        host = matrix.host if isinstance(matrix, DenseLinear) else matrix.matrix
        self._host = host if isinstance(host, HostMatrix) else None
        if self._host is not None and bias is not None:
            self._host.set_bias(bias.data_ptr())
        # rows up to which the host's kernels multiply; of a dense matrix torch multiplies more
        self._most = FEW_ROWS if isinstance(matrix, DenseLinear) else 1 << 62
        self._weight: Tensor | None = None

    @property
    def stored(self) -> Tensor:
        """A matrix that is not quantized, in the dtype of the cache."""
        assert isinstance(self._matrix, DenseLinear)
        return self._matrix.weight

    @property
    def weight(self) -> Tensor:
        """The matrix in float32, for the few modules that read it themselves; kept from then on. float32 even
        where it is stored in another dtype: a module may convert its activations to that."""
        if self._weight is None:
            matrix = self._matrix
            if isinstance(matrix, DenseLinear):
                self._weight = matrix.weight.float()
            else:  # its products with unit vectors, which are exact
                self._weight = matrix(torch.eye(self.in_features, device=self._device)).T.contiguous()
        return self._weight

    def forward(self, x: Tensor) -> Tensor:
        """x float32 [..., inputs]: float32 [..., outputs]."""
        shape = x.shape
        rows = x.numel() // self.in_features
        host = self._host
        if host is not None and rows <= self._most:
            x = x.contiguous()
            y = torch.empty((*shape[:-1], self.out_features))
            host.multiply(x.data_ptr(), rows, y.data_ptr())
            return y
        y = self._matrix(x.reshape(rows, self.in_features))
        if self.bias is not None:
            y += self.bias
        return y.view(*shape[:-1], self.out_features)

    __call__ = forward  # without the hooks of modules, a microsecond each


class OwnEmbedding(nn.Module):
    """In place of an nn.Embedding: rows in the backbone's dtype."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """float32 [..., H]."""
        return functional.embedding(ids, self.weight).float()


class GatheredRows:
    """In place of the forward of an embedding that does more than to look rows up, or whose table stays on
    disk: the module is given the rows that it looks up, each once and in float32, and their places among
    these."""

    def __init__(self, module: nn.Module, rows: Callable[[Tensor], Tensor], device: torch.device) -> None:
        """`rows`: those of a table, float32 [n, H] on the module's device, at places int64 [n]."""
        self._module, self._rows = module, rows
        self._own: Callable[[Tensor], Tensor] = module.forward
        vars(module)["padding_idx"] = None  # it is for training, and no place among a few rows
        self._take(torch.empty(0, 0, device=device))

    def __call__(self, ids: Tensor) -> Tensor:
        """Raises what `rows` raises."""
        places, which = ids.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        self._take(self._rows(places))
        return self._own(which)

    def _take(self, rows: Tensor) -> None:
        self._module.weight = nn.Parameter(rows, requires_grad=False)


def fuse_norms(model: nn.Module, device: Device) -> list[nn.Module]:
    """Let every module of the model that is found to be an RMS norm compute it in one pass; returns these
    modules. A norm's weight may be stored less 1."""
    found = []
    for module in model.modules():
        fused = _fused(module, device)
        if fused is not None:
            module.forward = fused
            found.append(module)
    return found


def _fused(module: nn.Module, device: Device) -> FusedNorm | None:
    """Returns a module of ours that computes the same, if the module is an RMS norm."""
    if next(module.children(), None) is not None or next(module.buffers(recurse=False), None) is not None:
        return None
    parameters = list(module.parameters(recurse=False))
    if len(parameters) != 1 or parameters[0].dim() != 1:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    (weight,) = parameters
    eps = [v for v in vars(module).values() if isinstance(v, float) and 0 < v < 1e-2]
    x = torch.linspace(-3, 3, 2 * len(weight), device=weight.device).view(2, -1)
    x = torch.stack((x, 1e-3 * x.flip(0)))  # small ones show the eps
    try:
        with torch.inference_mode():
            wanted = module(x)
    except Exception:  # whatever a module of other inputs raises
        return None
    if not isinstance(wanted, Tensor) or wanted.shape != x.shape:
        return None
    for scale in (weight, 1 + weight):
        for number in dict.fromkeys(eps):
            found = functional.rms_norm(x, (len(weight),), scale, number)
            if torch.allclose(found, wanted, rtol=1e-4, atol=1e-5):
                return FusedNorm(scale.detach().float().contiguous(), number, device)
    return None


class FusedNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""

    def __init__(self, weight: Tensor, eps: float, device: Device) -> None:
        self._weight, self._eps, self._width = weight, eps, len(weight)
        self._kernel = None
        if device.library is not None:
            self._kernel = RMSNorm(device.library, weight.data_ptr(), self._width, eps)

    def __call__(self, x: Tensor) -> Tensor:
        if self._kernel is None:
            return functional.rms_norm(x, (self._width,), self._weight, self._eps)
        x = x.contiguous()
        out = torch.empty_like(x)
        self._kernel(x.data_ptr(), x.numel() // self._width, out.data_ptr())
        return out
