"""An observer that measures next-layer predictions as DALI does: for batches of rows by the experts of most
tokens (its tables 2 and 5), and by the cosine of the predicting input to the true one (its table 8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import FloatArray, Phase
from pipeline.calibration.collector import Router
from pipeline.engine.driver import LayerDecision
from pipeline.policies.calibration import Floats
from pipeline.policies.view import ModelShape, Routing

PREDICTORS = ("raw", "residual")
ROWS = (1, 4, 16, 64)  # of a batch
TOPS = (1, 2, 4, 8)  # experts; those above half of a layer's are left out
BATCHES = 256  # drawn of each size
MOST_ROWS = 4096  # that are kept of a text

Sums = NDArray[np.float64]


class BatchedPredictions:
    """Keeps rows of the validation windows, and the routing that each predictor has for them. Batches are
    drawn from them once all are read: a row of each of so many sequences, which a calibration's few windows
    stand for."""

    def __init__(
        self, shape: ModelShape, router: Router, residuals: Floats, residual_logits: Floats, every: int
    ) -> None:
        """`router`: the model's own rule, from logits [R, E] to a routing; `residuals` [L - 1, H] and
        `residual_logits` [L - 1, E]: as in Calibration; `every`: of that many rows one is kept."""
        self._shape, self._router, self._every = shape, router, every
        self._residuals, self._residual_logits = residuals, residual_logits
        self._rows = 0  # so far, kept or not
        self._kept = slice(0)  # rows of the step
        self._x: FloatArray  # [R, H] of the layer before
        self._ahead: FloatArray  # [R, E], this layer's router on it
        following = range(shape.layers - 1)
        self._used: list[list[Routing]] = [[] for _ in following]  # by layer, from the second on
        self._named: dict[str, list[list[Routing]]] = {name: [[] for _ in following] for name in PREDICTORS}
        self._cosines = {name: np.zeros(shape.layers - 1) for name in PREDICTORS}  # sums

    def probes(self, layer: int) -> tuple[int, ...]:
        return (layer + 1,) if layer + 1 < self._shape.layers else ()

    def begin(self, phase: Phase, sequences: tuple[int, ...]) -> None:
        self._kept = slice(-self._rows % self._every, None, self._every)
        self._rows += len(sequences)

    def layer(self, decision: LayerDecision[object], x: FloatArray) -> None:
        layer, x = decision.layer, x[self._kept].copy()
        if layer > 0:
            routing, before = decision.gated.router_routing, layer - 1
            self._used[before].append(
                Routing(routing.experts[self._kept].copy(), routing.weights[self._kept].copy())
            )
            for name, input, logits in (
                ("raw", self._x, self._ahead),
                ("residual", self._x + self._residuals[before], self._ahead + self._residual_logits[before]),
            ):
                self._named[name][before].append(self._router(logits))
                self._cosines[name][before] += _cosines(input, x).sum()
        if layer + 1 < self._shape.layers:
            self._x, self._ahead = x, decision.signals.probes[layer + 1][self._kept].copy()

    def end(self) -> None:
        """Each layer was measured when it was observed."""

    def measured(self, seed: int) -> dict[str, Any]:
        """The `prefetch` of a calibration's findings (docs/calibration.md); empty for a model of one
        layer."""
        rows = -(-self._rows // self._every)
        if not self._used or not rows:
            return {}
        experts = self._shape.experts
        tops = [top for top in TOPS if 2 * top <= experts]
        sizes = [size for size in ROWS if size <= rows]
        accuracy = {name: np.zeros((len(sizes), len(tops), len(self._used))) for name in PREDICTORS}
        for layer, used in enumerate(self._used):
            true = _Loads.of(used, experts)
            named = {name: _Loads.of(self._named[name][layer], experts) for name in PREDICTORS}
            for at, size in enumerate(sizes):
                batches = draw(rows, size, seed)
                heavy = true.ranks(batches)
                for name in PREDICTORS:
                    guessed = named[name].ranks(batches)
                    accuracy[name][at, :, layer] = [_share(heavy, guessed, top) for top in tops]
        return {
            "rows": sizes,
            "top": tops,
            "accuracy": {name: shares.mean(axis=2).tolist() for name, shares in accuracy.items()},
            "cosines": {name: (sums / rows).tolist() for name, sums in self._cosines.items()},
        }


def draw(rows: int, size: int, seed: int) -> NDArray[np.int64]:
    """[BATCHES, size]: batches of different ones of so many rows."""
    random = np.random.default_rng(seed)
    return np.stack([random.permutation(rows)[:size] for _ in range(BATCHES)])


@dataclass(frozen=True)
class _Loads:
    """A layer's routings, row by row: whether each expert has the row, and with which weight."""

    tokens: Sums  # [R, E]
    weights: Sums  # [R, E]

    @classmethod
    def of(cls, routings: list[Routing], experts: int) -> _Loads:
        chosen = np.concatenate([routing.experts for routing in routings])
        weights = np.concatenate([routing.weights for routing in routings])
        rows, slots = np.nonzero(weights)
        loads = cls(np.zeros((len(chosen), experts)), np.zeros((len(chosen), experts)))
        loads.tokens[rows, chosen[rows, slots]] = 1
        loads.weights[rows, chosen[rows, slots]] = weights[rows, slots]
        return loads

    def ranks(self, batches: NDArray[np.int64]) -> NDArray[np.int64]:
        """[B, E]: each expert's place in the order in which DALI's prefetch takes them (`by_probability`, of
        several rows): most tokens first, then the greatest sum of weights; E for one without a token."""
        tokens, weights = self.tokens[batches].sum(axis=1), self.weights[batches].sum(axis=1)
        order = np.lexsort((-weights, -tokens), axis=1)
        experts = order.shape[1]
        ranks = np.empty_like(order)
        np.put_along_axis(ranks, order, np.arange(experts)[None], axis=1)
        ranks[tokens == 0] = experts
        return ranks


def _share(heavy: NDArray[np.int64], guessed: NDArray[np.int64], top: int) -> float:
    """Of each batch's `top` experts of most tokens, the share that is among as many predicted."""
    wanted = heavy < top
    return float(np.count_nonzero(wanted & (guessed < top)) / np.count_nonzero(wanted))


def _cosines(a: FloatArray, b: FloatArray) -> Sums:
    """Of each two rows."""
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    cosines: Sums = (a * b).sum(axis=1, dtype=np.float64) / np.maximum(lengths, 1e-30)
    return cosines
