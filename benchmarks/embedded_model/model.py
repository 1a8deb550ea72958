"""Mixtral's forward pass for training on a CPU, and its Hugging Face files.

Assignments are sorted by expert, so that every expert runs one dense product over its tokens; weights stay in
float32 and products run in bfloat16 under autocast. `MixtralForCausalLM` computes the same logits from the
exported weights.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import Tensor, nn

from shm.atomic_file import SHARED, atomic_file


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, named as in Hugging Face's config.json."""

    hidden_size: int = 256
    intermediate_size: int = 256
    num_hidden_layers: int = 8
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    vocab_size: int = 4096
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    initializer_range: float = 0.02
    router_aux_loss_coef: float = 0.01

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.hidden_size // self.num_attention_heads


def rotary(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, each (length, head_dim)."""
    powers = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), shape.rope_theta**-powers)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class _Rearrange(torch.autograd.Function):
    """Rows of x in the order `order`, each row `copies` times in total; the gradient is a gather as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor, copies: int) -> Tensor:
        """x (rows, width), order and its inverse back (rows * copies) -> (rows * copies, width)."""
        ctx.save_for_backward(back)
        ctx.copies = copies
        return x[order // copies if copies > 1 else order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Sum the gradients of a row's copies."""
        (back,) = ctx.saved_tensors
        grad = grads[0][back]
        if ctx.copies > 1:
            grad = grad.view(-1, ctx.copies, grad.shape[-1]).sum(1)
        return grad, None, None, None


def _rearrange(x: Tensor, order: Tensor, back: Tensor, copies: int) -> Tensor:
    rows: Tensor = _Rearrange.apply(x, order, back, copies)  # type: ignore[no-untyped-call]
    return rows


class Layer(nn.Module):
    """One decoder layer; projections that read the same input are one matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, inner, experts = shape.hidden_size, shape.intermediate_size, shape.num_local_experts
        keys = shape.num_key_value_heads * shape.head_dim
        std = shape.initializer_range
        # Outputs added to the residual stream start smaller, so that its variance does not grow with depth.
        out_std = std / (2 * shape.num_hidden_layers) ** 0.5
        self.input_norm = nn.Parameter(torch.ones(hidden))
        self.moe_norm = nn.Parameter(torch.ones(hidden))
        self.qkv = nn.Parameter(torch.randn(hidden + 2 * keys, hidden) * std)
        self.o = nn.Parameter(torch.randn(hidden, hidden) * out_std)
        self.gate = nn.Parameter(torch.randn(experts, hidden) * std)
        self.w13 = nn.ParameterList([torch.randn(2 * inner, hidden) * std for _ in range(experts)])
        self.w2 = nn.ParameterList([torch.randn(hidden, inner) * out_std for _ in range(experts)])

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal self-attention over x (batch, length, hidden)."""
        batch, length, hidden = x.shape
        shape = self.shape
        keys = shape.num_key_value_heads * shape.head_dim
        q, k, v = torch.split(F.linear(x, self.qkv), [hidden, keys, keys], dim=-1)
        q, k, v = (y.view(batch, length, -1, shape.head_dim).transpose(1, 2) for y in (q, k, v))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        # Query heads of one key head are stacked. At these lengths plain products beat the fused CPU kernel
        # with its slow backward pass.
        q = q.to(v.dtype).reshape(batch, shape.num_key_value_heads, -1, shape.head_dim) * shape.head_dim**-0.5
        groups = shape.num_attention_heads // shape.num_key_value_heads
        future = torch.ones(length, length, dtype=torch.bool).triu(1).repeat(groups, 1)
        scores = q @ k.to(v.dtype).transpose(2, 3)
        with torch.no_grad():  # a masked score's share is 0, so softmax passes it no gradient anyway
            scores.masked_fill_(future, float("-inf"))
        with torch.autocast("cpu", enabled=False):  # softmax sums in float32 inside either way
            shares = scores.softmax(-1)
        y = (shares @ v).view(batch, -1, length, shape.head_dim)
        return F.linear(y.transpose(1, 2).reshape(batch, length, hidden), self.o)

    def moe(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Experts' output over x (tokens, hidden), router logits (tokens, experts) and chosen (tokens, k)."""
        top = self.shape.num_experts_per_tok
        with torch.autocast("cpu", enabled=False):  # experts must not depend on bfloat16's rounding
            logits = F.linear(x.float(), self.gate)
        weights, chosen = logits.softmax(-1).topk(top, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.view(-1).argsort(stable=True)
        counts = torch.bincount(chosen.view(-1), minlength=self.shape.num_local_experts).tolist()
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel())
        outputs = []
        sorted_x = _rearrange(x, order, back, top)
        for rows, w13, w2 in zip(torch.split(sorted_x, counts), self.w13, self.w2, strict=True):
            gate, up = F.linear(rows, w13).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(gate) * up, w2))
        y = _rearrange(torch.cat(outputs), back, order, 1).view(-1, top, self.shape.hidden_size)
        return (weights.unsqueeze(1).to(y.dtype) @ y).squeeze(1), logits, chosen

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, low: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The layer over x (batch, length, hidden); `low` is the type of the products' inputs."""
        eps, hidden = self.shape.rms_norm_eps, self.shape.hidden_size
        x = x + self.attention(F.rms_norm(x, (hidden,), self.input_norm, eps).to(low), cos, sin)
        y, logits, chosen = self.moe(F.rms_norm(x, (hidden,), self.moe_norm, eps).to(low).view(-1, hidden))
        return x + y.view_as(x), logits, chosen


