"""Replacements against plain simulations written in another way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_machine import Machine, capacities, make_routing, make_view, policy, shapes

from pipeline.policies.view import Gated, ModelShape, Routing, Signals


def uses(routing: Routing) -> dict[int, int]:
    """Rows of each active expert."""
    workload: dict[int, int] = {}
    for expert, weight in zip(routing.experts.ravel(), routing.weights.ravel(), strict=True):
        if weight:
            workload[int(expert)] = workload.get(int(expert), 0) + 1
    return workload


class Lru:
    """The reference for on-demand: lists of experts, least recently used first, in plain words."""

    def __init__(self, shape: ModelShape, capacity: int) -> None:
        whole = min(capacity // shape.tiles, shape.layers * shape.experts)
        spare = whole % shape.layers
        self.sizes = [whole // shape.layers + (layer < spare) for layer in range(shape.layers)]
        self.lists: list[list[tuple[int, int]]] = [[] for _ in range(shape.layers)]

    def use(self, layer: int, workload: dict[int, int]) -> None:
        """One layer's step; `workload` has the active experts."""
        kept = self.lists[layer]
        active = [(layer, expert) for expert in sorted(workload)]
        hits = [entry for entry in kept if entry in active]
        others = [entry for entry in kept if entry not in active]
        misses = sorted(set(active) - set(hits), key=lambda entry: (-workload[entry[1]], entry[1]))
        misses = misses[: self.sizes[layer] - len(hits)]
        while len(others) + len(hits) + len(misses) > self.sizes[layer]:
            others.pop(0)
        # the experts of one step are equally recent: the smaller index is evicted after the larger one
        self.lists[layer] = others + sorted(hits + misses, reverse=True)

    def residents(self) -> set[tuple[int, int]]:
        return {entry for entries in self.lists for entry in entries}


