"""Observers of the engine while it reads a calibration's text.

A `TrainPass` observes the training windows, then a `ValidationPass` the validation windows; `TokenOrder` and
`Magnitudes` beside them. None keeps an array of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.arrays import FloatArray, IntArray, Phase
from pipeline.calibration.trained_gates import GateMlps
from pipeline.engine.driver import LayerDecision
from pipeline.policies.calibration import Floats, Trajectory
from pipeline.policies.gates import drop_shares
from pipeline.policies.split import RECENCY
from pipeline.policies.view import ModelShape, Routing
from shm.floe import FloeFormat
from shm.store import Store
from workers.kernels.reference import dequantize, int8_steps

Counts = NDArray[np.int64]
Router = Callable[[FloatArray, int], Routing]
Bring = Callable[[int, int], None]  # layer, expert: its bytes are read next, and may be on disk
Up = Callable[[int, int, FloatArray], FloatArray]  # layer, expert, x [n, H] -> u [n, channels]
PREDICTORS = ("raw", "residual", "first")

DROPS = 65  # limits from 0 to 1
LIMITS = np.linspace(0, 1, DROPS)

STEPS = 100  # shares of the channels, from 0 on
BINS_AN_OCTAVE = 128  # so a quantile is exact to half a percent
LOWEST, HIGHEST = -40, 24  # powers of two; |u| outside counts as the nearest
BINS = (HIGHEST - LOWEST) * BINS_AN_OCTAVE


class StepObserver:
    """Notes the phase of each step and the rows of its sequences."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._phase: Phase = "prefill"
        self._runs: list[tuple[int, slice]] = []  # the step's sequences and their rows

    def probes(self, layer: int) -> tuple[int, ...]:
        """Returns no layers: nothing is probed."""
        return ()

    def begin(self, phase: Phase, sequences: tuple[int, ...]) -> None:
        self._phase, self._runs = phase, list(sequence_runs(sequences))

    def end(self) -> None:
        """Each layer was noted when it was observed."""


class TrainPass(StepObserver):
    """Collects the data of the predictors: the mean of each layer's x, from which DALI's
    residuals follow (equation 11), and pairs of a token's last x and the next token's first logits (AdapMoE,
    equation 9)."""

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


class ValidationPass(StepObserver):
    """Checks how many of each layer's used experts a predictor named, among as many predictions;
    and in decode the same under gates that drop small weights."""

    def __init__(
        self,
        shape: ModelShape,
        router: Router,
        residual_logits: FloatArray,
        first_gate: FloatArray | None,
        mlps: GateMlps | None = None,
    ) -> None:
        """`router`: the model's own rule, from a layer's logits [R, E] to a routing; `residual_logits`
        [L - 1, E]; `first_gate` [E, H]; `mlps` correct the next gate's predictions of the first layers."""
        super().__init__(shape)
        self.weights: list[list[FloatArray]] = [[] for _ in range(shape.layers)]  # [R, k] of decode, by layer
        self._router, self._residual_logits, self._first_gate = router, residual_logits, first_gate
        self._mlps = mlps
        self._added: FloatArray | None = None  # by the next layer's MLP
        self._trajectory = Trajectory(0 if mlps is None else len(mlps.inner), shape.experts)
        self.drops = DropTables(shape, PREDICTORS)
        self._hits = {name: np.zeros(shape.layers) for name in (*PREDICTORS, "mlp")}
        self._asked = {name: np.zeros(shape.layers) for name in (*PREDICTORS, "mlp")}
        self._ahead: FloatArray  # the next layer's router on the layer's x
        self._last: dict[int, FloatArray] = {}  # the first gate's logits [1, E] at a sequence's latest token
        self._true_first: Routing

    def probes(self, layer: int) -> tuple[int, ...]:
        return (layer + 1,) if layer + 1 < self._shape.layers else ()

    def layer(self, decision: LayerDecision[object], x: FloatArray) -> None:
        layer, routing = decision.layer, decision.gated.router_routing
        if self._phase == "decode":
            self.weights[layer].append(routing.weights.copy())
            self.drops.used(layer, routing)
        if layer == 0:
            self._true_first = routing
        else:
            self._check("raw", layer, self._ahead, routing)
            self._check("residual", layer, self._ahead + self._residual_logits[layer - 1], routing)
            if self._added is not None:
                self._check("mlp", layer, self._ahead + self._added, routing)
        if layer + 1 < self._shape.layers:
            self._ahead = decision.signals.probes[layer + 1].copy()
            self._added = None
            self._trajectory.add(layer, *routing.pairs)
            if self._mlps is not None and layer < len(self._mlps.inner):
                self._added = self._mlps.logits(layer + 1, x, self._trajectory.weights)
        elif self._first_gate is not None:
            logits = x @ self._first_gate.T
            for sequence, rows in self._runs:
                true = self._true_first
                self._check_first(sequence, logits[rows], Routing(true.experts[rows], true.weights[rows]))

    def accuracy(self) -> dict[str, FloatArray]:
        """Accuracy by predictor, [L]; 0 in layers that it does not predict."""
        return {name: self._share(name) for name in PREDICTORS}

    def mlp_accuracy(self) -> FloatArray | None:
        """[P], of the layers 1 to P that have an MLP."""
        return None if self._mlps is None else self._share("mlp")[1 : 1 + len(self._mlps.inner)]

    def _share(self, name: str) -> FloatArray:
        shares: FloatArray = (self._hits[name] / np.maximum(self._asked[name], 1)).astype(np.float32)
        return shares

    def _check(self, name: str, layer: int, logits: FloatArray, routing: Routing) -> None:
        named = self._router(logits, layer)
        used = np.where(routing.weights != 0, routing.experts, -1)
        named_too = (used[:, :, None] == named.experts[:, None, :]).any(axis=2)
        self._hits[name][layer] += np.count_nonzero(named_too)
        self._asked[name][layer] += np.count_nonzero(used >= 0)
        if self._phase == "decode" and name in PREDICTORS:
            self.drops.predicted(name, layer, named, routing)

    def _check_first(self, sequence: int, logits: FloatArray, routing: Routing) -> None:
        if sequence in self._last:
            logits = np.concatenate((self._last[sequence], logits))
        else:
            routing = Routing(routing.experts[1:], routing.weights[1:])
        self._last[sequence] = logits[-1:].copy()
        if len(routing.experts):
            self._check("first", 0, logits[:-1], routing)


