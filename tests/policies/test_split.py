"""MoEpic's cache: leading tiles of the experts of the highest priority, and its room."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_machine import Machine, capacities, make_calibration, make_routing, make_view, policy, shapes

from pipeline.policies.split import LayerLoads, Reconfiguration, configured
from pipeline.policies.view import Gated, ModelShape, Routing, Signals, Target, View

SHAPE = ModelShape(layers=4, experts=8, tiles=4, top_k=2)
ALONE = {"prediction": "none", "placement": "empty"}


def calibrated(shape: ModelShape, capacity: int, seed: int = 0) -> View:
    return replace(
        make_view(shape, capacity), calibration=make_calibration(shape, np.random.default_rng(seed))
    )


class Cache:
    """Of one layer, in plain words: rows and last steps, and the priority mu * rho ** (nu / omega)."""

    def __init__(self, rows: list[int], size: int) -> None:
        self.rows, self.last, self.size = list(rows), [0] * len(rows), size
        self.step = 0
        self.held: set[int] = set()

    def priority(self, expert: int) -> float:
        if not self.rows[expert]:
            return -1.0
        mu, nu = self.rows[expert] / self.step, self.step - self.last[expert]
        return round(mu * 0.25 ** (nu / 128), 9)

    def use(self, workload: list[int]) -> None:
        self.step += 1
        active = [expert for expert, rows in enumerate(workload) if rows]
        for expert in active:
            self.rows[expert] += workload[expert]
            self.last[expert] = self.step
        for expert in sorted(active, key=lambda e: (-self.priority(e), e)):
            if expert in self.held:
                continue
            idle = self.held - set(active)
            if len(self.held) < self.size:
                self.held.add(expert)
            elif idle:
                least = min(idle, key=lambda e: (self.priority(e), -e))
                if self.priority(least) < self.priority(expert):
                    self.held.remove(least)
                    self.held.add(expert)


@settings(max_examples=60)
@given(data=st.data())
def test_the_cache_keeps_the_experts_of_the_highest_priority(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    view = calibrated(shape, data.draw(capacities(shape)))
    theta = data.draw(st.sampled_from(["0.3", "0.5", "1"]))
    kept = max(1, round(float(theta) * shape.tiles))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    machine = Machine(policy("moepic", theta=theta, **ALONE), view, rng)
    machine.start()
    each, more = divmod(min(view.capacity, shape.layers * shape.experts * shape.tiles) // kept, shape.layers)
    assert view.calibration is not None
    caches = [
        Cache(counts, min(each + (layer < more), shape.experts))
        for layer, counts in enumerate(view.calibration.decode_counts.tolist())
    ]
    for rows in data.draw(st.lists(st.sampled_from([1, 1, 2, 5, 30]), min_size=1, max_size=12)):
        for layer, cache in enumerate(caches):
            routing = make_routing(shape, rng, rows)
            machine.layer(layer, routing)
            cache.use(routing.workload(shape.experts).tolist())
            expected = [kept if expert in cache.held else 0 for expert in range(shape.experts)]
            assert machine.view.target[layer].tolist() == expected


def test_each_layer_has_the_configured_room() -> None:
    """The reserve takes the tiles of four experts; the loads are those of a token."""
    view = calibrated(SHAPE, 16 * 4 + 3)
    calibration, costs = view.calibration, view.costs
    assert calibration is not None
    assert costs is not None
    costs = replace(costs, other=(0.7, 1.0, 2.0), launch=0.05, fetch=0.3)
    view = replace(view, costs=costs)
    window = 0.7 + 0.05 + 2 * 4 * 0.1
    loads = [
        LayerLoads(calibration.hit_rates[layer].tolist(), 2, accuracy, window, 1.6, 0.3, 4)
        for layer, accuracy in enumerate(calibration.accuracy["raw"].tolist())
    ]
    expected = configured(loads, 12 * 4 + 3)
    assert len({division.kept for division in expected}) > 1
    machine = Machine(policy("moepic"), view, np.random.default_rng(0))
    machine.start()
    for layer, division in enumerate(expected):
        ranked = np.argsort(-calibration.decode_counts[layer], kind="stable")[: division.experts]
        assert set(np.flatnonzero(machine.target[layer])) == set(ranked.tolist())
        assert set(machine.target[layer][ranked]) <= {division.kept}
    for _ in range(40):
        machine.step(1)
        cached = [{int(tiles) for tiles in row if tiles} for row in machine.target]
        assert cached == [{d.kept} if d.experts else set() for d in expected], "the reserve is empty"


def predicted(machine: Machine, experts: list[int]) -> tuple[Target, ...]:
    """Layer 0's prediction where layer 1's router names these experts, the best first."""
    logits = np.full((1, 8), -9.0, np.float32)
    logits[0, experts] = 6 - np.arange(len(experts))
    own = Routing(np.array([[0, 1]], np.int32), np.ones((1, 2), np.float32))
    signals = Signals(None, {1: logits})
    return machine.policy.predict(0, signals, Gated.from_router(own), machine.view)


def test_other_tiles_of_cached_experts_are_predicted_first_and_released_afterwards() -> None:
    used = np.zeros((4, 8), np.int32)
    used[:, 3] = 9
    view = make_view(SHAPE, 8 * 4, popularity=used)
    machine = Machine(policy("moepic", theta="0.5"), view, np.random.default_rng(0))
    machine.start()
    assert machine.target[1].tolist() == [2, 0, 0, 2, 0, 0, 0, 0]
    targets = predicted(machine, [5, 3])
    assert targets == (Target(1, 3, 4), Target(1, 5, 4))
    machine.apply(targets)
    routing = Routing(np.array([[3, 6]], np.int32), np.ones((1, 2), np.float32))
    plan = machine.policy.plan(1, routing, machine.view)
    assert plan.targets[0] == Target(1, 5, 0), "it is not needed"
    machine.apply(plan.targets)
    assert machine.target[1, 3] == 4, "the reserve holds its other tiles until the layer has been computed"
    machine.apply(machine.policy.after(1, routing, machine.view))
    assert machine.target[1, 3] == 2
    assert set(machine.target[1]) == {0, 2}
    # an expert that the reserve holds whole enters the cache with its leading tiles
    machine.apply(predicted(machine, [7, 3]))
    routing = Routing(np.array([[7, 7]], np.int32), np.array([[1, 0]], np.float32))
    for _ in range(20):  # until its priority is high enough
        machine.apply(machine.policy.plan(1, routing, machine.view).targets)
        assert machine.target[1, 7] == 4
    machine.apply(machine.policy.after(1, routing, machine.view))
    assert machine.target[1, 7] == 2
    assert machine.target[1].sum() == 4


def test_single_tiles_are_noted() -> None:
    shape = replace(SHAPE, tiles=1)
    for theta, noted in (("0.3", True), ("1", False)):
        notes = policy("moepic", theta=theta).notes(make_view(shape, 20))
        assert any("an expert has a single tile" in note for note in notes) == noted
    assert not any(
        "single tile" in note for note in policy("moepic", theta="0.3").notes(make_view(SHAPE, 64))
    )


def hot(machine: Machine, experts: list[int], steps: int) -> None:
    """Decode steps of which layer 0 uses two of these experts, in turn, and others any."""
    for step in range(steps):
        for layer in range(SHAPE.layers):
            used = [experts[(step + more) % len(experts)] for more in (0, 1)]
            if layer:
                used = machine.rng.permutation(8)[:2].tolist()
            machine.layer(layer, Routing(np.array([used], np.int32), np.ones((1, 2), np.float32)))


def sizes(machine: Machine) -> list[int]:
    return np.count_nonzero(machine.target, axis=1).tolist()


def test_an_idle_engine_configures_by_what_it_has_measured_and_then_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layer 0 uses two experts alone, which its calibration did not know."""
    monkeypatch.setattr(Reconfiguration, "PERIOD", 24)
    alone = {"prediction": "none"}
    machine = Machine(policy("moepic", **alone), calibrated(SHAPE, 64), np.random.default_rng(0))
    machine.start()
    before = sizes(machine)
    hot(machine, [3, 5], 23)
    assert machine.driver.rest() == (), "too little was measured"
    for _ in range(3):  # the first misses are forgotten
        hot(machine, [3, 5], 100)
        machine.apply(machine.driver.rest())
    assert sizes(machine)[0] < before[0]
    assert set(np.flatnonzero(machine.target[0])) >= {3, 5}
    for _ in range(2):
        hot(machine, [3, 5], 200)
        assert machine.driver.rest() == (), "it is the best configuration of this routing already"
    rng = np.random.default_rng(0)
    once = Machine(policy("moepic", reconfigure="0", **alone), calibrated(SHAPE, 64), rng)
    once.start()
    hot(once, [3, 5], 24)
    assert once.driver.rest() == ()


def test_two_texts_in_turn_change_the_configuration_ever_less_often() -> None:
    """Each text lasts as long as it takes to be measured; the gain of each change is large."""
    when, changes = Reconfiguration(1, 2), []
    for step in range(1, 100 * Reconfiguration.PERIOD):
        when.used(0, [1.0, 0.0], [0])
        if when.due:
            when.hits()
            if when.pays(1.0, 0.5):
                changes.append(step)
    apart = np.diff([0, *changes])
    assert (apart[1:] >= 2 * apart[:-1]).all()
    assert not when.pays(1.0, 1 - Reconfiguration.GAIN / 2)
