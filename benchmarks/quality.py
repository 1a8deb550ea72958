"""Measures the quality cost of expert formats: perplexity on the embedded model's held-out text.

    python -m benchmarks.quality [--windows N] [--formats bf16,int8,...]

The model runs in transformers in float32, its experts in the reference kernel on the bytes that a store would
hold, so that rounding of weights and of activations both count. `int4-rtn` and `int4-g128-rtn` round to
nearest: the baseline of the optimisation of scale and zero. Of a floe format all channels are computed
(`benchmarks/sparsity.py` leaves some out).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from pipeline.assets import heldout, model_dir
from shm.codes import Codes
from shm.layout import FORMATS, Bytes, ExpertShape, Float32, FloeFormat, Int4, StoreLayout, TileFormat
from shm.mask import DENSE
from shm.quantize import encode_blocks
from workers.kernels.reference import ReferenceChannels, ReferenceKernel

BATCH = 16  # windows at a time
WINDOW = 512  # tokens
DEFAULT = "bf16,f32,int8,int4,int2,int4-rtn,int4-g128,int4-g128-rtn,floe-u8-int4,floe-u4-int4,floe-int4"


def windows(tokenizer: Tokenizer, text: str, length: int = WINDOW) -> Tensor:
    """Returns the text's tokens, without special ones, as (rows, length); a shorter remainder is dropped."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    rows = len(ids) // length
    return torch.tensor(ids[: rows * length]).view(rows, length)


class RoundToNearest(Int4):
    """int4 without the optimisation of scale and zero."""

    def __init__(self, group: int) -> None:
        super().__init__(group)
        self.name += "-rtn"

    def encode_part(self, w: Float32 | Codes, out: Bytes, factor: float = 1.0) -> None:
        encode_blocks(w.values() if isinstance(w, Codes) else w, 4, self.group, out, steps=0)


MEASURED: dict[str, TileFormat] = FORMATS | {f.name: f for f in (RoundToNearest(64), RoundToNearest(128))}


class EncodedExperts(torch.nn.Module):
    """Replaces a layer's experts: the reference kernel on their encoded bytes."""

    def __init__(self, experts: Any, format: TileFormat) -> None:
        """experts: transformers' MixtralExperts with float32 weights."""
        super().__init__()
        gate_up, down = (w.detach().numpy() for w in (experts.gate_up_proj, experts.down_proj))
        number, hidden, intermediate = down.shape
        layout = StoreLayout(ExpertShape(1, number, hidden, intermediate, intermediate), format)
        self.kernel = (ReferenceChannels if isinstance(format, FloeFormat) else ReferenceKernel)(layout)
        tiles = np.zeros((number, layout.expert_stride), np.uint8)
        heads = np.zeros((number, layout.head_stride), np.uint8)
        for expert in range(number):
            gate, up = np.split(gate_up[expert], 2)
            layout.encode_expert(gate, up, down[expert], tiles[expert], heads[expert])
        self.tiles = torch.from_numpy(tiles[:, : layout.tile_bytes])
        self.heads = torch.from_numpy(heads[:, : layout.head_bytes])

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [R, H]; chosen and weights [R, k]: [R, H]."""
        y = torch.zeros_like(x)
        activations: Any = self.kernel.activations(x)
        for expert, (heads, tile) in enumerate(zip(self.heads, self.tiles, strict=True)):
            rows, place = torch.where(chosen == expert)
            if not len(rows):
                continue
            if isinstance(self.kernel, ReferenceChannels):
                part, _ = self.kernel.compute(heads, tile, activations, rows, DENSE)
            else:
                part = self.kernel.compute(tile, activations, rows)
            y.index_add_(0, rows, part * weights[rows, place, None])
        return y


def perplexity(model: Any, tokens: Tensor) -> float:
    """Perplexity of every token except each window's first; tokens [windows, length]."""
    total = 0.0
    for rows in torch.split(tokens, BATCH):
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1].flatten(0, 1)
        total += float(functional.cross_entropy(logits, rows[:, 1:].flatten(), reduction="sum"))
    return math.exp(total / tokens[:, 1:].numel())


def measure(formats: list[str], limit: int | None) -> Iterator[dict[str, Any]]:
    """One row for each format; `limit`: windows of each kind of text."""
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    texts = [windows(tokenizer, path.read_text(encoding="utf-8"))[:limit] for path in heldout().values()]
    tokens = torch.cat(texts)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32)
    originals = [layer.mlp.experts for layer in model.model.layers]
    baseline: float | None = None
    for name in formats:
        for layer, experts in zip(model.model.layers, originals, strict=True):
            layer.mlp.experts = EncodedExperts(experts, MEASURED[name])
        found = perplexity(model, tokens)
        baseline = baseline or found
        yield {"format": name, "perplexity": found, "worse_percent": 100 * (found / baseline - 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, help="of 512 tokens, of each kind of text (default: all)")
    parser.add_argument("--formats", default=DEFAULT)
    arguments = parser.parse_args()
    formats = arguments.formats.split(",")
    if unknown := [name for name in formats if name not in MEASURED]:
        parser.error(f"unknown format {unknown[0]}; known are {', '.join(MEASURED)}")
    with torch.inference_mode():
        for row in measure(formats, arguments.windows):
            found = "{format:14} perplexity {perplexity:8.4f} {worse_percent:+7.3f} %".format(**row)
            print(found, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
