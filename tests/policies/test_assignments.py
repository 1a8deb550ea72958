"""Each preset against what it says it does, computed here in another way."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_machine import COSTS, Machine, capacities, make_routing, make_view, shapes

from pipeline.errors import PolicyError
from pipeline.policies.presets import make_policy
from pipeline.policies.view import IntArray, ModelShape, Policy, PolicyRequest, View


def policy(name: str, **options: str) -> Policy:
    return make_policy(PolicyRequest(name, options), 0)


class Lru:
    """The reference for on-demand: lists of experts, least recently used first, in plain words."""

    def __init__(self, shape: ModelShape, capacity: int, per_layer: bool) -> None:
        whole = min(capacity // shape.tiles, shape.layers * shape.experts)
        if per_layer:
            spare = whole % shape.layers
            self.room = [whole // shape.layers + (layer < spare) for layer in range(shape.layers)]
            self.lists: list[list[tuple[int, int]]] = [[] for _ in range(shape.layers)]
        else:
            self.room, self.lists = [whole], [[]]

    def use(self, layer: int, workload: dict[int, int]) -> None:
        """One layer's step; `workload` has the active experts."""
        index = layer if len(self.lists) > 1 else 0
        kept = self.lists[index]
        active = [(layer, expert) for expert in sorted(workload)]
        hits = [entry for entry in kept if entry in active]
        others = [entry for entry in kept if entry not in active]
        misses = sorted(set(active) - set(hits), key=lambda entry: (-workload[entry[1]], entry[1]))
        misses = misses[: self.room[index] - len(hits)]
        while len(others) + len(hits) + len(misses) > self.room[index]:
            others.pop(0)
        # those of one step are equally recent: the smaller index outlives the larger one
        self.lists[index] = others + sorted(hits + misses, reverse=True)

    def residents(self) -> set[tuple[int, int]]:
        return {entry for entries in self.lists for entry in entries}


@pytest.mark.parametrize("scope", ["layer", "global"])
@settings(deadline=None, max_examples=120)
@given(data=st.data())
def test_on_demand_is_lru(scope: str, data: st.DataObject) -> None:
    shape = data.draw(shapes())
    capacity = data.draw(capacities(shape))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    machine = Machine(policy("on-demand", scope=scope), make_view(shape, capacity), rng)
    # with one layer both scopes are the same thing
    reference = Lru(shape, capacity, per_layer=scope == "layer")
    machine.start()
    assert machine.view.target.sum() == 0
    for rows in data.draw(st.lists(st.sampled_from([1, 1, 2, 5, 30]), min_size=1, max_size=8)):
        for layer in range(shape.layers):
            routing = make_routing(shape, rng, rows)
            plan = machine.layer(layer, routing)
            workload: dict[int, int] = {}
            for expert, weight in zip(routing.experts.ravel(), routing.weights.ravel(), strict=True):
                if weight:
                    workload[int(expert)] = workload.get(int(expert), 0) + 1
            assert all(plan.cut[expert] == shape.tiles for expert in workload)
            reference.use(layer, workload)
            kept = {(int(a), int(b)) for a, b in zip(*np.nonzero(machine.view.target), strict=True)}
            assert kept == reference.residents()
            assert set(machine.view.target[machine.view.target > 0]) <= {shape.tiles}


