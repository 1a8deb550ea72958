"""Observers of the engine while it reads a calibration's text.

A `TrainPass` observes the training windows, then a `ValidationPass` the validation windows. Neither keeps an
array of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import FloatArray, Phase
from pipeline.calibration.drops import DropTables
from pipeline.engine.driver import LayerDecision
from pipeline.policies.view import ModelShape, Routing

Counts = NDArray[np.int64]
Router = Callable[[FloatArray], Routing]
Predictor = Literal["raw", "residual", "first"]
PREDICTORS: tuple[Predictor, ...] = get_args(Predictor)


class Activations:
    """Counts the rows of each expert of each layer, by phase, and compares the two phases by sequence."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._counts: dict[int, dict[Phase, Counts]] = {}  # by sequence
        self._phase: Phase = "prefill"
        self._runs: list[tuple[int, slice]] = []  # the step's sequences and their rows

    def probes(self, layer: int) -> tuple[int, ...]:
        """None."""
        return ()

    def begin(self, phase: Phase, sequences: tuple[int, ...]) -> None:
        self._phase = phase
        self._runs = list(sequence_runs(sequences))

    def layer(self, decision: LayerDecision[object], x: FloatArray) -> None:
        routing, shape = decision.gated.routing, self._shape
        for sequence, rows in self._runs:
            counts = self._counts.setdefault(sequence, _both(shape))
            its = Routing(routing.experts[rows], routing.weights[rows])
            counts[self._phase][decision.layer] += its.workload(shape.experts)

    def end(self) -> None:
        """Each layer was counted when it was observed."""

    def counts(self, phase: Phase) -> Counts:
        """[L, E], over all sequences."""
        total = _both(self._shape)[phase]
        for counts in self._counts.values():
            total += counts[phase]
        return total

    def similarities(self) -> NDArray[np.float64]:
        """[sequences, L]: the cosine of a sequence's counts in prefill and in decode (DAOP, equation 1)."""
        prefill, decode = (
            np.array([counts[phase] for counts in self._counts.values()], np.float64)
            for phase in ("prefill", "decode")
        )
        lengths = np.linalg.norm(prefill, axis=2) * np.linalg.norm(decode, axis=2)
        cosines: NDArray[np.float64] = (prefill * decode).sum(axis=2) / np.maximum(lengths, 1e-30)
        return cosines


class TrainPass(Activations):
    """Also collects the data of the predictors: the mean of each layer's x, from which DALI's residuals
    follow (equation 11), and pairs of a token's last x and the next token's first logits (AdapMoE, equation
    9)."""

    def __init__(self, shape: ModelShape, hidden: int, every: int) -> None:
        """`every`: of that many pairs one is kept."""
        super().__init__(shape)
        self._sums = np.zeros((shape.layers, hidden))
        self._rows = 0
        self._every = every
        self._first: FloatArray  # logits of the step's first layer
        self._last: dict[int, FloatArray] = {}  # x [1, H] of a sequence's latest token in the last layer
        self._pairs: dict[int, list[tuple[FloatArray, FloatArray]]] = {}  # by sequence
        self._pair_count = 0  # pairs so far, kept or not

    def layer(self, decision: LayerDecision[object], x: FloatArray) -> None:
        super().layer(decision, x)
        self._sums[decision.layer] += x.sum(axis=0, dtype=np.float64)
        if decision.layer == 0:
            assert decision.signals.logits is not None
            self._first = decision.signals.logits.copy()
            self._rows += len(x)
        if decision.layer == self._shape.layers - 1:
            for sequence, rows in self._runs:
                self._pair(sequence, x[rows], self._first[rows])

    def _pair(self, sequence: int, x: FloatArray, logits: FloatArray) -> None:
        if sequence in self._last:
            x = np.concatenate((self._last[sequence], x))
        else:
            logits = logits[1:]  # the first token has no predecessor
        self._last[sequence] = x[-1:].copy()
        kept = slice(-self._pair_count % self._every, None, self._every)
        self._pair_count += len(logits)
        self._pairs.setdefault(sequence, []).append((x[:-1][kept].copy(), logits[kept]))

    def residuals(self) -> FloatArray:
        """[L - 1, H]: the mean of x[l + 1] - x[l]."""
        means: NDArray[np.float64] = self._sums / self._rows
        return np.diff(means, axis=0).astype(np.float32)

    def pairs(self) -> tuple[FloatArray, FloatArray]:
        """x [N, H] of the last layer, and logits [N, E] of the first layer one token later; sequence after
        sequence, in the order of the tokens."""
        every = [pair for pairs in self._pairs.values() for pair in pairs]
        x, logits = (np.concatenate(part) for part in zip(*every, strict=True))
        return x, logits


