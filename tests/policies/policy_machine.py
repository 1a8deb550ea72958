"""Views and routings of many shapes, and the check that every answer of a policy must pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st

from pipeline.arrays import FloatArray, IntArray
from pipeline.policies.calibration import Calibration
from pipeline.policies.costs import Costs
from pipeline.policies.view import Ahead, Gated, ModelShape, Plan, Policy, Routing, Signals, Target, View

COSTS = Costs(rows=(1, 4, 16), host=(1.0, 2.0, 7.0), device=(0.1, 0.1, 0.3), link=1.6, round_trip=0.1)


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    experts = draw(st.sampled_from([1, 2, 3, 5, 8, 16]) | st.integers(1, 40))
    return ModelShape(
        layers=draw(st.integers(1, 6)),
        experts=experts,
        tiles=draw(st.sampled_from([1, 2, 3, 4, 7])),
        top_k=draw(st.integers(1, experts)),
    )


@st.composite
def capacities(draw: st.DrawFn, shape: ModelShape) -> int:
    whole = shape.layers * shape.experts * shape.tiles
    return draw(st.sampled_from([0, 1, whole, whole + 3]) | st.integers(0, whole))


def make_view(
    shape: ModelShape, capacity: int, costs: Costs | None = COSTS, popularity: IntArray | None = None
) -> View:
    empty = np.zeros((shape.layers, shape.experts), dtype=np.int32)
    counted = np.zeros(empty.shape, dtype=np.int64) if popularity is None else popularity.astype(np.int64)
    return View(shape, "decode", capacity, empty, empty, counted, 0, costs, softmax_router(shape.top_k))


def softmax_router(top_k: int) -> Callable[[FloatArray], Routing]:
    """The most probable experts by their probabilities, best first; the improbable ones get a weight of 0."""

    def router(logits: FloatArray) -> Routing:
        experts = np.argsort(-logits, axis=1, kind="stable")[:, :top_k].astype(np.int32)
        exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares = exponents / exponents.sum(axis=1, keepdims=True)
        weights = np.take_along_axis(shares, experts, axis=1)
        weights[weights < 0.01] = 0
        return Routing(experts, weights.astype(np.float32))

    return router


def make_calibration(shape: ModelShape, rng: np.random.Generator) -> Calibration:
    """Numbers of the right shapes; a fifth of the tokens need one expert fewer."""
    layers, experts = shape.layers, shape.experts
    needed = np.zeros((layers, shape.top_k + 1), np.float32)
    needed[:, shape.top_k] = 0.8
    needed[:, max(1, shape.top_k - 1)] += 0.2
    return Calibration(
        prefill_counts=rng.integers(0, 99, (layers, experts)),
        decode_counts=rng.integers(0, 99, (layers, experts)),
        residuals=np.zeros((layers - 1, 4), np.float32),
        residual_logits=rng.normal(size=(layers - 1, experts)).astype(np.float32),
        accuracy={name: rng.random(layers).astype(np.float32) for name in ("raw", "residual", "first")},
        similarity=np.ones(layers, np.float32),
        needed=needed,
        sensitivity=rng.random(layers).astype(np.float32),
        threshold=0.05,
        first_gate=np.zeros((experts, 4), np.float32),
    )


def make_routing(shape: ModelShape, rng: np.random.Generator, rows: int) -> Routing:
    """`rows` tokens, each with top_k different experts; some of the weights are 0."""
    experts = np.argsort(rng.random((rows, shape.experts)), axis=1)[:, : shape.top_k].astype(np.int32)
    weights = rng.random(experts.shape).astype(np.float32)
    weights[rng.random(weights.shape) < 0.15] = 0
    return Routing(experts, weights)


@dataclass
class Machine:
    """What an engine does with a policy's answers, without any tile: it keeps targets, lets tiles land at
    once, late or never, and checks every answer against the contract."""

    policy: Policy
    view: View
    rng: np.random.Generator
    landing: float = 1.0  # share of missing tiles that land between two layers
    cuts: list[IntArray] = field(default_factory=list)
    predicted: int = 0  # experts
    ahead: Ahead | None = None

    def start(self) -> None:
        shape = self.view.shape
        placed = self.policy.placement(self.view)
        assert placed.shape == (shape.layers, shape.experts)
        assert placed.dtype == np.int32
        assert placed.min() >= 0
        assert placed.max() <= shape.tiles
        assert placed.sum() <= self.view.capacity
        self.view = replace(self.view, target=placed)
        self.land()

    def land(self) -> None:
        residency = np.minimum(self.view.residency, self.view.target)
        missing = self.view.target - residency
        landed = missing if self.landing == 1 else self.rng.binomial(missing, self.landing).astype(np.int32)
        self.view = replace(self.view, residency=residency + landed)

    def apply(self, targets: tuple[Target, ...]) -> None:
        """One after the other: not even in between may more be kept than there is room for."""
        target = self.view.target.copy()
        kept = int(target.sum())
        for change in targets:
            assert 0 <= change.layer < self.view.shape.layers
            assert 0 <= change.expert < self.view.shape.experts
            assert 0 <= change.tiles <= self.view.shape.tiles
            kept += change.tiles - int(target[change.layer, change.expert])
            target[change.layer, change.expert] = change.tiles
            assert kept <= self.view.capacity
        self.view = replace(self.view, target=target, residency=np.minimum(self.view.residency, target))

    def layer(self, layer: int, routing: Routing) -> Plan:
        """A layer whose routing is given."""
        plan = self._plan(layer, routing)
        self._finish(layer, routing)
        return plan

    def visit(self, layer: int, logits: FloatArray, rows: int) -> Gated:
        """A layer as the engine asks it; what was decided ahead for the next one waits in `ahead`."""
        policy, shape = self.policy, self.view.shape
        self._lock()
        probes = policy.probes(layer, self.view)
        assert all(layer < p < shape.layers or (p, layer) == (0, shape.layers - 1) for p in probes)
        assert len(set(probes)) == len(probes)
        decided, self.ahead = self.ahead, None
        signals = Signals(
            None if decided else logits, {probe: self.logits(rows) + 0.5 * logits for probe in probes}
        )
        gated = decided.gated if decided else policy.gate(layer, signals, self.view)
        self._check_gated(gated, rows)
        if decided is None:
            self._plan(layer, gated.routing)
        else:
            self.land()
        self._lock()
        self.ahead = policy.ahead(layer, signals, self.view)
        if self.ahead is not None:
            assert layer + 1 < shape.layers
            assert self.ahead.gated.predicted
            assert not policy.exact
            self._check_cut(self.ahead.cut)
        predicted = policy.predict(layer, signals, gated, self.view)
        assert self.view.prefetching or not predicted
        assert all(not self.view.target[t.layer, t.expert] for t in predicted)
        self.predicted += len(predicted)
        self.apply(predicted)
        self.land()
        self._finish(layer, gated.routing)
        return gated

    def logits(self, rows: int) -> FloatArray:
        return self.rng.normal(size=(rows, self.view.shape.experts)).astype(np.float32) * 2

    def step(self, rows: int) -> None:
        if len(self.view.sequences) != rows:
            self.view = replace(self.view, sequences=tuple(range(rows)))
        for layer in range(self.view.shape.layers):
            self.visit(layer, self.logits(rows), rows)
        assert self.ahead is None
        self.view = replace(self.view, step=self.view.step + 1)

    def _plan(self, layer: int, routing: Routing) -> Plan:
        self._lock()
        plan = self.policy.plan(layer, routing, self.view)
        self._check_cut(plan.cut)
        self.cuts.append(plan.cut)
        if self.policy.name != "random":  # which may well fetch again what it has just let go
            workload = routing.workload(self.view.shape.experts)
            for change in plan.targets:
                if change.layer == layer and workload[change.expert]:
                    grows = change.tiles >= self.view.target[layer, change.expert]
                    assert grows or change.tiles >= plan.cut[change.expert]
        self.apply(plan.targets)
        self.land()
        return plan

    def _finish(self, layer: int, routing: Routing) -> None:
        popularity = self.view.popularity.copy()
        popularity[layer] += routing.workload(self.view.shape.experts)
        self.view = replace(self.view, popularity=popularity)
        self._lock()
        self.apply(self.policy.after(layer, routing, self.view))

    def _lock(self) -> None:
        for array in (self.view.residency, self.view.target, self.view.popularity):
            array.setflags(write=False)

    def _check_cut(self, cut: IntArray) -> None:
        assert cut.shape == (self.view.shape.experts,)
        assert cut.dtype == np.int32
        assert cut.min() >= 0
        assert cut.max() <= self.view.shape.tiles
        if not self.policy.uses_device:
            assert cut.sum() == 0
        if not self.policy.uses_host:
            assert cut.min() == self.view.shape.tiles

    def _check_gated(self, gated: Gated, rows: int) -> None:
        for routing in (gated.routing, gated.said):
            assert routing.experts.shape == routing.weights.shape == (rows, self.view.shape.top_k)
            assert routing.experts.dtype == np.int32
            assert routing.weights.dtype == np.float32
            ranked = np.sort(routing.experts, axis=1)
            assert (ranked[:, 1:] != ranked[:, :-1]).all()
            assert ranked.min() >= 0
            assert ranked.max() < self.view.shape.experts
        # what is dropped or replaced leaves its weight to the others
        assert np.allclose(gated.routing.weights.sum(axis=1), gated.said.weights.sum(axis=1), atol=1e-5)
        if self.policy.exact:
            assert np.array_equal(gated.routing.experts, gated.said.experts)
            assert np.array_equal(gated.routing.weights, gated.said.weights)
