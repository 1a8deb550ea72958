"""transformers computing on the same weights that a quantized format keeps, with activations rounded by that
format's arithmetic: the only difference to the engine is the rounding of float32 sums.

Activations are rounded to int8 steps. A float32 sum that ends on the other side of such a step's edge moves
a code by one, and that moves others in later layers. The oracle itself shows how far: it is run with noise of
float32's size in its hidden states, several times, and the engine's log-probabilities may be no further off
(rounding.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from decoding import decode, decode_matrix
from oracle import Oracle
from rounding import Rounding, Rows
from torch import Tensor, nn
from torch.nn import functional

from shm.blocks import BlockFormat
from shm.layout import FORMATS, ExpertShape, StoreLayout
from workers.kernels.reference import int8_steps

# Linear modules that no format quantizes: a gate of one row, and what latents are expanded by.
KEPT = ("shared_expert_gate", "kv_b_proj")
# Relative. A float32 sum of some hundred numbers is off by as much; and beside a quantized backbone
# attention computes in bfloat16, which rounds as much.
NOISE = {"f32": 3e-7, "int8": 2**-9, "int4": 2**-9}
# How much more all of an engine's sums may do than noise in one place. Beside quantized backbones they do
# 1.02 to 1.15 times as much on average over the texts, 1.01 to 1.10 over those alone, 1.09 in calm rows.
FACTOR = 1.4


class QuantizedOracle(Oracle):
    """Routed experts in one format; the other matrices in another, or float32."""

    def __init__(self, folder: Path, experts: str, backbone: str) -> None:
        super().__init__(folder, torch.float32)
        self._noise = NOISE[backbone]
        expert_format = FORMATS[experts]
        assert isinstance(expert_format, BlockFormat)
        for module in self.experts:
            replace_experts(module, expert_format)
        if backbone == "f32":
            return
        for name, module in self.model.named_modules():
            if type(module) is nn.Linear and not name.endswith(KEPT):
                replace_linear(module, FORMATS[backbone])
        for name, weight in self.model.named_parameters():
            if name.endswith(("embed_tokens.weight", "kv_b_proj.weight")):
                weight.data = weight.data.bfloat16().float()  # what is not quantized beside what is

    def rounding(self, texts: Sequence[Sequence[int]], exact: Sequence[Rows], seeds: int) -> Rounding:
        """The distances from `exact` that noise causes."""
        return Rounding.of(self.noisy(texts, self._noise, seeds), exact, FACTOR)


def replace_experts(module: nn.Module, format: BlockFormat) -> None:
    every = list(zip(*matrices(module), strict=True))
    intermediate, hidden = every[0][0].shape
    tile = -(-intermediate // format.granularity) * format.granularity
    layout = StoreLayout(ExpertShape(1, 1, hidden, intermediate, tile), format)
    kept = []
    for gate, up, down in every:
        data = np.zeros(layout.expert_stride, np.uint8)
        layout.encode_expert(gate.numpy(), up.numpy(), down.numpy(), data)
        kept.append(torch.from_numpy(decode(format, data[: layout.tile_bytes], hidden, tile)))
    biased = hasattr(module, "down_proj_bias")

    def inner_of(x: Tensor, expert: int, gate: Tensor, up: Tensor) -> Tensor:
        if not biased:
            return functional.silu(x @ gate.T) * (x @ up.T)
        both = torch.stack((x @ gate.T, x @ up.T), dim=2)  # padded to whole groups, unlike the biases
        both[:, :intermediate] += module.gate_up_proj_bias[expert].view(intermediate, 2)
        return module._apply_gate(both.flatten(1))

    def forward(hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        x = int8_steps(hidden_states, format.group)[:, :hidden]
        y = torch.zeros_like(hidden_states)
        for expert, (gate, up, down) in enumerate(kept):
            rows, places = torch.where(index == expert)
            if len(rows) == 0:
                continue
            inner = inner_of(x[rows], expert, gate, up)
            part = int8_steps(inner, format.group) @ down
            part = part + module.down_proj_bias[expert] if biased else part
            y.index_add_(0, rows, part * weights[rows, places, None])
        return y

    module.decoded = kept
    module.forward = forward


def matrices(module: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Gate and up [E, I, H] and down [E, H, I], float32."""
    both, down = module.gate_up_proj.detach().float(), module.down_proj.detach().float()
    if module.is_transposed:
        gate, up = both[:, :, ::2], both[:, :, 1::2]
        return gate.transpose(1, 2), up.transpose(1, 2), down.transpose(1, 2)
    gate, up = both.chunk(2, dim=1)
    return gate, up, down


def replace_linear(module: nn.Linear, format: BlockFormat) -> None:
    n, k = module.weight.shape
    data = np.zeros(format.matrix_bytes(n, k), np.uint8)
    format.encode_matrix(module.weight.detach().float().numpy(), data)
    kept = torch.from_numpy(decode_matrix(format, data, n, k))
    module.forward = lambda x: functional.linear(
        int8_steps(x.flatten(0, -2), format.group)[:, :k], kept, module.bias
    ).unflatten(0, x.shape[:-1])
