"""How much the inputs of consecutive layers' experts have in common: the embedded model on held-out text."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from benchmarks.quality import windows
from pipeline.assets import heldout, model_dir

WINDOWS, EVERY = 2, 16  # windows of each kind of text; of so many tokens one has its channels compared


class Alike(NamedTuple):
    """Of each layer behind the first one, beside the layer before it."""

    cosine: list[float]  # of the two inputs, mean over tokens
    corrected: list[float]  # with the mean difference added, as DALI predicts
    channels: list[float]  # share of the kept fifth that the layer before's input names, as FloE predicts


@torch.inference_mode()
def alike() -> Alike:
    """Returns how alike they are: means are of each kind of text's first window, the rest of its last."""
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    texts = [windows(tokenizer, path.read_text(encoding="utf-8"))[:WINDOWS] for path in heldout().values()]
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32)
    inputs: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(partial(_keep, inputs))
    model(input_ids=torch.stack([rows[0] for rows in texts]), use_cache=False)
    means = [x.flatten(0, 1).mean(0) for x in inputs]
    inputs.clear()
    model(input_ids=torch.stack([rows[-1] for rows in texts]), use_cache=False)
    found = Alike([], [], [])
    for place, layer in enumerate(model.model.layers[1:], start=1):
        before, x = inputs[place - 1].flatten(0, 1), inputs[place].flatten(0, 1)
        added = before + (means[place] - means[place - 1])
        found.cosine.append(float(functional.cosine_similarity(before, x).mean()))
        found.corrected.append(float(functional.cosine_similarity(added, x).mean()))
        found.channels.append(_named(layer.mlp, before[::EVERY], x[::EVERY]))
    return found


def _keep(inputs: list[Tensor], _: object, given: tuple[Tensor]) -> None:
    inputs.append(given[0])


def _named(experts: Any, before: Tensor, x: Tensor) -> float:
    """Returns the share of the channels with the largest fifth of |up x| that up names on the other input, of
    each token's two experts."""
    up = experts.experts.gate_up_proj.chunk(2, dim=1)[1]  # [E, I, H]
    chosen = functional.linear(x, experts.gate.weight).topk(2).indices
    kept = up.shape[1] // 5
    right = [
        torch.isin((up[e] @ b).abs().topk(kept).indices, (up[e] @ own).abs().topk(kept).indices)
        .float()
        .mean()
        for b, own, of in zip(before, x, chosen, strict=True)
        for e in of.tolist()
    ]
    return float(torch.stack(right).mean())