class DropTables:
    """Counts, for each limit on an expert's share, the experts of decoded tokens that stay, and of these the
    ones that a predictor named."""

    def __init__(self, shape: ModelShape, predictors: tuple[str, ...]) -> None:
        self._counts = np.arange(shape.top_k + 1)
        self._tokens = np.zeros((shape.layers, DROPS, shape.top_k + 1))
        self._hits = {name: np.zeros((shape.layers, DROPS)) for name in predictors}

    def used(self, layer: int, routing: Routing) -> None:
        """The experts of some tokens, by the layer's own router."""
        kept = (_shares(routing)[:, :, None] > LIMITS).sum(axis=1)  # [R, G]
        self._tokens[layer] += (kept[:, :, None] == self._counts).sum(axis=0)

    def predicted(self, name: str, layer: int, named: Routing, routing: Routing) -> None:
        """A prediction of the same tokens: an expert is named_too as long as both keep it."""
        named_too = routing.experts[:, :, None] == named.experts[:, None, :]
        until = np.minimum(_shares(routing)[:, :, None], _shares(named)[:, None, :])[named_too]
        self._hits[name][layer] += (until[:, None] > LIMITS).sum(axis=0)

    def kept(self) -> Floats:
        """Returns `Calibration.kept`."""
        shares: Floats = (self._tokens / self._tokens.sum(axis=2, keepdims=True)).astype(np.float32)
        return shares

    def accuracy(self) -> dict[str, Floats]:
        """`Calibration.gated_accuracy`."""
        asked = np.maximum(self._tokens @ self._counts, 1)
        return {name: (hits / asked).astype(np.float32) for name, hits in self._hits.items()}


def _shares(routing: Routing) -> NDArray[np.float64]:
    """Returns `drop_shares`, and -1 for an expert without weight, which is never kept."""
    return np.where(routing.weights == 0, -1, drop_shares(routing.weights))


def sequence_runs(sequences: tuple[int, ...]) -> Iterator[tuple[int, slice]]:
    """The consecutive rows of each sequence."""
    start = 0
    for sequence, rows in groupby(sequences):
        end = start + len(list(rows))
        yield sequence, slice(start, end)
        start = end


