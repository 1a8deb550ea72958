"""The blocks of a decoder layer beside its attention: norms, and the feed-forward of every row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.backbone.linear import Linear
from pipeline.backbone.weights import Weights
from pipeline.device.base import Device
from workers.kernels.layer import NormOf, RMSNorm


class Norm:
    """RMS norm of hidden states; LayerNorm where the checkpoint has a bias."""

    def __init__(self, role: str, weights: Weights, eps: float, device: Device) -> None:
        self._weight, self._eps = weights.vector(role), eps
        bias = f"{role}_bias"
        self._bias = weights.vector(bias) if bias in weights else None
        self._host: RMSNorm | None = None
        if self._bias is None and device.library is not None:
            self._host = RMSNorm(device.library, self._weight.data_ptr(), self.width, eps)

    @property
    def width(self) -> int:
        return len(self._weight)

    def on_host(self) -> NormOf:
        """What the host's kernels read."""
        bias = None if self._bias is None else self._bias.data_ptr()
        return NormOf(self._weight.data_ptr(), bias, self._eps)

    def __call__(self, h: Tensor) -> Tensor:
        if self._host is not None and not h.requires_grad:
            h = h.contiguous()
            out = torch.empty_like(h)
            self._host(h.data_ptr(), len(h), out.data_ptr())
            return out
        if self._bias is None:
            return functional.rms_norm(h, self._weight.shape, self._weight, self._eps)
        return functional.layer_norm(h, self._weight.shape, self._weight, self._bias, self._eps)


@dataclass(frozen=True)
class SwiGLU:
    """A feed-forward block that is applied to every row. `gate` [1, H] scales each row of its output."""

    up: Linear  # [2 I, H], gate over up
    down: Linear  # [H, I]
    gate: Tensor | None

    @classmethod
    def load(cls, role: str, weights: Weights) -> SwiGLU | None:
        """None where the layer has no such block."""
        if f"{role}_up_proj" not in weights:
            return None
        up = weights.linear(f"{role}_gate_proj", f"{role}_up_proj")
        gate = weights.vector(f"{role}_gate") if f"{role}_gate" in weights else None
        return cls(up, weights.linear(f"{role}_down_proj"), gate)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=1)
        y = self.down(functional.silu(gate).mul_(up))
        return y if self.gate is None else y * torch.sigmoid(functional.linear(x, self.gate))
