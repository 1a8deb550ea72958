"""What the device computes of a model: embeddings, attention, norms, routers, the head. Not the experts.

The residual stream, norms and router are float32 whatever the weights' dtype; products with weights are
done in the weights' dtype (`linear.py`), attention in the KV cache's. With float32 weights it is the
reference arithmetic; with bfloat16 it rounds less often than a model that keeps its residual stream in
bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.kv_cache import SequenceKV
from pipeline.models.linear import DenseLinear, Linear, Precision
from pipeline.models.registry import architecture_of
from pipeline.models.source import ModelSource
from pipeline.models.spec import ModelSpec


@dataclass(frozen=True)
class Slice:
    """Consecutive new tokens of one sequence in a step."""

    kv: SequenceKV
    tokens: Sequence[int]


@dataclass(frozen=True)
class Batch:
    """The rows of one step: the slices' tokens, one after the other; made by `Backbone.batch`."""

    slices: Sequence[Slice]
    rows: int
    tokens: Tensor  # [R] int64, on the device
    cos: Tensor  # [R, 1, width], of the rows' positions
    sin: Tensor
    masks: list[Tensor | None]  # for each slice [T, N] bool, or None where each row sees all N tokens


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor  # [H] float32
    qkv: Linear  # [(heads + 2 kv_heads) * head_dim, H]
    output: Linear  # [H, heads * head_dim]
    moe_norm: Tensor  # [H] float32
    router: Tensor  # [E, H] float32