class ValidationPass(Activations):
    """Also counts how many of each layer's used experts a predictor named, among as many predictions; and in
    decode the same under gates that drop small weights."""

    def __init__(
        self, shape: ModelShape, router: Router, residual_logits: FloatArray, first_gate: FloatArray | None
    ) -> None:
        """`router`: the model's own rule, from logits [R, E] to a routing; `residual_logits` [L - 1, E];
        `first_gate` [E, H]."""
        super().__init__(shape)
        self.weights: list[list[FloatArray]] = [[] for _ in range(shape.layers)]  # [R, k] of decode, by layer
        self._router, self._residual_logits, self._first_gate = router, residual_logits, first_gate
        self.drops = DropTables(shape, PREDICTORS)
        self._hits = {name: np.zeros(shape.layers) for name in PREDICTORS}
        self._asked = {name: np.zeros(shape.layers) for name in PREDICTORS}
        self._ahead: FloatArray  # the next layer's router on the layer's x
        self._last: dict[int, FloatArray] = {}  # the first gate's logits [1, E] at a sequence's latest token
        self._true_first: Routing

    def probes(self, layer: int) -> tuple[int, ...]:
        return (layer + 1,) if layer + 1 < self._shape.layers else ()

    def layer(self, decision: LayerDecision[object], x: FloatArray) -> None:
        super().layer(decision, x)
        layer, routing = decision.layer, decision.gated.router_routing
        if self._phase == "decode":
            self.weights[layer].append(routing.weights.copy())
            self.drops.used(layer, routing)
        if layer == 0:
            self._true_first = routing
        else:
            self._check("raw", layer, self._ahead, routing)
            self._check("residual", layer, self._ahead + self._residual_logits[layer - 1], routing)
        if layer + 1 < self._shape.layers:
            self._ahead = decision.signals.probes[layer + 1].copy()
        elif self._first_gate is not None:
            logits = x @ self._first_gate.T
            for sequence, rows in self._runs:
                true = self._true_first
                self._check_first(sequence, logits[rows], Routing(true.experts[rows], true.weights[rows]))

    def accuracy(self) -> dict[str, FloatArray]:
        """By predictor, [L]; 0 in layers that it does not predict."""
        return {
            name: (hits / np.maximum(self._asked[name], 1)).astype(np.float32)
            for name, hits in self._hits.items()
        }

    def _check(self, name: Predictor, layer: int, logits: FloatArray, routing: Routing) -> None:
        named = self._router(logits)
        used = np.where(routing.weights != 0, routing.experts, -1)
        found = (used[:, :, None] == named.experts[:, None, :]).any(axis=2)
        self._hits[name][layer] += np.count_nonzero(found)
        self._asked[name][layer] += np.count_nonzero(used >= 0)
        if self._phase == "decode":
            self.drops.predicted(name, layer, named, routing)

    def _check_first(self, sequence: int, logits: FloatArray, routing: Routing) -> None:
        if sequence in self._last:
            logits = np.concatenate((self._last[sequence], logits))
        else:
            routing = Routing(routing.experts[1:], routing.weights[1:])
        self._last[sequence] = logits[-1:].copy()
        if len(routing.experts):
            self._check("first", 0, logits[:-1], routing)


class Needs(Activations):
    """Also counts how many experts each decoded token used in each layer under the present gate."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self._tokens = np.zeros((shape.layers, shape.top_k + 1))

    def layer(self, decision: LayerDecision[object], x: FloatArray) -> None:
        if self._phase == "decode":
            used = np.count_nonzero(decision.gated.routing.weights, axis=1)
            self._tokens[decision.layer] += np.bincount(used, minlength=self._shape.top_k + 1)

    def shares(self) -> FloatArray:
        """[L, k + 1]: the share of the tokens that used j experts."""
        shares: NDArray[np.float64] = self._tokens / self._tokens.sum(axis=1, keepdims=True)
        return shares.astype(np.float32)


def _both(shape: ModelShape) -> dict[Phase, Counts]:
    size = shape.layers, shape.experts
    return {"prefill": np.zeros(size, np.int64), "decode": np.zeros(size, np.int64)}


def sequence_runs(sequences: tuple[int, ...]) -> Iterator[tuple[int, slice]]:
    """The consecutive rows of each sequence."""
    start = 0
    for sequence, rows in groupby(sequences):
        end = start + len(list(rows))
        yield sequence, slice(start, end)
        start = end
