"""What the device computes of a model: embeddings, attention, norms, routers, dense blocks, shared experts,
the head. Not the routed experts.

The residual stream, norms and router are float32 whatever the weights' dtype; products with weights are
done in the weights' dtype (`linear.py`), attention in the KV cache's. With float32 weights it is the
reference arithmetic; with bfloat16 it rounds less often than a model that keeps its residual stream in
bfloat16.

A layer here is one with routed experts, as for the store and the policies; layers without any are computed
on the way from one to the next.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.backbone.attention import Attention, GroupedQueryAttention, LatentAttention
from pipeline.backbone.batch import Batch, TokenSpan
from pipeline.backbone.decode_attention import HostNorm
from pipeline.backbone.embedding import Table
from pipeline.backbone.linear import Biased, DenseLinear, Going, Linear, Precision
from pipeline.backbone.rope import RopeTables
from pipeline.backbone.weights import Weights
from pipeline.checkpoint.model_source import ModelSource
from pipeline.device.base import Device
from pipeline.errors import ModelError
from pipeline.models.registry import architecture_of
from pipeline.models.spec import GroupedQuery, ModelSpec

log = logging.getLogger(__name__)

READERS = 2  # threads that make layers of what they read: one reads while the other converts


class _Norm:
    """Of hidden states: RMS norm, or with a bias LayerNorm."""

    def __init__(self, role: str, weights: Weights, eps: float, device: Device) -> None:
        self._weight, self._eps = weights.vector(role), eps
        bias = f"{role}_bias"
        self._bias = weights.vector(bias) if bias in weights else None
        on_host = self._bias is None and device.library is not None
        self._host = HostNorm(self._weight, eps, device) if on_host else None

    def __call__(self, h: Tensor) -> Tensor:
        if self._host is not None and not h.requires_grad:
            return self._host(h)
        if self._bias is None:
            return functional.rms_norm(h, self._weight.shape, self._weight, self._eps)
        return functional.layer_norm(h, self._weight.shape, self._weight, self._bias, self._eps)


@dataclass(frozen=True)
class _SwiGLU:
    """A feed-forward block that every row goes through; `gate` [1, H] weights its output row by row."""

    up: Linear  # [2 I, H], gate over up
    down: Linear  # [H, I]
    gate: Tensor | None

    @classmethod
    def of(cls, role: str, weights: Weights) -> _SwiGLU | None:
        if f"{role}_up_proj" not in weights:
            return None
        up = weights.linear(f"{role}_gate_proj", f"{role}_up_proj", followed=True)
        gate = weights.vector(f"{role}_gate") if f"{role}_gate" in weights else None
        return cls(up, weights.linear(f"{role}_down_proj"), gate)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=1)
        y = self.down(functional.silu(gate).mul_(up))
        return y if self.gate is None else y * torch.sigmoid(functional.linear(x, self.gate))


@dataclass(frozen=True)
class _Layer:
    """One layer of the decoder; `dense` is None where it has experts and `router` where it has none."""

    index: int
    attention_norm: _Norm
    attention: Attention
    mlp_norm: _Norm
    dense: _SwiGLU | None
    shared: _SwiGLU | None
    router: Tensor | None  # [E, H] float32

    def attend(self, h: Tensor, batch: Batch) -> Tensor:
        return h + self.attention(self.index, self.attention_norm(h), batch)


class Backbone:
    """One model's weights outside its routed experts, on a device."""

    def __init__(
        self,
        source: ModelSource,
        spec: ModelSpec,
        precision: Precision,
        context: int,
    ) -> None:
        """Read the weights. Raises ModelError for tensors that are missing or of another shape."""
        self.spec = spec
        self.dtype = precision.dtype
        self._precision = precision
        self._moving = threading.Lock()
        self._device = device = precision.device.torch_device
        architecture = architecture_of(source.config)
        with source.tensors() as tensors, ThreadPoolExecutor(1 + READERS) as pool:
            fused = source.fused
            # First, for it may import a library that takes a second.
            width = spec.attention.rotated
            rope = pool.submit(RopeTables, spec.rope, source.config, width, context, device, precision.cache)
            every = [architecture.layer(spec, i, fused) for i in range(spec.layers)]
            parts = [Weights(wants, tensors, precision) for wants in every]
            made = pool.map(self._make_layer, range(spec.layers), parts)
            outer = Weights(architecture.outer(spec), tensors, precision)
            self._norm = _Norm("norm", outer, spec.norm_eps, precision.device)
            self._embedding: Tensor | Table
            self._embedding, self._head = self._make_ends(outer)
            layers = list(made)
            self._rope = rope.result()
            self.bytes = sum(weights.bytes for weights in (outer, *parts))
            matrices = (want for wants in every for want in wants.values() if want.kind == "matrix")
            self._widest = max(want.shape[0] * want.shape[1] for want in matrices)  # numbers of the largest
        self._layers = [layers[i] for i in spec.moe_layers]
        starts = [0, *(i + 1 for i in spec.moe_layers)]
        ends = [*spec.moe_layers, spec.layers]
        # Before each layer with experts, and behind the last.
        self._between = [layers[start:end] for start, end in zip(starts, ends, strict=True)]

    def _make_ends(self, outer: Weights) -> tuple[Tensor | Table, Linear]:
        """The embeddings and the head."""
        if "head" in outer:
            return outer.table("embedding"), outer.linear("head")
        # Plain numbers serve as embedding and head both; quantized ones do not.
        if self._precision.quantized:
            table, head = outer.table("embedding"), outer.linear("embedding")
        else:
            table = outer.dense("embedding")
            head = DenseLinear(table)
        return table, Biased(head, outer.vector("head_bias")) if "head_bias" in outer else head

    def _make_layer(self, index: int, weights: Weights) -> _Layer:
        spec, device = self.spec, self._precision.device
        attention: Attention
        if isinstance(spec.attention, GroupedQuery):
            window, eps = spec.windows[index], spec.norm_eps
            attention = GroupedQueryAttention(spec.attention, weights, window, eps, self._precision)
        else:
            attention = LatentAttention(spec.attention, weights, self._precision)
        return _Layer(
            index,
            attention_norm=_Norm("attention_norm", weights, spec.norm_eps, device),
            attention=attention,
            mlp_norm=_Norm("mlp_norm", weights, spec.norm_eps, device),
            dense=_SwiGLU.of("dense", weights),
            shared=_SwiGLU.of("shared", weights),
            router=weights.vector("router") if "router" in weights else None,
        )

    @property
    def unmoved(self) -> int:
        """Bytes of weights that a start has left in files, and that are going to be in memory."""
        return sum(weights.bytes for weights in list(self._precision.unmoved))

    def move(self, going: Going) -> None:
        """Have in memory what is left in files, one after the other, unless `going` says no meanwhile; for
        any threads, while steps are computed. What cannot be moved stays there, with a warning."""
        with self._moving:
            # The table first: a prompt asks for many rows of it, each of which is a read of its own.
            for weights in sorted(self._precision.unmoved, key=lambda one: not isinstance(one, Table)):
                try:
                    weights.move(going)
                except (ModelError, OSError, MemoryError) as e:
                    log.warning(f"a part of the backbone stays in its file: {e}")
                if not going():
                    return
                self._precision.unmoved.remove(weights)

    @property
    def differentiable(self) -> bool:
        """Whether torch's gradients go through it: quantized matrices are multiplied by the host's kernels.
        They do for sequences of UnkeptKV."""
        return not self._precision.quantized

    def largest_product(self, rows: int) -> int:
        """Multiply-adds of the largest product of a layer that torch computes, for this many rows."""
        heads, width = self.spec.attention.heads, self.spec.attention.width
        in_attention = rows * rows * heads * width  # were they all one sequence
        return max(in_attention, 0 if self._precision.quantized else rows * self._widest)

    def batch(self, slices: Sequence[TokenSpan]) -> Batch:
        """Put the slices' rows together, with everything about their positions that all layers share."""
        tokens = [t for s in slices for t in s.tokens]
        places = [(range(s.kv.length, s.kv.length + len(s.tokens)), s.kv.long) for s in slices]
        both = torch.stack((torch.tensor(tokens), self._rope.rows(places))).to(self._device)
        masks = {
            window: [self._mask(len(s.tokens), s.kv.length + len(s.tokens), window) for s in slices]
            for window in set(self.spec.windows)
        }
        return Batch(slices, len(tokens), both[0], self._rope[both[1]], masks)

    def _mask(self, new: int, total: int, window: int | None) -> Tensor | None:
        """Which of `total` tokens each of the last `new` ones sees: [new, total] bool."""
        if new == 1 and (window is None or total <= window):
            return None
        every = torch.arange(total, device=self._device)
        behind = every[total - new :, None] - every
        return behind >= 0 if window is None else (behind >= 0) & (behind < window)

    def embed(self, batch: Batch) -> Tensor:
        """Hidden states float32 [R, H] of the batch's tokens."""
        return self._embedding[batch.tokens].float()

    def attention(self, layer: int, h: Tensor, batch: Batch) -> Tensor:
        """h + attention(norm(h)), float32 [R, H], behind the dense layers that come first; appends to the
        sequences' KV."""
        return self._layers[layer].attend(self._through(self._between[layer], h, batch), batch)

    def moe_input(self, layer: int, h: Tensor) -> Tensor:
        """The normalised input of a layer's router and experts, float32 [R, H]."""
        return self._layers[layer].mlp_norm(h)

    def router(self, layer: int, x: Tensor) -> Tensor:
        """Router logits float32 [R, E]."""
        router = self._layers[layer].router
        assert router is not None
        return functional.linear(x, router)

    def shared_experts(self, layer: int, x: Tensor) -> Tensor | None:
        """What the experts that every row uses add, float32 [R, H]; None where a model has none."""
        shared = self._layers[layer].shared
        return None if shared is None else shared(x)

    def finish(self, h: Tensor, batch: Batch) -> Tensor:
        """The hidden states behind the last layer of the decoder."""
        return self._through(self._between[-1], h, batch)

    def head(self, h: Tensor) -> Tensor:
        """Logits float32 [R, vocabulary]."""
        return self._head(self._norm(h))

    def _through(self, layers: Sequence[_Layer], h: Tensor, batch: Batch) -> Tensor:
        """Layers without routed experts."""
        for layer in layers:
            assert layer.dense is not None
            h = layer.attend(h, batch)
            h = h + layer.dense(layer.mlp_norm(h))
        return h