class Backbone:
    """One model's weights outside its routed experts, on a device."""

    def __init__(
        self,
        source: ModelSource,
        spec: ModelSpec,
        precision: Precision,
        context: int,
        device: torch.device,
    ) -> None:
        """Read the weights. Raises ModelError for tensors that are missing or of another shape."""
        self.spec = spec
        self.dtype = dtype = precision.dtype
        self._quantized = precision.quantized
        architecture = architecture_of(source.config)
        width = spec.head_dim
        self._q, self._kv = spec.heads * width, spec.kv_heads * width
        with source.tensors() as tensors:

            def weight(name: str, shape: tuple[int, ...], kind: torch.dtype = dtype) -> Tensor:
                return torch.from_numpy(tensors.float32(name, shape)).to(device=device, dtype=kind)

            names = architecture.backbone_names(spec)
            table = (spec.vocabulary, spec.hidden)
            self._embedding = weight(names.embedding, table)
            self._norm = weight(names.final_norm, (spec.hidden,), torch.float32)
            head = names.head or names.embedding
            # Plain numbers serve as embedding and head both, where the model says so; quantized ones do not.
            self._tied = names.head is None and not precision.quantized
            self._head = (
                DenseLinear(self._embedding)
                if self._tied
                else precision.linear(head, tensors.float32(head, table))
            )
            self._layers: list[_Layer] = []
            for i in range(spec.layers):
                at = architecture.layer_names(i)
                qkv = [tensors.float32(at.query, (self._q, spec.hidden))]
                qkv += [tensors.float32(name, (self._kv, spec.hidden)) for name in (at.key, at.value)]
                together = f"{at.query}, {at.key}, {at.value}"
                output = tensors.float32(at.output, (spec.hidden, self._q))
                self._layers.append(
                    _Layer(
                        attention_norm=weight(at.attention_norm, (spec.hidden,), torch.float32),
                        qkv=precision.linear(together, np.concatenate(qkv), followed=True),
                        output=precision.linear(at.output, output),
                        moe_norm=weight(at.moe_norm, (spec.hidden,), torch.float32),
                        router=weight(at.router, (spec.experts, spec.hidden), torch.float32),
                    )
                )
        frequencies = spec.rope_theta ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
        angles = torch.arange(context, dtype=torch.float32)[:, None] * frequencies  # [context, width / 2]
        self._cos = torch.cat((angles.cos(), angles.cos()), dim=1).to(device)[:, None]  # [context, 1, width]
        self._sin = torch.cat((-angles.sin(), angles.sin()), dim=1).to(device)[:, None]

    @property
    def bytes(self) -> int:
        """Device memory of the weights."""
        plain = [self._embedding, self._norm]
        plain += [t for each in self._layers for t in (each.attention_norm, each.moe_norm, each.router)]
        matrices = [m for each in self._layers for m in (each.qkv, each.output)]
        if not self._tied:
            matrices.append(self._head)
        return sum(t.numel() * t.element_size() for t in plain) + sum(m.bytes for m in matrices)

    def largest_product(self, rows: int) -> int:
        """Multiply-adds of the largest product of a layer that torch computes, for this many rows."""
        width = rows * self._q  # of attention, were they all one sequence
        return max(width * rows, 0 if self._quantized else width * self.spec.hidden)

    def batch(self, slices: Sequence[Slice]) -> Batch:
        """Put the slices' rows together, with everything about their positions that all layers share."""
        tokens = [t for s in slices for t in s.tokens]
        positions = [p for s in slices for p in range(s.kv.length, s.kv.length + len(s.tokens))]
        both = torch.tensor([tokens, positions], dtype=torch.int64).to(self._cos.device)
        masks = [self._mask(len(s.tokens), s.kv.length + len(s.tokens)) for s in slices]
        return Batch(slices, len(tokens), both[0], self._cos[both[1]], self._sin[both[1]], masks)

    def _mask(self, new: int, total: int) -> Tensor | None:
        """Which of `total` tokens each of the last `new` ones sees: [new, total] bool."""
        window = self.spec.sliding_window
        if new == 1 and (window is None or total <= window):
            return None
        every = torch.arange(total, device=self._cos.device)
        behind = every[total - new :, None] - every
        return behind >= 0 if window is None else (behind >= 0) & (behind < window)

    def embed(self, batch: Batch) -> Tensor:
        """Hidden states float32 [R, H] of the batch's tokens."""
        return self._embedding[batch.tokens].float()

    def attention(self, layer: int, h: Tensor, batch: Batch) -> Tensor:
        """h + attention(norm(h)), float32 [R, H]; appends to the sequences' KV."""
        weights = self._layers[layer]
        qkv = weights.qkv(self._normed(h, weights.attention_norm))
        heads = qkv.view(batch.rows, -1, self.spec.head_dim)
        turned = self.spec.heads + self.spec.kv_heads  # queries and keys
        qk = _rotate(heads[:, :turned], batch.cos, batch.sin).to(self.dtype)
        q, k, v = qk[:, : self.spec.heads], qk[:, self.spec.heads :], heads[:, turned:].to(self.dtype)
        parts, start = [], 0
        for piece, mask in zip(batch.slices, batch.masks, strict=True):
            rows = slice(start, start + len(piece.tokens))
            start = rows.stop
            keys, values = piece.kv.write(layer, k[rows].transpose(0, 1), v[rows].transpose(0, 1))
            parts.append(self._attend(q[rows].transpose(0, 1), keys, values, mask))
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return h + weights.output(mixed.float())

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """q [heads, T, width], the last T of the N tokens of keys and values [kv_heads, N, width]; returns
        [T, heads * width]."""
        new = q.shape[1]
        if new == 1:
            # Heads that share keys are rows of one product: repeating the keys takes ten times as long.
            q = q.view(self.spec.kv_heads, -1, self.spec.head_dim)
        out = functional.scaled_dot_product_attention(
            q[None], keys[None], values[None], attn_mask=mask, enable_gqa=new > 1
        )
        return out[0].view(1, -1) if new == 1 else out[0].transpose(0, 1).reshape(new, self._q)

    def moe_input(self, layer: int, h: Tensor) -> Tensor:
        """The normalised input of a layer's router and experts, float32 [R, H]."""
        return self._normed(h, self._layers[layer].moe_norm)

    def router(self, layer: int, x: Tensor) -> Tensor:
        """Router logits float32 [R, E]."""
        return functional.linear(x, self._layers[layer].router)

    def head(self, h: Tensor) -> Tensor:
        """Logits float32 [R, vocabulary]."""
        return self._head(self._normed(h, self._norm))

    def _normed(self, h: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(h, weight.shape, weight, self.spec.norm_eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, x float32 [R, heads, width]; the sine table carries the halves' signs."""
    swapped = torch.roll(x, x.shape[-1] // 2, dims=-1)
    return x * cos + swapped * sin
