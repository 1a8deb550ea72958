"""The input of `planner.py`: three models' shapes, a text's routing, costs and a calibration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import FloatArray
from pipeline.policies.calibration import Calibration
from pipeline.policies.costs import Costs
from shm.layout import ExpertShape, StoreLayout, format_named, suitable_tile

LAYERS = 32
KERNEL_GBPS = 30  # one layer's experts are read from host memory at this rate


@dataclass(frozen=True)
class Model:
    """A model's experts in int4, with 128 weights to a scale."""

    name: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int

    @property
    def layout(self) -> StoreLayout:
        tile_format = format_named("int4-g128")
        tile = suitable_tile(self.hidden, self.intermediate, tile_format)
        return StoreLayout(
            ExpertShape(LAYERS, self.experts, self.hidden, self.intermediate, tile), tile_format
        )

    @property
    def kernel_us(self) -> float:
        """Microseconds to compute one token's experts of a layer on the host."""
        layout = self.layout
        return self.top_k * layout.tile_bytes * layout.shape.tiles / KERNEL_GBPS / 1e3

    @property
    def costs(self) -> Costs:
        """30 GB/s on the host, 300 on the device, 12 on the link."""
        second = self.layout.tile_bytes / 1e9
        rows = (1, 4, 16, 64)
        host = tuple(second / 30 * factor for factor in (1.0, 1.3, 3.0, 10.0))
        device = tuple(second / 300 * factor for factor in (1.0, 1.0, 1.2, 2.0))
        return Costs(rows, host, device, second / 12, 1e-4)


MODELS = (
    Model("Mixtral-8x7B", 8, 2, 4096, 14336),
    Model("DeepSeek-V2-Lite", 64, 6, 2048, 1408),
    Model("Qwen3-30B-A3B", 128, 8, 2048, 768),
)


class Text:
    """Router logits of a text's tokens: some experts are popular, a token's resemble those of the one before,
    and a layer's routing is predicted the worse the farther away the input is taken."""

    def __init__(self, model: Model, tokens: int) -> None:
        rng = np.random.default_rng(0)
        popular = rng.normal(0, 0.7, (LAYERS, model.experts))
        drift = rng.normal(0, 1, (tokens, LAYERS, model.experts))
        for token in range(1, tokens):
            drift[token] = 0.6 * drift[token - 1] + 0.8 * drift[token]
        self.logits = (1.5 * (popular + drift)).astype(np.float32)  # [T, L, E]
        self._error = rng.normal(0, 0.6, self.logits.shape).astype(np.float32)

    def probe(self, tokens: slice, layer: int, of: int) -> FloatArray:
        """Layer `of`'s router on this layer's input, [tokens, E]; of the next tokens where `of` is 0."""
        if of > layer:
            at, distance = np.arange(tokens.start, tokens.stop), of - layer
        else:
            at, distance = np.arange(tokens.start, tokens.stop) + 1, 1
        at = np.minimum(at, len(self.logits) - 1)
        predicted: FloatArray = self.logits[at, of] + distance * self._error[at, of]
        return predicted


def calibrated(model: Model, text: Text) -> Calibration:
    """Arrays as a calibration of this text would give them."""
    chosen = np.argsort(-text.logits, axis=2)[:, :, : model.top_k]  # [T, L, k]
    counts = np.stack([np.bincount(chosen[:, i].ravel(), minlength=model.experts) for i in range(LAYERS)])
    needed = np.random.default_rng(1).dirichlet(np.ones(model.top_k), LAYERS).astype(np.float32)
    needed = np.concatenate([np.zeros((LAYERS, 1), np.float32), needed], axis=1)
    accuracy = np.full(LAYERS, 0.85, np.float32)
    predictors = ("raw", "residual", "first")
    return Calibration(
        decode_counts=counts.astype(np.int64),
        residual_logits=np.full((LAYERS - 1, model.experts), 0.01, np.float32),
        accuracy=dict.fromkeys(predictors, accuracy),
        kept=np.stack([needed, needed], axis=1),
        gated_accuracy=dict.fromkeys(predictors, np.stack([accuracy, accuracy], axis=1)),
        sensitivity=np.geomspace(40, 0.02, LAYERS).astype(np.float32),  # Mixtral's fall like this
        threshold=0.005,
        first_gate=np.zeros((model.experts, 64), np.float32),
        hit_rates=_hit_rates(counts),
    )


def _hit_rates(counts: NDArray[np.int64]) -> FloatArray:
    """Returns the residencies of a cache that holds the most used experts, [L, E + 1]."""
    ranked = -np.sort(-counts, axis=1)
    held = np.concatenate((np.zeros((LAYERS, 1)), ranked.cumsum(axis=1)), axis=1)
    rates: FloatArray = (held / held[:, -1:]).astype(np.float32)
    return rates
