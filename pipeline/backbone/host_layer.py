"""A decoder layer up to its experts in one call of C, on the host: there, the overhead of torch's small
operations and of waking threads exceeds the work of a step of single tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.backbone.attention import Attention
from pipeline.backbone.batch import Batch
from pipeline.backbone.blocks import Norm, SwiGLU
from pipeline.backbone.linear import FEW_ROWS, Precision
from workers.kernels.c_types import Kept
from workers.kernels.layer import LayerKernel, LayerParts

FLOAT32 = 4  # bytes


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
        self._experts = 0 if router is None else len(router)
        self._shares = router is not None and block is not None
        self._most = None if precision.quantized else FEW_ROWS
        self._kept = attention_norm, attention, mlp_norm, block, router  # the kernel reads their memory
        up, down = (None, None) if block is None else (block.up.on_host(), block.down.on_host())
        gate = None if block is None or block.gate is None else block.gate.data_ptr()
        kind, first, query, output = attention.on_host()
        parts = LayerParts(
            hidden=attention_norm.width,
            experts=self._experts,
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
        number = 3 if self._shares else 2
        made = torch.empty(number, *h.shape)
        first, step = made.data_ptr(), h.numel() * FLOAT32
        logits = torch.empty(len(h), self._experts) if routed else None
        self._kernel(
            batch.host_tokens,
            h.data_ptr(),
            out=first,
            x=first + step,
            logits=None if logits is None else logits.data_ptr(),
            shared=first + 2 * step if self._shares else None,
        )
        return made[0], made[1], logits, made[2] if self._shares else None
