"""The hit rates of caches of every size, measured on routing in the order of the tokens (MoEpic's h(c))."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import FloatArray, IntArray, Phase
from pipeline.calibration.collector import sequence_runs
from pipeline.engine.driver import LayerDecision
from pipeline.policies.split import PRIORITIES, Priority
from pipeline.policies.view import ModelShape


class TokenOrder:
    """An observer of the engine that keeps the routing, sequence after sequence."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._steps: dict[int, list[tuple[Phase, list[IntArray]]]] = {}  # by sequence: [rows, k] by layer
        self._phase: Phase = "prefill"
        self._runs: list[tuple[int, slice]] = []

    def probes(self, layer: int) -> tuple[int, ...]:
        """None."""
        return ()

    def begin(self, phase: Phase, sequences: tuple[int, ...]) -> None:
        self._phase, self._runs = phase, list(sequence_runs(sequences))
        for sequence, _ in self._runs:
            self._steps.setdefault(sequence, []).append((phase, []))

    def layer(self, decision: LayerDecision[object], x: FloatArray) -> None:
        routing = decision.gated.routing
        used = np.where(routing.weights != 0, routing.experts, -1).astype(np.int32)
        for sequence, rows in self._runs:
            self._steps[sequence][-1][1].append(used[rows])

    def end(self) -> None:
        """Each layer was kept when it was observed."""

    def hit_rates(self) -> dict[str, FloatArray]:
        """Hit rates by the order of a cache, [L, E + 1]: of the experts that decode uses in a layer, the
        share in a cache that holds so many of the layer's experts, those of the highest priority."""
        counts = {name: _Ranks(self._shape, Priority.named(name)) for name in PRIORITIES}
        for steps in self._steps.values():  # one after the other, as in an engine with one client
            for phase, by_layer in steps:
                for ranks in counts.values():
                    ranks.step(np.stack(by_layer), counted=phase == "decode")
        return {name: ranks.rates() for name, ranks in counts.items()}


class _Ranks:
    """Counts at which place of its layer's order each used expert was: it is in every larger cache."""

    def __init__(self, shape: ModelShape, priority: Priority) -> None:
        size = shape.layers, shape.experts
        self._priority = priority
        self._rows = np.zeros(size, np.int64)
        self._priorities = np.full(size, -np.inf)
        self._at: NDArray[np.int64] = np.zeros(size, np.int64)  # uses by place
        self._steps = 0

    def step(self, used: IntArray, counted: bool) -> None:
        """`used` [L, rows, k], -1 for none."""
        layers, experts = self._rows.shape
        rows = np.zeros_like(self._rows)
        named = used.reshape(layers, -1)
        np.add.at(rows, (np.arange(layers)[:, None], named), named >= 0)
        active = rows > 0
        if counted:
            order = np.argsort(-self._priorities, axis=1, kind="stable")
            places = np.empty_like(order)
            np.put_along_axis(places, order, np.arange(experts)[None], axis=1)
            where = np.nonzero(active)
            np.add.at(self._at, (where[0], places[where]), 1)
        self._steps += 1
        self._rows += rows
        self._priorities[active] = self._priority.of_each(self._rows[active], self._steps)

    def rates(self) -> FloatArray:
        uses = self._at.sum(axis=1, keepdims=True)
        within = np.cumsum(self._at, axis=1) / np.maximum(uses, 1)
        return np.concatenate((np.zeros((len(within), 1)), within), axis=1).astype(np.float32)
