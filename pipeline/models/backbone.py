"""What the device computes of a model: embeddings, attention, norms, routers, the head. Not the experts.

The residual stream, norms and router are float32 whatever the weights' dtype; products with weights are
done in the weights' dtype. With float32 weights it is the reference arithmetic; with bfloat16 it rounds
less often than a model that keeps its residual stream in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.checkpoint.index import CheckpointIndex
from pipeline.checkpoint.reader import TensorReader
from pipeline.errors import ModelError
from pipeline.kv_cache import SequenceKV
from pipeline.models.registry import architecture_of
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
    qkv: Tensor  # [(heads + 2 kv_heads) * head_dim, H]
    output: Tensor  # [H, heads * head_dim]
    moe_norm: Tensor  # [H] float32
    router: Tensor  # [E, H] float32


class Backbone:
    """One model's weights outside its routed experts, on a device."""

    def __init__(
        self,
        index: CheckpointIndex,
        spec: ModelSpec,
        dtype: torch.dtype,
        context: int,
        device: torch.device,
    ) -> None:
        """Read the weights. Raises ModelError for tensors that are missing or of another shape."""
        self.spec = spec
        self.dtype = dtype
        architecture = architecture_of(index.config)
        width = spec.head_dim
        self._q, self._kv = spec.heads * width, spec.kv_heads * width
        with TensorReader(index) as reader:

            def weight(name: str, shape: tuple[int, ...], kind: torch.dtype = dtype) -> Tensor:
                array = reader.float32(name)
                if array.shape != shape:
                    raise ModelError(f"{index.folder}: {name} has the shape {array.shape}, not {shape}")
                return torch.from_numpy(array).to(device=device, dtype=kind)

            names = architecture.backbone_names(spec)
            self._embedding = weight(names.embedding, (spec.vocabulary, spec.hidden))
            self._norm = weight(names.final_norm, (spec.hidden,), torch.float32)
            self._head = (
                self._embedding if names.head is None else weight(names.head, (spec.vocabulary, spec.hidden))
            )
            self._layers: list[_Layer] = []
            for i in range(spec.layers):
                at = architecture.layer_names(i)
                qkv = [weight(at.query, (self._q, spec.hidden))]
                qkv += [weight(name, (self._kv, spec.hidden)) for name in (at.key, at.value)]
                self._layers.append(
                    _Layer(
                        attention_norm=weight(at.attention_norm, (spec.hidden,), torch.float32),
                        qkv=torch.cat(qkv),
                        output=weight(at.output, (spec.hidden, self._q)),
                        moe_norm=weight(at.moe_norm, (spec.hidden,), torch.float32),
                        router=weight(at.router, (spec.experts, spec.hidden), torch.float32),
                    )
                )
            self.bytes_read = reader.bytes_read
        frequencies = spec.rope_theta ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
        angles = torch.arange(context, dtype=torch.float32)[:, None] * frequencies  # [context, width / 2]
        self._cos = torch.cat((angles.cos(), angles.cos()), dim=1).to(device)[:, None]  # [context, 1, width]
        self._sin = torch.cat((-angles.sin(), angles.sin()), dim=1).to(device)[:, None]

    @property
    def bytes(self) -> int:
        """Device memory of the weights."""
        own = [self._embedding, self._norm, *([] if self._head is self._embedding else [self._head])]
        own += [t for layer in self._layers for t in vars(layer).values()]
        return sum(t.numel() * t.element_size() for t in own)

    def largest_product(self, rows: int) -> int:
        """Multiply-adds of the largest product of a layer, for this many rows."""
        return rows * self.spec.hidden * (self._q + 2 * self._kv)

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
        qkv = self._linear(self._normed(h, weights.attention_norm), weights.qkv)
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
        return h + functional.linear(mixed, weights.output).float()

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """q [heads, T, width], the last T of the N tokens of keys and values [kv_heads, N, width]; returns
        [T, heads * width]."""
        out = functional.scaled_dot_product_attention(
            q[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
        )
        return out[0].transpose(0, 1).reshape(q.shape[1], self._q)

    def moe_input(self, layer: int, h: Tensor) -> Tensor:
        """The normalised input of a layer's router and experts, float32 [R, H]."""
        return self._normed(h, self._layers[layer].moe_norm)

    def router(self, layer: int, x: Tensor) -> Tensor:
        """Router logits float32 [R, E]."""
        return functional.linear(x, self._layers[layer].router)

    def head(self, h: Tensor) -> Tensor:
        """Logits float32 [R, vocabulary]."""
        return self._linear(self._normed(h, self._norm), self._head)

    def _normed(self, h: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(h, weight.shape, weight, self.spec.norm_eps)

    @staticmethod
    def _linear(x: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(x.to(weight.dtype), weight).float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, x float32 [R, heads, width]; the sine table carries the halves' signs."""
    swapped = torch.roll(x, x.shape[-1] // 2, dims=-1)
    return x * cos + swapped * sin
