"""HybriMoE's impact-driven prediction: against every choice, simulated one by one, and by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_machine import COSTS, make_view

from pipeline.arrays import FloatArray
from pipeline.policies.assignments import TwoEnded
from pipeline.policies.costs import Costs
from pipeline.policies.predictions import Impact
from pipeline.policies.view import ModelShape, Routing, Signals, View

SHAPE = ModelShape(layers=5, experts=6, tiles=2, top_k=3)


def as_it_is(layer: int, routing: Routing) -> Routing:
    return routing


def layer_seconds(view: View, layer: int, routing: Routing) -> float:
    """The layer with its kept experts resident, divided by the preset's assignment. Missing experts are moved
    one after the other, those with most rows first, while the device computes the others."""
    costs, tiles = view.costs, view.shape.tiles
    assert costs is not None
    kept = replace(view, residency=view.target)
    cut = TwoEnded().cut(layer, routing, kept)
    workload = routing.workload(view.shape.experts)
    used = np.flatnonzero(workload).tolist()
    landed, device = 0.0, costs.launch if cut.any() else 0.0
    for expert in sorted(
        (e for e in used if cut[e]), key=lambda e: (tiles - kept.target[layer, e], -workload[e])
    ):
        if missing := int(tiles - view.target[layer, expert]):
            landed += costs.fetch + costs.link * missing
            device = max(device, landed)
        device += costs.device_at[int(workload[expert])] * tiles
    host = [costs.host_at[int(workload[e])] * tiles for e in used if not cut[e]]
    return max(device, costs.round_trip + sum(host) if host else 0.0)


@settings(max_examples=150)
@given(st.data())
def test_the_expert_that_saves_most_is_fetched(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 9999)))
    link = data.draw(st.sampled_from([0.05, 0.5, 1.6, 9.0]))
    fixed = {name: data.draw(st.sampled_from([0.0, 0.1, 5.0])) for name in ("round_trip", "launch", "fetch")}
    costs = replace(COSTS, link=link, **fixed)
    view = make_view(SHAPE, 60, costs)
    target = np.where(rng.random((5, 6)) < data.draw(st.sampled_from([0.0, 0.4, 0.9])), 2, 0).astype(np.int32)
    view = replace(view, target=target)
    rows = data.draw(st.sampled_from([1, 1, 4]))
    part = Impact()
    layer = data.draw(st.integers(0, 4))
    assert part.probes(layer, view) == tuple(later for later in range(layer + 1, 5) if later <= layer + 3)
    probes: dict[int, FloatArray] = {
        later: rng.normal(size=(rows, 6)).astype(np.float32) * 2 for later in part.probes(layer, view)
    }
    saved: dict[tuple[int, int], float] = {}
    assert view.router is not None
    for later, logits in probes.items():
        routing = view.router(logits, later)
        for expert in np.flatnonzero(routing.workload(6)).tolist():
            if not target[later, expert]:
                with_it = target.copy()
                with_it[later, expert] = 2
                without = layer_seconds(view, later, routing)
                saved[later, expert] = without - layer_seconds(replace(view, target=with_it), later, routing)
    found = part.experts(layer, Signals(None, probes), view, as_it_is)
    most = max(saved.values(), default=0.0)
    if most <= 1e-12:
        assert all(abs(saved[key]) < 1e-12 for key in found), "but for rounding it saves nothing"
    else:
        assert len(found) == 1
        assert saved[found[0]] >= most - 1e-12


def test_a_later_layer_comes_first_where_it_gains_more() -> None:
    """A tile takes 2 on the host, 1 on the device, 9 on the link: a missing expert 4 on the host, a resident
    one 2 on the device."""
    shape = ModelShape(layers=4, experts=6, tiles=2, top_k=2)
    costs = Costs(rows=(1,), host=(2.0,), device=(1.0,), link=9.0, round_trip=0.0)
    target = np.zeros((4, 6), np.int32)
    target[1, 1] = 2
    view = replace(make_view(shape, 12, costs), target=target)
    first = np.array([[0, 5, 0, 0, 4, 1]], np.float32)  # experts 1 and 4
    second = np.array([[0, 0, 5, 6, 0, 0]], np.float32)  # experts 3 and 2
    signals = Signals(None, {1: first, 2: second, 3: first})
    # layer 1: 4 on the host beside 2, with 4 resident 4 on the device: nothing is saved.
    # layer 2: both on the host, 8; with 2 resident it takes 2 beside 4 on the host: 4 are saved.
    # layer 3 saves as much, but comes later.
    assert Impact().experts(0, signals, view, as_it_is) == [(2, 2)]
    assert Impact().experts(0, Signals(None, {}), view, as_it_is) == []


def test_gated_experts_are_not_simulated() -> None:
    shape = ModelShape(layers=2, experts=6, tiles=2, top_k=2)
    view = make_view(shape, 12)

    def second_only(layer: int, routing: Routing) -> Routing:
        return Routing(routing.experts, np.where(np.arange(2) == 1, routing.weights, 0))

    signals = Signals(None, {1: np.array([[0, 5, 0, 0, 4, 1]], np.float32)})
    assert Impact().experts(0, signals, view, second_only) == [(1, 4)]
