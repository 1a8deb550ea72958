"""Each preset's placement and cuts against its description, computed here in another way."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_machine import COSTS, Machine, capacities, make_routing, make_view, policy, shapes

from pipeline.arrays import IntArray
from pipeline.policies.assignments import ActiveCosts, given_back
from pipeline.policies.presets import make_policy
from pipeline.policies.view import ModelShape, PolicyRequest, View


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
        saved: dict[int, float] = {}  # by each expert, on the host
        for expert, rows in enumerate(routing.workload(shape.experts)):
            if rows == 0:
                continue
            missing = shape.tiles - residency[expert]
            host = float(np.interp(rows, [1, 4, 16, 28], [1, 2, 7, 12]))
            device = float(np.interp(rows, [1, 4, 16, 28], [0.1, 0.1, 0.3, 0.5]))
            if rows > 28:
                host, device = 12 + (rows - 28) * 5 / 12, 0.5 + (rows - 28) * 0.2 / 12
            saved[expert] = 1.6 * missing + (device - host) * shape.tiles if missing else 0.0
        worth = sum(gain for gain in saved.values() if gain > 0) - 0.1  # the exchange
        for expert, gain in saved.items():
            if abs(worth) > 1e-9 and (abs(gain) > 1e-9 or not gain):  # but for ties within rounding
                assert plan.cut[expert] == (0 if worth > 0 and gain > 0 else shape.tiles)
    assert np.array_equal(machine.view.target, placed)


def check_popular(target: IntArray, popularity: IntArray, capacity: int, shape: ModelShape) -> None:
    """Evenly by layer, in each the most popular; the remainder to the most popular of the others."""
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


@given(data=st.data())
def test_layerwise_computes_each_tile_where_it_is(data: st.DataObject) -> None:
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


@given(data=st.data())
def test_a_threshold_decides_by_rows_alone(data: st.DataObject) -> None:
    shape, most = data.draw(shapes()), data.draw(st.integers(0, 6))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    view = make_view(shape, data.draw(capacities(shape)), costs=None)
    chosen = policy("layerwise", assignment="threshold", rows=str(most))
    machine = Machine(chosen, view, rng, landing=0.5)
    machine.start()
    for layer in range(shape.layers):
        routing = make_routing(shape, rng, data.draw(st.sampled_from([1, 4, 9])))
        resident = np.minimum(machine.view.residency[layer], machine.view.target[layer])
        wanted = np.where(routing.workload(shape.experts) > most, shape.tiles, resident)
        active = routing.active.experts
        assert machine.layer(layer, routing).cut[active].tolist() == wanted[active].tolist()


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
def test_random_depends_on_its_seed_alone(churn: str) -> None:
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


@pytest.mark.parametrize(("churn", "share"), [("0", 0.25), ("1", 0.5)])
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


@given(data=st.data(), floor=st.integers(0, 40), whole=st.booleans())
def test_what_other_machines_would_wait_for_is_not_fetched(
    data: st.DataObject, floor: int, whole: bool
) -> None:
    tiles, some = 4, st.integers(0, 4)
    missing = data.draw(st.lists(some, min_size=1, max_size=6))
    device = data.draw(st.lists(st.booleans(), min_size=len(missing), max_size=len(missing)))
    host = [4.0 * data.draw(some) for _ in missing]
    active = ActiveCosts([1] * len(missing), missing, [float(each) for each in missing], [], host, 1.0, 0.0)
    kept = [0 if whole else tiles - lacks for lacks in missing]
    cuts = [tiles if here else then for here, then in zip(device, kept, strict=True)]

    def on_host(cuts: list[int]) -> float:
        return 1 + sum(each * (tiles - cut) / tiles for each, cut in zip(host, cuts, strict=True))

    found = given_back(cuts, active, tiles, float(floor), whole)
    assert on_host(found) <= max(floor, on_host(cuts))
    for index, (before, now) in enumerate(zip(cuts, found, strict=True)):
        assert now in (before, kept[index])
        if now == before == tiles and missing[index] and kept[index] < tiles:
            more = [*found[:index], kept[index], *found[index + 1 :]]
            assert on_host(more) > floor, "it could go back"
