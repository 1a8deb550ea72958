"""Measures what it costs to leave channels out: perplexity and the accuracy on multiple-choice items of the
embedded model, by format and by the share of the channels that each token leaves out.

    python -m benchmarks.sparsity [--windows N] [--items N] [--formats floe-int4,...] [--sparsities 0,0.5,...]

The model runs in transformers in float32, with experts made of the bytes that a store would hold; the
kernels' rounding of activations is left out. A layer's threshold is the quantile of |u|, u = up x, over the
first half of the held-out windows; perplexity is of the second half. The mask acts on every token. An item
is answered with the choice of the greatest log-probability.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from benchmarks.quality import BATCH, perplexity, windows
from launch.score.evaluate import Item, read_items
from pipeline.assets import heldout, items, model_dir
from shm.layout import FORMATS, ExpertShape, FloeFormat, StoreLayout
from workers.kernels.reference import tile_numbers

QUANTILES = 2000
UNQUANTIZED = "bf16"


class MaskedExperts(torch.nn.Module):
    """Replaces a layer's experts: those of a format, decoded, and a threshold of |u|."""

    def __init__(self, experts: Any, name: str) -> None:
        """experts: transformers' MixtralExperts with float32 weights."""
        super().__init__()
        gate_up, down = (w.detach().numpy() for w in (experts.gate_up_proj, experts.down_proj))
        number, hidden, intermediate = down.shape
        layout = StoreLayout(ExpertShape(1, number, hidden, intermediate, intermediate), FORMATS[name])
        self.weights = []
        tile, head = np.zeros(layout.expert_stride, np.uint8), np.zeros(layout.head_stride, np.uint8)
        for expert in range(number):
            gate, up = np.split(gate_up[expert], 2)
            layout.encode_expert(gate, up, down[expert], tile, head)
            body, head_part = layout.tile_of(tile, head, 0)
            parts = torch.from_numpy(body), torch.from_numpy(head_part)
            self.weights.append(tile_numbers(layout, *parts).clone())
        self.threshold = 0.0
        self.sizes: list[Tensor] | None = None  # of |u|, where they are collected
        self.mass = torch.zeros(2, dtype=torch.float64)  # sums of |u|: of all, and of those left out

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [R, H]; chosen and weights [R, k]: [R, H]."""
        y = torch.zeros_like(x)
        for expert, (gate, up, down) in enumerate(self.weights):
            rows, place = torch.where(chosen == expert)
            if not len(rows):
                continue
            u = x[rows] @ up.T
            if self.sizes is not None:
                self.sizes.append(u.abs().flatten())
            kept = u.abs() >= self.threshold
            self.mass += torch.stack([u.abs().sum(), u.abs()[~kept].sum()])
            part = (functional.silu(x[rows] @ gate.T) * u * kept) @ down
            y.index_add_(0, rows, part * weights[rows, place, None])
        return y

    def quantiles(self) -> Tensor:
        assert self.sizes is not None
        found = torch.cat(self.sizes).numpy()
        self.sizes = None
        return torch.from_numpy(np.quantile(found, np.linspace(0, 1, QUANTILES + 1)))


class Questions:
    """Items as padded token ids: a row for each choice, and from which token on choices are compared."""

    def __init__(self, tokenizer: Tokenizer, questions: list[Item]) -> None:
        self.answers = [item.answer for item in questions]
        self.groups: list[tuple[list[list[int]], int]] = []
        for item in questions:
            texts = [item.context, *(item.context + choice for choice in item.choices)]
            ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
            shared = 0
            while all(shared < len(row) and row[shared] == ids[0][shared] for row in ids):
                shared += 1
            self.groups.append((ids[1:], max(shared, 1)))

    def accuracy(self, model: Any) -> float:
        right = 0
        for start in range(0, len(self.groups), BATCH):
            group = self.groups[start : start + BATCH]
            rows = [row for choices, _ in group for row in choices]
            padded = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
            for row, ids in enumerate(rows):
                padded[row, : len(ids)] = torch.tensor(ids)
            logits = model(input_ids=padded, use_cache=False).logits[:, :-1].log_softmax(dim=-1)
            found = logits.gather(2, padded[:, 1:, None])[..., 0]
            row = 0
            for (choices, first), answer in zip(group, self.answers[start:], strict=False):
                sums = [
                    float(found[row + i, first - 1 : len(ids) - 1].sum()) for i, ids in enumerate(choices)
                ]
                right += max(range(len(sums)), key=sums.__getitem__) == answer
                row += len(choices)
        return right / len(self.groups)


def measure(
    formats: list[str], sparsities: list[float], limit: int | None, most_items: int | None
) -> Iterator[dict[str, Any]]:
    """A row for the unquantized model, then one for each format and sparsity."""
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    texts = [windows(tokenizer, path.read_text(encoding="utf-8"))[:limit] for path in heldout().values()]
    calibration = torch.cat([text[: len(text) // 2] for text in texts])
    held_out = torch.cat([text[len(text) // 2 :] for text in texts])
    questions = Questions(tokenizer, read_items(items())[:most_items])
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32)
    originals = [layer.mlp.experts for layer in model.model.layers]
    base: dict[str, float] = {}
    for name in [UNQUANTIZED, *formats]:
        layers = [MaskedExperts(experts, name) for experts in originals]
        for layer, experts in zip(model.model.layers, layers, strict=True):
            layer.mlp.experts = experts
        floe = isinstance(FORMATS[name], FloeFormat)
        quantiles = []
        if floe and any(sparsities):
            for experts in layers:
                experts.sizes = []
            perplexity(model, calibration)
            quantiles = [experts.quantiles() for experts in layers]
        for sparsity in sparsities if floe else [0.0]:
            for experts, table in zip(layers, quantiles, strict=False):
                experts.threshold = float(table[round(sparsity * QUANTILES)]) if sparsity else 0.0
                experts.mass.zero_()
            found = {"perplexity": perplexity(model, held_out)}
            mass = torch.stack([experts.mass for experts in layers]).sum(dim=0)
            found["accuracy"] = questions.accuracy(model)
            base = base or found
            worse = {
                "perplexity_percent": 100 * (found["perplexity"] / base["perplexity"] - 1),
                "accuracy_percent": 100 * (found["accuracy"] / base["accuracy"] - 1),
            }
            bits = bits_read(name, sparsity)
            left = float(mass[1] / mass[0]) if floe else 0.0
            yield {"format": name, "sparsity": sparsity, "bits": bits, "left": left} | found | worse


def bits_read(name: str, sparsity: float) -> float:
    """Returns the bytes of each weight of one of Mixtral-8x7B's experts that a token uses."""
    tile_format, hidden, channels = FORMATS[name], 4096, 14336
    head = tile_format.head_bytes(hidden, channels)
    body = tile_format.tile_bytes(hidden, channels)
    return 8 * (head + (1 - sparsity) * body) / (3 * hidden * channels)


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, help="of 512 tokens, of each kind of text (default: all)")
    parser.add_argument("--items", type=int, help="multiple-choice items (default: all)")
    parser.add_argument("--formats", default="int4,floe,floe-int4,floe-u4-int4,floe-u8-int4")
    parser.add_argument("--sparsities", default="0,0.5,0.7,0.8,0.9")
    arguments = parser.parse_args()
    formats = arguments.formats.split(",")
    if unknown := [name for name in formats if name not in FORMATS]:
        parser.error(f"unknown format {unknown[0]}; known are {', '.join(FORMATS)}")
    sparsities = [float(text) for text in arguments.sparsities.split(",")]
    if not all(0 <= sparsity < 1 for sparsity in sparsities):
        parser.error(f"sparsities are numbers from 0 to 1, not {arguments.sparsities}")
    if arguments.windows is not None and arguments.windows < 2:
        parser.error(f"half of the windows set thresholds: 2 or more are needed, not {arguments.windows}")
    with torch.inference_mode():
        for row in measure(formats, sparsities, arguments.windows, arguments.items):
            line = (
                "{format:14} left out {sparsity:4.0%} ({left:5.1%} of |u|)  {bits:5.2f} bits  perplexity"
                " {perplexity:8.3f} {perplexity_percent:+7.2f} %  accuracy {accuracy:6.1%}"
                " {accuracy_percent:+6.2f} %"
            ).format(**row)
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
