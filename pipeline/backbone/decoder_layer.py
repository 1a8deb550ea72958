"""One decoder layer: attention, norms, and the feed-forward blocks that every row goes through.

On the host one call of C computes a layer up to its experts for steps that decode: there, the overhead
of torch's small operations and of waking threads exceeds the work.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.arrays import FloatArray, IntArray
from pipeline.backbone.attention import Attention
from pipeline.backbone.batch import Batch
from pipeline.backbone.host_rows import Written
from pipeline.backbone.linear import FEW_ROWS, Linear
from pipeline.backbone.weights import Weights
from pipeline.device.base import Added, Device
from workers.kernels.c_types import Kept
from workers.kernels.layer import LayerKernel, LayerParts, NormOf, RMSNorm


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
        """Returns what the host's kernels read."""
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


class DecoderLayer:
    """A layer: with a `router`, or dense. Its routed experts are computed elsewhere."""

    def __init__(
        self,
        index: int,
        *,
        attention_norm: Norm,
        attention: Attention,
        mlp_norm: Norm,
        dense: SwiGLU | None,
        shared: SwiGLU | None,
        router: Tensor | None,
        router_bias: Tensor | None,
        expert_biases: Tensor | None,
        device: Device,
        quantized: bool,
        scratch: Kept,
    ) -> None:
        """float32: `router` [E, H], `router_bias` [E], `expert_biases` [E, H] of the experts' outputs.
        `quantized`: all of its matrices are. `scratch`: of all layers' kernels on the host."""
        self._index = index
        self._attention_norm, self._attention, self._mlp_norm = attention_norm, attention, mlp_norm
        self._dense, self._shared = dense, shared
        self._router, self._router_bias = router, router_bias
        self.expert_biases = expert_biases
        self._device = device
        self._most = None if quantized else FEW_ROWS  # rows that C multiplies faster than torch
        self._kernel: LayerKernel | None = None
        if device.library is not None:
            self._kernel = LayerKernel(device.library, device.team, index, self._host_parts(), scratch)

    def _host_parts(self) -> LayerParts:
        """Returns what the kernel reads; valid as long as this object."""
        block = self._shared if self._dense is None else self._dense
        kind, first, query, output = self._attention.on_host()
        return LayerParts(
            hidden=self._attention_norm.width,
            experts=0 if self._router is None else len(self._router),
            attention_norm=self._attention_norm.on_host(),
            mlp_norm=self._mlp_norm.on_host(),
            attention=kind,
            first=first,
            query=query,
            output=output,
            router=None if self._router is None else self._router.data_ptr(),
            router_bias=None if self._router_bias is None else self._router_bias.data_ptr(),
            up=None if block is None else block.up.on_host(),
            down=None if block is None else block.down.on_host(),
            gate=None if block is None or block.gate is None else block.gate.data_ptr(),
        )

    def attend(self, h: Tensor, batch: Batch, routed: bool = True) -> AfterAttention:
        """A layer with experts up to them, from h float32 [R, H]; appends KV. Without `routed` the router's
        logits are not needed."""
        if self._kernel is not None and self._suits_kernel(batch):
            return self._on_host(self._kernel, h, batch, routed)
        h = h + self._attention(self._index, self._attention_norm(h), batch)
        return AfterAttention(self, h, self._mlp_norm(h))

    def dense(self, h: Tensor, batch: Batch) -> Tensor:
        """The whole of a dense layer: h float32 [R, H]."""
        assert self._dense is not None
        if self._kernel is not None and self._suits_kernel(batch):
            return self._on_host(self._kernel, h, batch, routed=False).h
        h = h + self._attention(self._index, self._attention_norm(h), batch)
        return h + self._dense(self._mlp_norm(h))

    def _suits_kernel(self, batch: Batch) -> bool:
        return batch.decodes and (self._most is None or batch.rows <= self._most)

    def _on_host(self, kernel: LayerKernel, h: Tensor, batch: Batch, routed: bool) -> AfterAttention:
        """Compute the layer in C: `h` after the attention, or after a dense block."""
        h, rows = h.contiguous(), batch.host
        out, x = rows.streams[h is rows.streams[0].tensor], rows.x  # h is read meanwhile
        logits = rows.logits if routed and self._router is not None else None
        shared = rows.shared if self.shares else None
        kernel(
            rows.tokens,
            h.data_ptr(),
            out.address,
            x.address,
            None if logits is None else logits.address,
            None if shared is None else shared.address,
        )
        arrays = (out.array, x.array) if logits is None else (out.array, x.array, logits.array)
        return AfterAttention(self, out.tensor, x.tensor, logits, shared, arrays)

    def router(self, x: Tensor) -> Tensor:
        """Router logits float32 [R, E]."""
        assert self._router is not None
        return functional.linear(x, self._router, self._router_bias)

    def router_before(self, h: Tensor) -> Tensor:
        """Router logits float32 [R, E] for the residual stream of an earlier layer, in place of this one's
        behind its attention."""
        return self.router(self._mlp_norm(h))

    @property
    def shares(self) -> bool:
        """Returns whether it has shared experts."""
        return self._shared is not None

    def shared_experts(self, x: Tensor) -> Tensor | None:
        """float32 [R, H]; None for a layer without them."""
        return None if self._shared is None else self._shared(x)

    def expert_bias(self, experts: IntArray, weights: FloatArray) -> Added | None:
        """The biases of the routed experts' outputs by their weights, both [R, k]: as
        `Device.weighted_lines`; None for a layer without them. An expert of weight 0 adds nothing."""
        if self.expert_biases is None:
            return None
        return self._device.weighted_lines(self.expert_biases, experts, weights)


@dataclass(slots=True)  # not frozen, which takes longer to make
class AfterAttention:
    """A layer up to its experts: hidden states `h` and the normalised input `x` of router and experts, both
    float32 [R, H]; and what the host has computed in the same call. All are valid until the next layer."""

    layer: DecoderLayer
    h: Tensor
    x: Tensor
    _logits: Written | None = None
    _shared: Written | None = None
    arrays: tuple[FloatArray, ...] = ()  # h, x and perhaps the logits where the host has computed them

    def logits(self) -> Tensor:
        """The router's, float32 [R, E]."""
        return self.layer.router(self.x) if self._logits is None else self._logits.tensor

    def unread(self, own: bool) -> list[Tensor]:
        """What `arrays` lacks: x and, if `own`, the router's logits."""
        if self.arrays:
            return []
        return [self.x, self.logits()] if own else [self.x]

    def shared(self) -> Tensor | None:
        """The output of the shared experts, float32 [R, H]; None for a layer without them."""
        return self.layer.shared_experts(self.x) if self._shared is None else self._shared.tensor

    @property
    def inputs(self) -> Tensor:
        """x."""
        return self.x

    def expert_bias(self, experts: IntArray, weights: FloatArray) -> Added | None:
        """The biases of the routed experts' outputs, as `DecoderLayer.expert_bias`."""
        return self.layer.expert_bias(experts, weights)