@settings(max_examples=120)
@given(data=st.data())
def test_on_demand_is_lru(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    capacity = data.draw(capacities(shape))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    machine = Machine(policy("on-demand"), make_view(shape, capacity), rng)
    reference = Lru(shape, capacity)
    machine.start()
    assert machine.view.target.sum() == 0
    for rows in data.draw(st.lists(st.sampled_from([1, 1, 2, 5, 30]), min_size=1, max_size=8)):
        for layer in range(shape.layers):
            routing = make_routing(shape, rng, rows)
            plan = machine.layer(layer, routing)
            workload = uses(routing)
            assert all(plan.cut[expert] == shape.tiles for expert in workload)
            reference.use(layer, workload)
            kept = {(int(a), int(b)) for a, b in zip(*np.nonzero(machine.view.target), strict=True)}
            assert kept == reference.residents()
            assert set(machine.view.target[machine.view.target > 0]) <= {shape.tiles}


def test_placement_is_limited_to_each_layers_size() -> None:
    """Experts of the first layers beyond their shares of an LRU cache are not placed."""
    shape = ModelShape(layers=4, experts=6, tiles=1, top_k=2)
    popularity = np.tile(np.arange(6, dtype=np.int32), (4, 1))
    view = make_view(shape, 9, popularity=popularity)
    placed = policy("on-demand", placement="first-layers").placement(view)
    assert placed.tolist() == [[0, 0, 0, 1, 1, 1], [0, 1, 1, 0, 0, 0], [0] * 6, [0] * 6]


@settings(max_examples=80)
@given(data=st.data())
def test_workload_replacement(data: st.DataObject) -> None:
    """DALI, Algorithm 2: after each window of a layer's steps, the hottest absent experts for the coldest
    held ones; by default a pair only where its score is higher."""
    shape = data.draw(shapes())
    window, swaps = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    options = {"window": str(window), "swaps": str(swaps), "prediction": "none", "assignment": "resident"}
    options["swap"] = swap = data.draw(st.sampled_from(["higher", "always"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    machine = Machine(policy("dali", **options), make_view(shape, data.draw(capacities(shape))), rng)
    machine.start()
    held = [set(np.flatnonzero(row).tolist()) for row in machine.view.target]
    sizes = [len(one) for one in held]
    whole = min(machine.view.capacity // shape.tiles, shape.layers * shape.experts)
    assert sum(sizes) == whole
    assert max(sizes) - min(sizes) <= shape.experts
    history: list[list[dict[int, int]]] = [[] for _ in held]
    for _ in range(2 * window + 1):
        for layer in range(shape.layers):
            routing = make_routing(shape, rng, data.draw(st.sampled_from([1, 3, 20])))
            machine.layer(layer, routing)
            history[layer].append(uses(routing))
            if len(history[layer]) == window:
                score = [sum(step.get(e, 0) for step in history[layer]) for e in range(shape.experts)]
                history[layer] = []
                before = set(held[layer])
                for _ in range(swaps):  # what has changed places stays there
                    absent = [e for e in range(shape.experts) if e not in held[layer] | before]
                    if not absent or not held[layer] & before:
                        break
                    hot = max(absent, key=lambda e: (score[e], -e))
                    cold = min(held[layer] & before, key=lambda e: (score[e], e))
                    if swap == "higher" and score[hot] <= score[cold]:
                        break
                    held[layer] = (held[layer] - {cold}) | {hot}
            assert set(np.flatnonzero(machine.view.target[layer]).tolist()) == held[layer]
    assert [len(one) for one in held] == sizes


@pytest.mark.parametrize(("experts", "swapped"), [(16, 1), (17, 8)])
def test_workload_defaults_follow_the_model(experts: int, swapped: int) -> None:
    shape = ModelShape(layers=1, experts=experts, tiles=1, top_k=8)
    machine = Machine(
        policy("dali", prediction="none", assignment="resident", placement="first-layers"),
        make_view(shape, experts // 2),
        np.random.default_rng(0),
    )
    machine.start()
    before = machine.view.target
    absent = np.arange(experts - 8, experts, dtype=np.int32)[None]
    routing = Routing(absent, np.ones((1, 8), np.float32))
    for _ in range(3):
        machine.layer(0, routing)
        assert np.array_equal(machine.view.target, before)
    machine.layer(0, routing)
    assert (machine.view.target > before).sum() == swapped


def check_scores(shape: ModelShape, capacity: int, rng: np.random.Generator, rows: Sequence[int]) -> None:
    """HybriMoE: S = 0.5 TopP(s) + 0.5 S; a fetched expert replaces the held one that scores least, whatever
    its own score. A step of each of `rows`. Everything is fetched, so that every active expert enters."""
    one = policy("hybrimoe", prediction="none", assignment="device")
    machine = Machine(one, make_view(shape, capacity), rng)
    machine.start()
    whole = min(machine.view.capacity // shape.tiles, shape.layers * shape.experts)
    sizes = [whole // shape.layers + (layer < whole % shape.layers) for layer in range(shape.layers)]
    held = [set(np.flatnonzero(row).tolist()) for row in machine.view.target]
    score = np.zeros((shape.layers, shape.experts))
    for count in rows:
        for layer in range(shape.layers):
            logits = machine.logits(count)
            shares = np.exp(logits.astype(np.float64))
            shares = (shares / shares.sum(axis=1)[:, None]).mean(axis=0)
            top = sorted(range(shape.experts), key=lambda e: -shares[e])[: 2 * shape.top_k]
            score[layer] *= 0.5
            score[layer, top] += 0.5 * shares[top]
            active = set(uses(machine.visit(layer, logits).routing))
            new = sorted(active - held[layer], key=lambda e: (-score[layer, e], e))
            for expert in new:
                others = held[layer] - active
                if len(held[layer]) < sizes[layer]:
                    held[layer].add(expert)
                elif others:
                    cold = min(others, key=lambda e: (score[layer, e], e))
                    held[layer] = (held[layer] - {cold}) | {expert}
            assert set(np.flatnonzero(machine.view.target[layer]).tolist()) == held[layer]


@settings(max_examples=80)
@given(data=st.data())
def test_score_replacement(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    rows = data.draw(st.lists(st.sampled_from([1, 1, 4]), min_size=12, max_size=12))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    check_scores(shape, data.draw(capacities(shape)), rng, rows)


def test_scores_of_many_steps_keep_their_order() -> None:
    """Beyond the steps after which the scores are rescaled, in each layer."""
    shape = ModelShape(layers=3, experts=8, tiles=1, top_k=2)
    check_scores(shape, 3 * 3, np.random.default_rng(0), [1] * 1040)


def test_used_prediction_moves_into_the_cache_without_a_second_fetch() -> None:
    """A used prediction is not fetched twice; an unused one is evicted when its layer is done."""
    shape = ModelShape(layers=2, experts=8, tiles=2, top_k=1)
    machine = Machine(policy("mixtral-offloading"), make_view(shape, 2 * 4), np.random.default_rng(0))
    machine.start()

    def routed(expert: int) -> Routing:
        return Routing(np.array([[expert]], np.int32), np.ones((1, 1), np.float32))

    def predict(expert: int) -> None:
        logits = np.where(np.arange(8) == expert, 9, 0).astype(np.float32)[None]
        signals = Signals(logits, {1: logits})
        machine.apply(machine.policy.predict(0, signals, Gated.from_router(routed(0)), machine.view))

    predict(5)
    assert machine.view.target[1].tolist() == [0, 0, 0, 0, 0, 2, 0, 0]
    assert machine.policy.plan(1, routed(5), machine.view).targets == ()
    assert machine.policy.after(1, routed(5), machine.view) == ()
    predict(6)
    assert machine.view.target[1].tolist() == [0, 0, 0, 0, 0, 2, 2, 0]
    machine.layer(1, routed(5))
    assert machine.view.target[1].tolist() == [0, 0, 0, 0, 0, 2, 0, 0]
