"""Statistics of the model's routing: shares, similarity of prefill and decode, and predictability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Trace:
    """Input and choices of every layer's gate, for tokens (rows, length) flattened into N."""

    logits: Tensor  # (rows, length, vocabulary)
    inputs: Tensor  # (layers, N, hidden): the gates' inputs, after the post-attention norm
    chosen: Tensor  # (layers, N, k): expert indices


@torch.no_grad()
def trace(model: Any, tokens: Tensor) -> Trace:
    """Run transformers' Mixtral over tokens (rows, length) and record its gates."""
    inputs: list[Tensor] = []
    chosen: list[Tensor] = []

    def record(_module: Any, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        inputs.append(args[0].reshape(-1, args[0].shape[-1]))
        chosen.append(output[2])

    hooks = [layer.mlp.gate.register_forward_hook(record) for layer in model.model.layers]
    try:
        logits = model(input_ids=tokens, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return Trace(logits, torch.stack(inputs), torch.stack(chosen))


def counts(chosen: Tensor, experts: int) -> Tensor:
    """Assignments per layer and expert (layers, experts) of chosen (layers, N, k)."""
    return F.one_hot(chosen, experts).sum((1, 2)).float()


def total_variation(shares: Tensor) -> Tensor:
    """Mean total variation distance (0 to 1) of two kinds, per layer; shares (kinds, layers, experts)."""
    pairs = torch.combinations(torch.arange(shares.shape[0]))
    return (shares[pairs[:, 0]] - shares[pairs[:, 1]]).abs().sum(-1).mean(0) / 2


def jensen_shannon(shares: Tensor) -> Tensor:
    """Jensen-Shannon divergence of the kinds in bits, per layer; shares (kinds, layers, experts)."""

    def entropy(p: Tensor) -> Tensor:
        return -(p * p.clamp_min(1e-12).log2()).sum(-1)

    return entropy(shares.mean(0)) - entropy(shares).mean(0)


def phase_similarity(model: Any, prompts: Tensor, new_tokens: int, temperature: float) -> Tensor:
    """Cosine of prefill and decode activation counts, per prompt (rows,), as the mean over the layers.

    prompts is (rows, length). A temperature of 0 decodes greedily.
    """
    settings: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": new_tokens}
    if temperature > 0:
        settings |= {"temperature": temperature, "top_k": 0}
    full = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), min_new_tokens=new_tokens, **settings
    )
    rows, length = full.shape
    # Routing depends on earlier tokens only: one pass over the whole text gives the choices of both phases.
    chosen = trace(model, full).chosen
    layers, experts = chosen.shape[0], model.config.num_local_experts
    per_token = F.one_hot(chosen.view(layers, rows, length, -1), experts).sum(3).float()
    split = prompts.shape[1]
    prefill, decode = per_token[:, :, :split].sum(2), per_token[:, :, split:-1].sum(2)
    return F.cosine_similarity(prefill, decode, dim=-1).mean(0)


def next_gate_accuracy(model: Any, calibration: Trace, judged: Trace) -> tuple[list[float], list[float]]:
    """Share of the next layer's experts that its gate chooses from this layer's gate input, raw and
    corrected.

    A value for every layer but the last. The correction adds the mean step from one gate input
    to the next over the calibration tokens.
    """
    raw: list[float] = []
    corrected: list[float] = []
    gates = [layer.mlp.gate.weight for layer in model.model.layers]
    for layer, gate in enumerate(gates[1:]):
        x, true = judged.inputs[layer], judged.chosen[layer + 1]
        step = (calibration.inputs[layer + 1] - calibration.inputs[layer]).mean(0)
        for results, guess_input in ((raw, x), (corrected, x + step)):
            guess = F.linear(guess_input, gate).topk(true.shape[1], dim=-1).indices
            found = (guess.unsqueeze(2) == true.unsqueeze(1)).any(1)
            results.append(float(found.float().mean()))
    return raw, corrected