@dataclass(frozen=True)
class Losses:
    """Means over a batch, and the assignments counted in it."""

    text: Tensor  # nats a token
    balance: Tensor  # Mixtral's load-balancing loss; `num_experts_per_tok` when balanced
    router_z: Tensor  # mean squared log-partition of the gates
    counts: Tensor  # (layers, experts)


class Model(nn.Module):
    """Decoder with tied input and output embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(
            torch.randn(shape.vocab_size, shape.hidden_size) * shape.initializer_range
        )
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden_size))

    def hidden(self, tokens: Tensor, low: torch.dtype) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Final states (batch, length, hidden), router logits and chosen experts of every layer."""
        cos, sin = rotary(self.shape, tokens.shape[1])
        x = F.embedding(tokens, self.embedding)
        gates, choices = [], []
        for layer in self.layers:
            x, logits, chosen = layer(x, cos, sin, low)
            gates.append(logits)
            choices.append(chosen)
        return F.rms_norm(x, (self.shape.hidden_size,), self.norm, self.shape.rms_norm_eps), gates, choices

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, length, vocabulary) in float32."""
        return F.linear(self.hidden(tokens, torch.float32)[0], self.embedding)

    def losses(self, tokens: Tensor, targets: Tensor, shares: Tensor) -> Losses:
        """Losses of predicting targets from tokens, both (batch, length); a target of -100 does not count.

        The balance weighs the gates' probabilities by `shares` (layers, experts; rows sum to 1), the
        assignments of recent batches: what counts is balance over all text, not within a few rows.
        """
        with torch.autocast("cpu", torch.bfloat16):
            states, gates, choices = self.hidden(tokens, torch.bfloat16)
            logits = F.linear(states.to(torch.bfloat16), self.embedding).flatten(0, 1)
        text = F.cross_entropy(logits.float(), targets.flatten(), ignore_index=-100)
        experts = self.shape.num_local_experts
        gate = torch.stack(gates)
        # Per layer, not pooled over the layers as in transformers, where layers can compensate each other.
        load = shares * experts * self.shape.num_experts_per_tok
        balance = (load * gate.softmax(-1).mean(1)).sum(-1).mean()
        counts = torch.stack([torch.bincount(chosen.view(-1), minlength=experts) for chosen in choices])
        return Losses(text, balance, gate.logsumexp(-1).square().mean(), counts)

    def tensors(self) -> dict[str, Tensor]:
        """Weights under Mixtral's names; views of the parameters."""
        found = {"model.embed_tokens.weight": self.embedding.data, "model.norm.weight": self.norm.data}
        shape = self.shape
        keys = shape.num_key_value_heads * shape.head_dim
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            prefix = f"model.layers.{index}."
            q, k, v = torch.split(layer.qkv.data, [shape.hidden_size, keys, keys])
            for name, tensor in (("q", q), ("k", k), ("v", v), ("o", layer.o.data)):
                found[f"{prefix}self_attn.{name}_proj.weight"] = tensor
            found[prefix + "input_layernorm.weight"] = layer.input_norm.data
            found[prefix + "post_attention_layernorm.weight"] = layer.moe_norm.data
            found[prefix + "block_sparse_moe.gate.weight"] = layer.gate.data
            for expert, (w13, w2) in enumerate(zip(layer.w13, layer.w2, strict=True)):
                w1, w3 = w13.data.chunk(2)
                for name, tensor in (("w1", w1), ("w2", w2.data), ("w3", w3)):
                    found[f"{prefix}block_sparse_moe.experts.{expert}.{name}.weight"] = tensor
        return found

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Take the weights of `folder`/model.safetensors."""
        stored = load_file(folder / "model.safetensors")
        for name, tensor in self.tensors().items():
            tensor.copy_(stored[name])


def export(model: Model, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json, generation_config.json and model.safetensors; each file is replaced atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **asdict(model.shape),
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "head_dim": model.shape.head_dim,
        "hidden_act": "silu",
        "output_router_logits": False,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
    }
    generation = {"bos_token_id": 0, "eos_token_id": [1, 6], "pad_token_id": 2, "do_sample": False}
    for name, values in (("config.json", config), ("generation_config.json", generation)):
        with atomic_file(folder / name, SHARED) as file:
            file.write(json.dumps(values, indent=2, sort_keys=True).encode() + b"\n")
    tensors = {name: tensor.to(dtype).contiguous().clone() for name, tensor in model.tensors().items()}
    with atomic_file(folder / "model.safetensors", SHARED) as file:
        file.write(save(tensors, metadata={"format": "pt"}))
