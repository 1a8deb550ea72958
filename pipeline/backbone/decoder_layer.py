"""One decoder layer: attention, and what every row goes through beside the routed experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from pipeline.backbone.attention import Attention
from pipeline.backbone.batch import Batch
from pipeline.backbone.blocks import Norm, SwiGLU
from pipeline.backbone.host_layer import HostLayer
from pipeline.backbone.linear import Precision
from workers.kernels.c_types import Kept


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
        precision: Precision,
        scratch: Kept,
    ) -> None:
        """`router`: float32 [E, H]. `scratch`: of all layers' kernels on the host."""
        self._index = index
        self._attention_norm, self._attention, self._mlp_norm = attention_norm, attention, mlp_norm
        self._dense, self._shared, self._router = dense, shared, router
        self._host: HostLayer | None = None
        if precision.device.library is not None:
            self._host = HostLayer(
                index,
                attention_norm=attention_norm,
                attention=attention,
                mlp_norm=mlp_norm,
                block=shared if dense is None else dense,
                router=router,
                precision=precision,
                scratch=scratch,
            )

    def attend(self, h: Tensor, batch: Batch, routed: bool = True) -> AfterAttention:
        """Of a layer with experts, from h float32 [R, H]; appends KV. Without `routed` the router's logits
        are not needed."""
        if self._host is not None and self._host.takes(batch):
            return AfterAttention(self, *self._host(h, batch, routed))
        h = h + self._attention(self._index, self._attention_norm(h), batch)
        return AfterAttention(self, h, self._mlp_norm(h))

    def dense(self, h: Tensor, batch: Batch) -> Tensor:
        """The whole of a dense layer: h float32 [R, H]."""
        assert self._dense is not None
        if self._host is not None and self._host.takes(batch):
            return self._host(h, batch, routed=False)[0]
        h = h + self._attention(self._index, self._attention_norm(h), batch)
        return h + self._dense(self._mlp_norm(h))

    def router(self, x: Tensor) -> Tensor:
        """Router logits float32 [R, E]."""
        assert self._router is not None
        return functional.linear(x, self._router)

    @property
    def shares(self) -> bool:
        """Whether it has shared experts."""
        return self._shared is not None

    def shared_experts(self, x: Tensor) -> Tensor | None:
        """float32 [R, H]; None for a layer without them."""
        return None if self._shared is None else self._shared(x)


@dataclass(slots=True)  # not frozen, which takes longer to make
class AfterAttention:
    """A layer up to its experts: hidden states `h` and the normalised input `x` of router and experts, both
    float32 [R, H]; and what the host has computed in the same call."""

    layer: DecoderLayer
    h: Tensor
    x: Tensor
    _logits: Tensor | None = None
    _shared: Tensor | None = None

    def logits(self) -> Tensor:
        """The router's, float32 [R, E]."""
        return self.layer.router(self.x) if self._logits is None else self._logits

    def shared(self) -> Tensor | None:
        """The output of the shared experts, float32 [R, H]; None for a layer without them."""
        return self.layer.shared_experts(self.x) if self._shared is None else self._shared
