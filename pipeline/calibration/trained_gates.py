"""Gates that a calibration trains to name experts early.

AdapMoE's for the first layer (section 4.3, equation 9): no layer precedes it, so a matrix G predicts its
experts from the last layer's x of the previous token. FloE's between experts (2025, dual predictors): in the
first layers an MLP names the next layer's experts. Ours corrects the next gate instead of replacing it, so
that it is never much worse:

    logits of layer t, from x of layer t - 1:    G_t x + W_out silu(W_in x) + V r

x is the input of a layer's router, G_t layer t's router, r the trajectory that FloE's predictor knows: the
token's routing weights in the layers before t. G, W_out and V start at zero, where all experts are equally
likely, or the next gate decides alone; W_in starts at random. All minimise the mean of
KL(softmax(a layer's own logits) || softmax(the gate's)). The last rows are held out, because neighbours in a
text are correlated: they stop the training early and choose the epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.arrays import FloatArray, Phase
from pipeline.engine.driver import LayerDecision
from pipeline.policies.calibration import Floats, Trajectory
from pipeline.policies.view import ModelShape

LAYERS = 3  # that have an MLP: 1 to 3
WIDTH = 512
HELD_OUT = 0.2  # share of the rows
BATCH = 256  # rows of a step
GATE_RATE = 0.05  # of Adam, divided by sqrt(H): about the change of a logit in a step
MLP_RATE, DECAY = 1e-3, 0.05  # of AdamW
STEEP = (
    32.0  # times as fast as the MLP, the matrix of the trajectory is trained: its inputs are few and small
)
EPOCHS, PATIENCE = 100, 5  # at most, and without a better divergence on the held-out rows

Rows = Tensor | slice


@torch.inference_mode(False)
def _fitted(
    parameters: Sequence[Tensor],
    logits: Callable[[Rows], Tensor],
    own: Tensor,
    rate: float,
    decay: float,
    random: torch.Generator,
    tick: Callable[[], None],
) -> list[Tensor]:
    """The parameters with which `logits` of these rows diverge least from `own` [N, E]. `tick` is called at
    each epoch."""
    trained = len(own) - max(1, round(len(own) * HELD_OUT))
    truth = own.log_softmax(dim=1)
    optimiser = torch.optim.AdamW([each.requires_grad_() for each in parameters], rate, weight_decay=decay)

    def divergence(rows: Rows) -> Tensor:
        guess = logits(rows).log_softmax(dim=1)
        return functional.kl_div(guess, truth[rows], reduction="batchmean", log_target=True)

    best, least, worse = list(parameters), float("inf"), -1
    with torch.enable_grad():
        for _ in range(EPOCHS + 1):
            tick()
            with torch.no_grad():
                held = float(divergence(slice(trained, None)))
            worse += 1
            if held < least:
                best, least, worse = [each.detach().clone() for each in parameters], held, 0
            if worse == PATIENCE:
                break
            order = torch.randperm(trained, generator=random)
            for start in range(0, trained, BATCH):
                optimiser.zero_grad()
                divergence(order[start : start + BATCH]).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
    return best


def _scaled(x: FloatArray) -> tuple[Tensor, float]:
    """x with a mean square of 1, and the factor that it was multiplied by."""
    scale = 1 / max(math.sqrt(np.square(x).mean()), 1e-12)
    return torch.from_numpy(x) * scale, scale


def train_first_gate(
    last: FloatArray, logits: FloatArray, seed: int, tick: Callable[[], None] = lambda: None
) -> Floats:
    """G [E, H]. last [N, H]: the last layer's x at token t; logits [N, E]: the first layer's router at token
    t + 1 of the same sequence; rows in the text's order. The same arrays and seed give the same matrix on the
    same machine. Raises ValueError for arrays of different lengths or of fewer than 2 rows."""
    if len(last) != len(logits) or len(last) < 2:
        raise ValueError(f"a first gate needs pairs of tokens, not {len(last)} and {len(logits)} rows")
    random = torch.Generator().manual_seed(seed)
    inputs, scale = _scaled(last)
    matrix = torch.zeros(logits.shape[1], last.shape[1])
    rate = GATE_RATE / math.sqrt(last.shape[1])
    own = torch.from_numpy(logits)
    (best,) = _fitted([matrix], lambda rows: inputs[rows] @ matrix.T, own, rate, 0.0, random, tick)
    gate: Floats = (best * scale).numpy()
    return gate


def predicted_layers(shape: ModelShape) -> int:
    """P: the layers 1 to P have an MLP."""
    return min(LAYERS, shape.layers - 1)


@dataclass(frozen=True)
class GateMlps:
    """MLPs of P layers: W_in [P, WIDTH, H], W_out [P, E, WIDTH] and V [P, E, P * E]."""

    inner: Floats
    outer: Floats
    history: Floats

    def logits(self, layer: int, x: FloatArray, trajectory: FloatArray) -> FloatArray:
        """Returns what is added to the next gate's logits for `layer`, from 1 on: float32 [R, E]. x [R, H]:
        of the layer before; `trajectory`: as a `Trajectory` has it there."""
        hidden = x @ self.inner[layer - 1].T
        added: FloatArray = (hidden / (1 + np.exp(-hidden))) @ self.outer[layer - 1].T
        added += trajectory @ self.history[layer - 1].T
        return added


class GatePairs:
    """An observer that collects what the MLPs are trained on: of each predicted layer x of the layer before,
    the trajectory, the next gate's logits and the layer's own."""

    def __init__(self, shape: ModelShape, every: int) -> None:
        """`every`: of that many rows one is kept."""
        self.layers, self._every = predicted_layers(shape), every
        self._rows = 0
        self._kept = slice(0)
        self._trajectory = Trajectory(self.layers, shape.experts)
        self._pairs: list[tuple[list[FloatArray], ...]] = [([], [], [], []) for _ in range(self.layers)]

    def probes(self, layer: int) -> tuple[int, ...]:
        return (layer + 1,) if layer < self.layers else ()

    def begin(self, phase: Phase, sequences: tuple[int, ...]) -> None:
        self._kept = slice(-self._rows % self._every, None, self._every)
        self._rows += len(sequences)

    def layer(self, decision: LayerDecision[object], x: FloatArray) -> None:
        layer, signals = decision.layer, decision.signals
        if 0 < layer <= self.layers:
            assert signals.logits is not None
            self._pairs[layer - 1][3].append(signals.logits[self._kept].copy())
        if layer < self.layers:
            self._trajectory.add(layer, *decision.gated.routing.pairs)
            seen = x, self._trajectory.weights, signals.probes[layer + 1]
            for part, array in zip(self._pairs[layer], seen, strict=False):
                part.append(array[self._kept].copy())

    def end(self) -> None:
        """Each layer was taken when it was observed."""

    def train(self, seed: int, tick: Callable[[], None]) -> GateMlps | None:
        """Train the MLPs; None for a model of one layer, or fewer than 2 rows. `tick` is called at each
        epoch."""
        trained = []
        for layer, parts in enumerate(self._pairs):
            x, trajectory, ahead, own = (np.concatenate(part) for part in parts)
            if len(x) < 2:
                return None
            trained.append(train_mlp(x, trajectory, ahead, own, seed + layer, tick))
        if not trained:
            return None
        return GateMlps(*(np.stack(part) for part in zip(*trained, strict=True)))


def train_mlp(
    x: FloatArray,
    trajectory: FloatArray,
    ahead: FloatArray,
    own: FloatArray,
    seed: int,
    tick: Callable[[], None] = lambda: None,
) -> tuple[Floats, Floats, Floats]:
    """W_in [WIDTH, H], W_out [E, WIDTH] and V [E, P * E]. x [N, H] of the layer before; `trajectory` [N, P *
    E]; `ahead` and `own` [N, E]: the next gate's logits and the layer's own. W_out and V are zero where no
    epoch is better than the next gate."""
    random = torch.Generator().manual_seed(seed)
    (inputs, scale), base = _scaled(x), torch.from_numpy(ahead)
    inner = torch.randn(WIDTH, x.shape[1], generator=random) / x.shape[1] ** 0.5
    outer, history = torch.zeros(own.shape[1], WIDTH), torch.zeros(own.shape[1], trajectory.shape[1])
    seen = torch.from_numpy(trajectory) * STEEP

    def logits(rows: Rows) -> Tensor:
        known = base[rows] + seen[rows] @ history.T
        return known + functional.silu(inputs[rows] @ inner.T) @ outer.T

    parts = [inner, outer, history]
    best = _fitted(parts, logits, torch.from_numpy(own), MLP_RATE, DECAY, random, tick)
    return (best[0] * scale).numpy(), best[1].numpy(), (best[2] * STEEP).numpy()
