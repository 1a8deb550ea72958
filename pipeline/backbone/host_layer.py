"""A decoder layer up to its experts in one call of C, on the host: there, the overhead of torch's small
operations and of waking threads exceeds the work of a step of single tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.backbone.attention import Attention
from pipeline.backbone.batch import Batch
from pipeline.backbone.blocks import Norm, SwiGLU
from pipeline.backbone.linear import FEW_ROWS, Precision
from workers.kernels.layer import LayerArrays, LayerKernel, LayerParts
from workers.kernels.memory import Kept


class HostLayer:
    """Computes what `DecoderLayer` computes, from the same weights."""

    def __init__(
        self,
        index: int,
        *,
        attention_norm: Norm,
        attention: Attention,
        mlp_norm: Norm,
        block: SwiGLU | None,
        router: Tensor | None,
        precision: Precision,
        scratch: Kept,
    ) -> None:
        """`block`: of the shared experts, or of a layer without a router. `scratch`: of all layers. The
        device has a library of kernels."""
        device = precision.device
        assert device.library is not None
        self._router, self._block = router, block
        self._most = None if precision.quantized else FEW_ROWS
        self._kept = attention_norm, attention, mlp_norm  # the kernel reads their memory
        up, down = (None, None) if block is None else (block.up.on_host(), block.down.on_host())
        gate = None if block is None or block.gate is None else block.gate.data_ptr()
        kind, first, query, output = attention.on_host()
        parts = LayerParts(
            hidden=attention_norm.width,
            experts=0 if router is None else len(router),
            attention_norm=attention_norm.on_host(),
            mlp_norm=mlp_norm.on_host(),
            attention=kind,
            first=first,
            query=query,
            output=output,
            router=None if router is None else router.data_ptr(),
            up=up,
            down=down,
            gate=gate,
        )
        self._kernel = LayerKernel(device.library, device.team, index, parts, scratch)

    def takes(self, batch: Batch) -> bool:
        """Whether this is the faster way: for single tokens, as few as C multiplies faster than torch."""
        return batch.single and (self._most is None or batch.rows <= self._most)

    def __call__(
        self, h: Tensor, batch: Batch, routed: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """From the residual stream h float32 [R, H]: h after the attention, or after a dense block; the
        normalised input of router and experts; the router's logits if `routed`; the shared experts'
        output."""
        h = h.contiguous()
        out, x = torch.empty_like(h), torch.empty_like(h)
        logits, shared = None, None
        if self._router is not None:
            logits = torch.empty(batch.rows, len(self._router)) if routed else None
            shared = None if self._block is None else torch.empty_like(h)
        arrays = LayerArrays(h.data_ptr(), out.data_ptr(), x.data_ptr(), _address(logits), _address(shared))
        self._kernel(batch.host_tokens, batch.longest, arrays)
        return out, x, logits, shared


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