@settings(deadline=None)
@given(data=st.data())
def test_fiddler_decides_by_its_formula(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    capacity = data.draw(capacities(shape))
    popularity = rng.integers(0, 5, (shape.layers, shape.experts)).astype(np.int32)
    machine = Machine(policy("fiddler"), make_view(shape, capacity, COSTS, popularity), rng, landing=0.5)
    machine.start()
    check_popular(machine.view.target, popularity, capacity, shape)
    placed = machine.view.target
    for layer in range(shape.layers):
        routing = make_routing(shape, rng, data.draw(st.sampled_from([1, 4, 9, 64])))
        residency = machine.view.residency[layer]
        plan = machine.layer(layer, routing)
        for expert, rows in enumerate(routing.workload(shape.experts)):
            if rows == 0:
                continue
            missing = shape.tiles - residency[expert]
            host = float(np.interp(rows, [1, 4, 16, 28], [1, 2, 7, 12]))
            device = float(np.interp(rows, [1, 4, 16, 28], [0.1, 0.1, 0.3, 0.5]))
            if rows > 28:
                host, device = 12 + (rows - 28) * 5 / 12, 0.5 + (rows - 28) * 0.2 / 12
            on_host = missing > 0 and host * shape.tiles < 1.6 * missing + device * shape.tiles
            assert plan.cut[expert] == (0 if on_host else shape.tiles)
    assert np.array_equal(machine.view.target, placed)


def check_popular(target: IntArray, popularity: IntArray, capacity: int, shape: ModelShape) -> None:
    """Evenly by layer, in each the most popular; what is left over to the most popular of the others."""
    whole = min(capacity // shape.tiles, shape.layers * shape.experts)
    chosen: list[tuple[int, int]] = []
    for layer in range(shape.layers):
        ranked = sorted(range(shape.experts), key=lambda expert: (-popularity[layer, expert], expert))
        chosen += [(layer, expert) for expert in ranked[: whole // shape.layers]]
    rest = [(layer, expert) for layer in range(shape.layers) for expert in range(shape.experts)]
    rest = [entry for entry in rest if entry not in chosen]
    rest.sort(key=lambda entry: (-popularity[entry], entry))
    chosen += rest[: whole % shape.layers]
    wanted = np.zeros_like(target)
    for entry in chosen:
        wanted[entry] = shape.tiles
    assert np.array_equal(target, wanted)


def test_fiddler_says_when_it_knows_nothing() -> None:
    shape = ModelShape(layers=2, experts=4, tiles=2, top_k=2)
    counted = np.arange(8, dtype=np.int32).reshape(2, 4)
    assert "no routing has been counted" in policy("fiddler").notes(make_view(shape, 8))[0]
    assert policy("fiddler").notes(make_view(shape, 8, COSTS, counted)) == ()
    # with room for nothing or for everything there is nothing to choose
    assert policy("fiddler").notes(make_view(shape, 0)) == ()
    assert policy("fiddler").notes(make_view(shape, 16)) == ()


def test_fiddler_without_costs() -> None:
    shape = ModelShape(layers=1, experts=2, tiles=1, top_k=1)
    view = make_view(shape, 1, costs=None)
    with pytest.raises(PolicyError, match="costs"):
        policy("fiddler").plan(0, make_routing(shape, np.random.default_rng(0), 1), view)


@pytest.mark.parametrize("name", ["on-demand", "layerwise", "fiddler"])
def test_tiles_that_stay_empty_are_mentioned(name: str) -> None:
    shape = ModelShape(layers=2, experts=4, tiles=3, top_k=2)
    assert "2 of the cache's 8 tiles stay empty" in policy(name).notes(make_view(shape, 8))[0]
    notes = policy(name).notes(make_view(shape, 24))
    assert not any("stay empty" in note for note in notes)


@settings(deadline=None)
@given(data=st.data())
def test_layerwise_computes_where_the_weights_are(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    capacity = data.draw(capacities(shape))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    machine = Machine(policy("layerwise"), make_view(shape, capacity), rng, landing=0.5)
    machine.start()
    flat = machine.view.target.ravel().tolist()
    whole = min(capacity // shape.tiles, len(flat))
    assert flat == [shape.tiles] * whole + [0] * (len(flat) - whole)
    for layer in range(shape.layers):
        residency = machine.view.residency[layer].copy()
        plan = machine.layer(layer, make_routing(shape, rng, 3))
        assert np.array_equal(plan.cut, residency)
        assert plan.targets == ()


def run_random(engine_seed: int, view: View, **options: str) -> tuple[list[IntArray], list[IntArray]]:
    machine = Machine(
        make_policy(PolicyRequest("random", options), engine_seed), view, np.random.default_rng(1)
    )
    machine.start()
    targets = [machine.view.target]
    for _ in range(4):
        machine.step(2)
        targets.append(machine.view.target)
    return targets, machine.cuts


@pytest.mark.parametrize("churn", ["0", "1"])
def test_random_follows_from_its_seed(churn: str) -> None:
    view = make_view(ModelShape(layers=3, experts=8, tiles=4, top_k=2), 50)
    targets, cuts = run_random(5, view, churn=churn)
    again, cuts_again = run_random(0, view, churn=churn, seed="5")
    assert all(np.array_equal(a, b) for a, b in zip(targets, again, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(cuts, cuts_again, strict=True))
    other, other_cuts = run_random(6, view, churn=churn)
    assert not np.array_equal(targets[0], other[0])
    assert not np.array_equal(cuts[0], other_cuts[0])
    changed = [not np.array_equal(a, b) for a, b in pairwise(targets)]
    assert changed == [churn == "1"] * 4


@pytest.mark.parametrize("churn", ["0", "1"])
@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_random_covers_both_kinds_of_cuts(churn: str, share: float) -> None:
    """A part of the resident tiles is left to the host; missing tiles are fetched, others stay there."""
    shape = ModelShape(layers=8, experts=8, tiles=4, top_k=2)
    view = make_view(shape, int(share * 8 * 8 * 4))
    below = between = partial = 0
    for seed in range(5):
        targets, cuts = run_random(seed, view, churn=churn)
        cut = np.stack(cuts[-shape.layers :])
        target = targets[-1]
        below += int(((cut > 0) & (cut < target)).sum())
        between += int(((target < cut) & (cut < shape.tiles)).sum())
        partial += int(((target > 0) & (target < shape.tiles)).sum())
        assert target.sum() >= 0.3 * view.capacity
    assert below >= 10
    assert between >= 10
    assert partial >= 30


def test_churn_follows_the_step_and_not_the_calls() -> None:
    """The same step draws the same changes, whatever was asked before."""
    shape = ModelShape(layers=2, experts=8, tiles=4, top_k=2)
    view = replace(make_view(shape, 40), step=3)
    routing = make_routing(shape, np.random.default_rng(0), 1)
    one, two = policy("random", churn="1"), policy("random", churn="1")
    two.plan(1, routing, view)
    two.plan(0, routing, replace(view, step=2))
    assert one.plan(0, routing, view).targets == two.plan(0, routing, view).targets != ()
    assert one.after(0, routing, view) == two.after(0, routing, view) != ()
