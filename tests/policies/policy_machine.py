"""Views and routings of many shapes, and the check that every answer of a policy must pass."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st

from pipeline.policies.costs import Costs
from pipeline.policies.view import IntArray, ModelShape, Plan, Policy, Routing, Target, View

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
    return View(shape, "decode", capacity, empty, empty, counted, 0, costs)


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
        landed = self.rng.binomial(missing, self.landing).astype(np.int32)
        self.view = replace(self.view, residency=residency + landed)

    def apply(self, targets: tuple[Target, ...]) -> None:
        """One after the other: not even in between may more be kept than there is room for."""
        target = self.view.target.copy()
        for change in targets:
            assert 0 <= change.layer < self.view.shape.layers
            assert 0 <= change.expert < self.view.shape.experts
            assert 0 <= change.tiles <= self.view.shape.tiles
            target[change.layer, change.expert] = change.tiles
            assert target.sum() <= self.view.capacity
        self.view = replace(self.view, target=target, residency=np.minimum(self.view.residency, target))

    def layer(self, layer: int, routing: Routing) -> Plan:
        shape = self.view.shape
        for array in (self.view.residency, self.view.target, self.view.popularity):
            array.setflags(write=False)
        plan = self.policy.plan(layer, routing, self.view)
        assert plan.cut.shape == (shape.experts,)
        assert plan.cut.dtype == np.int32
        assert plan.cut.min() >= 0
        assert plan.cut.max() <= shape.tiles
        if not self.policy.uses_device:
            assert plan.cut.sum() == 0
        self.cuts.append(plan.cut)
        self.apply(plan.targets)
        self.land()
        popularity = self.view.popularity.copy()
        popularity[layer] += routing.workload(shape.experts)
        self.view = replace(self.view, popularity=popularity)
        self.apply(self.policy.after(layer, routing, self.view))
        return plan

    def step(self, rows: int) -> None:
        for layer in range(self.view.shape.layers):
            self.layer(layer, make_routing(self.view.shape, self.rng, rows))
        self.view = replace(self.view, step=self.view.step + 1)