class TokenOrder(StepObserver):
    """Keeps the routing, sequence after sequence, for counts and for MoEpic's hit rates h(c)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self._steps: dict[int, list[tuple[Phase, list[IntArray]]]] = {}  # by sequence: [rows, k] by layer

    def begin(self, phase: Phase, sequences: tuple[int, ...]) -> None:
        super().begin(phase, sequences)
        for sequence, _ in self._runs:
            self._steps.setdefault(sequence, []).append((phase, []))

    def layer(self, decision: LayerDecision[object], x: FloatArray) -> None:
        routing = decision.gated.routing
        used = np.where(routing.weights != 0, routing.experts, -1).astype(np.int32)
        for sequence, rows in self._runs:
            self._steps[sequence][-1][1].append(used[rows])

    def _workloads(self) -> Iterator[tuple[Phase, Counts]]:
        """The rows [L, E] routed to each expert, step after step, as in an engine with one client."""
        layers, experts = self._shape.layers, self._shape.experts
        for phase, by_layer in (step for steps in self._steps.values() for step in steps):
            named = np.stack(by_layer).reshape(layers, -1)  # -1 for none
            workload = np.zeros((layers, experts), np.int64)
            np.add.at(workload, (np.arange(layers)[:, None], named), named >= 0)
            yield phase, workload

    def decode_counts(self) -> Counts:
        """[L, E]: the decoded rows routed to each expert."""
        size = self._shape.layers, self._shape.experts
        return sum((new for phase, new in self._workloads() if phase == "decode"), np.zeros(size, np.int64))

    def hit_rates(self) -> FloatArray:
        """[L, E + 1]: of the experts that decode uses in a layer, the share in a cache that holds so many of
        the layer's experts, those of the highest priority: each is in every cache larger than its place. The
        first half of decode's steps only warms the priorities, as the calibration's counts do for an engine's
        cache."""
        size = self._shape.layers, self._shape.experts
        every = (phase for steps in self._steps.values() for phase, _ in steps)
        warming = sum(phase == "decode" for phase in every) // 2
        rows, uses = np.zeros(size, np.int64), np.zeros(size, np.int64)  # uses by place
        priorities = np.full(size, -np.inf)
        for number, (phase, new) in enumerate(self._workloads(), start=1):
            active = new > 0
            warming -= phase == "decode"
            if phase == "decode" and warming < 0:
                places = np.argsort(np.argsort(-priorities, axis=1, kind="stable"), axis=1)
                np.add.at(uses, (np.nonzero(active)[0], places[active]), 1)
            rows += new
            priorities[active] = np.log(rows[active]) + RECENCY * number
        within = np.cumsum(uses, axis=1) / np.maximum(uses.sum(axis=1, keepdims=True), 1)
        return np.pad(within, ((0, 0), (1, 0))).astype(np.float32)


class Magnitudes(StepObserver):
    """Counts |u| by size, in bins of equal ratio: u = up x of the channels of the experts that decoded tokens
    use. The thresholds of contextual sparsity are its quantiles (FloE)."""

    def __init__(self, shape: ModelShape, up: Up, every: int = 1) -> None:
        """`every`: of that many decode steps one is counted."""
        super().__init__(shape)
        self._every, self._up = every, up
        self._counts: NDArray[np.int64] = np.zeros((shape.layers, BINS), np.int64)
        self._steps = 0

    @property
    def counts(self) -> bool:
        """True where the present step is counted."""
        return self._phase == "decode" and (self._steps - 1) % self._every == 0

    def begin(self, phase: Phase, sequences: tuple[int, ...]) -> None:
        super().begin(phase, sequences)
        self._steps += phase == "decode"

    def layer(self, decision: LayerDecision[object], x: FloatArray) -> None:
        """Masks act on decoded tokens, so only these count."""
        if not self.counts:
            return
        active, layer = decision.gated.routing.active, decision.layer
        ends = active.offsets.tolist()
        for expert, start, end in zip(active.experts.tolist(), ends, ends[1:], strict=False):
            self.count(layer, np.abs(self._up(layer, expert, x[active.rows[start:end]])).ravel())

    def count(self, layer: int, magnitudes: FloatArray) -> None:
        """Count the magnitudes |u| [n]."""
        with np.errstate(divide="ignore"):
            places = (np.log2(magnitudes) - LOWEST) * BINS_AN_OCTAVE
        bins: IntArray = np.clip(places, 0, BINS - 1).astype(np.int32)
        self._counts[layer] += np.bincount(bins, minlength=BINS)

    def quantiles(self) -> Floats | None:
        """`magnitudes` of a Calibration; None where no token was decoded."""
        if not self._counts.any(axis=1).all():
            return None
        edges = 2.0 ** (LOWEST + np.arange(BINS + 1) / BINS_AN_OCTAVE)
        edges[0] = 0
        thresholds = np.zeros((len(self._counts), STEPS), np.float32)
        for layer, counts in enumerate(self._counts):
            below = np.concatenate(([0], counts.cumsum())) / counts.sum()
            # within a bin by its share; of edges with as many below them, the largest
            keep = np.append(np.diff(below) > 0, True)
            thresholds[layer] = np.interp(np.arange(STEPS) / STEPS, below[keep], edges[keep])
        thresholds[:, 0] = 0
        return thresholds


def up_of(store: Store, bring: Bring = lambda layer, expert: None) -> Up | None:
    """u = up x of an expert, from the heads of the store, with x in the int8 steps that the kernels of these
    formats compute with; None where the experts' format keeps no up matrices apart."""
    shape, kind = store.layout.shape, store.layout.format
    if not isinstance(kind, FloeFormat):
        return None

    def up(layer: int, expert: int, x: FloatArray) -> FloatArray:
        bring(layer, expert)
        heads = store.heads(layer, expert, 0, shape.tiles)  # whole blocks: together one matrix
        matrix = dequantize(kind.up, torch.from_numpy(heads.copy()), shape.padded, shape.hidden)
        steps = int8_steps(torch.from_numpy(x), kind.up.group)[:, : shape.hidden]
        u: FloatArray = (steps @ matrix[: shape.intermediate, : shape.hidden].T).numpy()
        return u + store.up_biases(layer, expert)[: shape.intermediate] if shape.math.bias else u

    return up
