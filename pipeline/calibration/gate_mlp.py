"""FloE's predictor between experts (2025, section 3.3.1): in the first layers an MLP H -> 512 -> E names the
next layer's experts, elsewhere the next gate does.

Ours corrects the next gate instead of replacing it, so that it is never much worse:

    logits of layer t, from x of layer t - 1:    G_t x + W_out silu(W_in x)

x is the input of a layer's router, G_t layer t's router. W_in starts at random and W_out at zero, the next
gate itself; both minimise the mean of KL(softmax(layer t's own logits) || softmax(these)).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.arrays import FloatArray, Phase
from pipeline.engine.driver import LayerDecision
from pipeline.policies.calibration import Floats
from pipeline.policies.view import ModelShape

LAYERS = 3  # that are predicted so: 1 to 3
WIDTH = 512
HELD_OUT = 0.2  # share of the rows: the last ones, because neighbours in a text are correlated
BATCH = 256  # rows of a step
RATE, DECAY = 1e-3, 0.05  # of AdamW
EPOCHS, PATIENCE = 40, 4  # at most, and without a better divergence on the held-out rows


def predicted_layers(shape: ModelShape) -> int:
    """P: the layers 1 to P have an MLP."""
    return min(LAYERS, shape.layers - 1)


@dataclass(frozen=True)
class GateMlps:
    """Of P layers: W_in [P, WIDTH, H] and W_out [P, E, WIDTH]."""

    inner: Floats
    outer: Floats

    def logits(self, layer: int, x: FloatArray) -> FloatArray:
        """What is added to the next gate's logits for `layer`, from 1 on: float32 [R, E]. x [R, H]: of the
        layer before."""
        hidden = x @ self.inner[layer - 1].T
        added: FloatArray = (hidden / (1 + np.exp(-hidden))) @ self.outer[layer - 1].T
        return added


class GatePairs:
    """An observer that collects what the MLPs are trained on: of each predicted layer x of the layer before,
    the next gate's logits and the layer's own."""

    def __init__(self, shape: ModelShape, every: int) -> None:
        """`every`: of that many rows one is kept."""
        self.layers, self._every = predicted_layers(shape), every
        self._rows = 0
        self._kept = slice(0)
        self._pairs: list[tuple[list[FloatArray], ...]] = [([], [], []) for _ in range(self.layers)]

    def probes(self, layer: int) -> tuple[int, ...]:
        return (layer + 1,) if layer < self.layers else ()

    def begin(self, phase: Phase, sequences: tuple[int, ...]) -> None:
        self._kept = slice(-self._rows % self._every, None, self._every)
        self._rows += len(sequences)

    def layer(self, decision: LayerDecision[object], x: FloatArray) -> None:
        layer, signals = decision.layer, decision.signals
        if 0 < layer <= self.layers:
            assert signals.logits is not None
            self._pairs[layer - 1][2].append(signals.logits[self._kept].copy())
        if layer < self.layers:
            self._pairs[layer][0].append(x[self._kept].copy())
            self._pairs[layer][1].append(signals.probes[layer + 1][self._kept].copy())

    def end(self) -> None:
        """Each layer was taken when it was observed."""

    def train(self, seed: int, tick: Callable[[], None]) -> GateMlps | None:
        """None for a model of one layer, or fewer than 2 rows. `tick` is called at each epoch."""
        found = []
        for layer, parts in enumerate(self._pairs):
            x, ahead, own = (np.concatenate(part) for part in parts)
            if len(x) < 2:
                return None
            found.append(train_mlp(x, ahead, own, seed + layer, tick))
        if not found:
            return None
        inner, outer = (np.stack(part) for part in zip(*found, strict=True))
        return GateMlps(inner, outer)


@torch.inference_mode(False)
def train_mlp(
    x: FloatArray, ahead: FloatArray, own: FloatArray, seed: int, tick: Callable[[], None] = lambda: None
) -> tuple[Floats, Floats]:
    """W_in [WIDTH, H] and W_out [E, WIDTH]. x [N, H] of the layer before; `ahead` and `own` [N, E]: the next
    gate's logits and the layer's own. The last fifth of the rows is held out: it stops the training early and
    chooses the epoch; W_out is zero where no epoch is better than the next gate."""
    trained = len(x) - max(1, round(len(x) * HELD_OUT))
    scale = 1 / max(float(np.sqrt(np.square(x[:trained]).mean())), 1e-12)
    inputs, base = torch.from_numpy(x) * scale, torch.from_numpy(ahead)
    truth = torch.from_numpy(own).log_softmax(dim=1)
    random = torch.Generator().manual_seed(seed)
    inner = torch.randn(WIDTH, x.shape[1], generator=random) / x.shape[1] ** 0.5
    outer = torch.zeros(own.shape[1], WIDTH)
    best, least, worse = outer.clone(), float("inf"), -1
    best_inner = inner.clone()
    optimiser = torch.optim.AdamW([inner.requires_grad_(), outer.requires_grad_()], RATE, weight_decay=DECAY)

    def divergence(rows: Tensor | slice) -> Tensor:
        hidden = functional.silu(inputs[rows] @ inner.T)
        found = (base[rows] + hidden @ outer.T).log_softmax(dim=1)
        return functional.kl_div(found, truth[rows], reduction="batchmean", log_target=True)

    with torch.enable_grad():
        for _ in range(EPOCHS + 1):
            tick()
            with torch.no_grad():
                held = float(divergence(slice(trained, None)))
            worse += 1
            if held < least:
                best, best_inner, least, worse = outer.detach().clone(), inner.detach().clone(), held, 0
            if worse == PATIENCE:
                break
            order = torch.randperm(trained, generator=random)
            for start in range(0, trained, BATCH):
                rows = order[start : start + BATCH]
                optimiser.zero_grad()
                divergence(rows).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
    return (best_inner * scale).numpy(), best.numpy()
