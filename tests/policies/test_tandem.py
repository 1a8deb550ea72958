"""The preset tandem: its residency, what it fetches ahead, and that its plans are no slower than others'."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from policy_machine import COSTS, LikelyExperts, Machine, make_view, policy

from pipeline.models.routing import Scored, Softmax
from pipeline.policies.costs import MACHINES, derived
from pipeline.policies.division import Divider, cuts
from pipeline.policies.presets import make_policy
from pipeline.policies.view import Active, ModelShape, PolicyRequest, Routing
from pipeline.policies.worth import Worth
from pipeline.replay.machine import Replay
from pipeline.traces.synthetic import EMBEDDED, SyntheticText
from pipeline.traces.trace import Header, TracedStep

SHAPE = ModelShape(layers=6, experts=16, tiles=4, top_k=2)
HEADER = Header("synthetic", "", "", SHAPE, 1, Softmax(2, rescaled=True), 3)
WEIGHTS = 50_000_000  # of an expert


def active(*rows: int) -> Active:
    """Experts 0, 1, ... with so many rows each, which are all different."""
    experts = np.repeat(np.arange(len(rows)), rows).astype(np.int32)[:, None]
    return Routing(experts, np.ones(experts.shape, np.float32)).active


def test_the_cache_is_filled_to_its_last_tile_with_the_most_used_experts() -> None:
    shape = ModelShape(layers=1, experts=4, tiles=4, top_k=1)
    placed = policy("tandem").placement(make_view(shape, 6, popularity=np.array([[1, 9, 0, 5]])))
    assert placed.tolist() == [[0, 4, 0, 2]]


def test_a_valuable_expert_takes_the_last_tiles_of_the_least_valuable() -> None:
    shape = ModelShape(layers=1, experts=3, tiles=4, top_k=1)
    worth = Worth(shape, 8, np.array([[5, 4, 1]]), LikelyExperts(1))
    assert worth.target.tolist() == [[4, 4, 0]]
    assert worth.grow(0, 2, 3, least=0.0, near=0) == []  # nothing is worth less
    assert worth.grow(0, 2, 3, least=9.0, near=0) == [(0, 1, 1), (0, 2, 3)]
    assert worth.target.tolist() == [[4, 1, 3]]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_value_is_a_fresh_and_a_lasting_average_of_router_probabilities(rows: int) -> None:
    """Of decode steps: both decay by their weights, and the lasting one counts half."""
    shape = ModelShape(layers=1, experts=4, tiles=1, top_k=1)
    worth = Worth(shape, 2, np.array([[4, 3, 2, 1]]), LikelyExperts(1))
    averages = {0.2: np.array([0.4, 0.3, 0.2, 0.1]), 0.003: np.array([0.4, 0.3, 0.2, 0.1])}
    for step in range(5):
        logits = np.random.default_rng(step).normal(size=(rows, 4)).astype(np.float32)
        share = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        averages = {new: (1 - new) * old + new * share.mean(axis=0) for new, old in averages.items()}
        worth.note(0, logits, "decode")
        worth.observe(0)
    np.testing.assert_allclose(worth.value[0], averages[0.2] + 0.5 * averages[0.003], rtol=1e-5)


def test_shares_of_a_sigmoid_router_are_those_of_its_layer() -> None:
    """One row: all layers are counted together, each with its own bias, less the row's least score."""
    bias = np.array([[0.0, 0.5, 0.2, 0.0], [0.3, 0.0, 0.0, 0.1]], np.float32)
    shape = ModelShape(layers=2, experts=4, tiles=1, top_k=1)
    worth = Worth(shape, 2, np.zeros((2, 4), np.int64), Scored("sigmoid", 1, rescaled=True, bias=bias))
    logits = np.random.default_rng(0).normal(size=(2, 1, 4)).astype(np.float32)
    for step in range(2):  # the second one counts the first
        for layer in range(2) if not step else (0,):
            worth.note(layer, logits[layer], "decode")
    scores = 1 / (1 + np.exp(-logits[:, 0])) + bias
    scores -= scores.min(axis=1, keepdims=True)
    shares = scores / scores.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(worth.value, (0.2 + 0.5 * 0.003) * shares, rtol=1e-5, atol=1e-8)


def test_tiles_leave_layers_that_were_computed_last() -> None:
    worth = Worth(SHAPE, 6 * 8 * 4, np.ones((6, 16), np.int64), LikelyExperts(1))
    missing = [(layer, expert) for layer, expert in np.argwhere(worth.target == 0).tolist() if layer == 3]
    left = {target.layer for key in missing for target in worth.grow(*key, 4, least=9.0, near=2)} - {3}
    assert left
    assert left <= {2, 1, 0, 5}  # 5: of the step before


def test_a_layer_is_cut_so_that_the_heaviest_experts_are_fetched() -> None:
    divider = Divider()
    divider.use(make_view(ModelShape(1, 4, 4, 2), 0))
    rows, resident = active(16, 1, 1, 4), np.array([0, 4, 0, 0], np.int32)
    balanced = divider.balanced(rows, resident, 4)
    cut = cuts(balanced, resident, 4, [0.0] * 4)
    assert cut[1] == 4  # resident
    assert cut[0] >= cut[3] >= cut[2]
    assert balanced.moved == sum(cut) - 4


def test_of_equal_experts_the_most_valuable_is_fetched() -> None:
    divider = Divider()
    divider.use(make_view(ModelShape(1, 3, 4, 1), 0))
    rows, resident = active(1, 1, 1), np.zeros(3, np.int32)
    balanced = divider.balanced(rows, resident, 4)
    assert 0 < balanced.moved <= 4
    assert cuts(balanced, resident, 4, [1, 3, 2]) == [0, balanced.moved, 0]


def test_where_the_host_is_faster_wherever_tiles_are_no_residency_counts() -> None:
    divider, view = Divider(), make_view(ModelShape(1, 4, 4, 2), 0)
    divider.use(view)
    assert not divider.worthless(2, 4)
    divider.use(replace(view, costs=replace(COSTS, launch=1e3)))
    assert divider.worthless(2, 4)


def test_steps_that_are_faster_on_the_host_alone_are_found_by_the_clock() -> None:
    costs = replace(COSTS, device=COSTS.host, link=10.0)  # so that the host alone is not far behind
    machine = Machine(policy("tandem"), make_view(SHAPE, 4 * 20, costs), np.random.default_rng(0))
    machine.start()
    alone = []
    for _ in range(100):
        machine.cuts.clear()
        machine.step(1)
        alone.append(not any(cut.any() for cut in machine.cuts))
        machine.driver.view = replace(machine.driver.view, seconds=1.0 if alone[-1] else 2.0)
    assert not any(alone[:4])
    assert all(alone[-50:])


@pytest.mark.parametrize("other", [0.0, 20.0])
def test_only_what_lands_in_time_is_fetched_ahead(other: float) -> None:
    costs = replace(COSTS, link=10.0, other=(other,) * 3)
    machine = Machine(policy("tandem"), make_view(SHAPE, 4 * 20, costs), np.random.default_rng(0))
    machine.start()
    for _ in range(6):
        machine.step(1)
    assert (machine.predicted > 0) == (other > 0)


def test_a_model_whose_routers_cannot_be_asked_ahead_is_not_prefetched() -> None:
    costs = replace(COSTS, link=10.0, other=(20.0,) * 3)
    view = replace(make_view(SHAPE, 4 * 20, costs), probing=False)
    machine = Machine(policy("tandem"), view, np.random.default_rng(0))
    machine.start()
    for _ in range(6):
        machine.step(1)
    assert machine.predicted == 0
    assert "prefetches nothing" in machine.driver.notes[0]


def steps(batch: int) -> list[TracedStep]:
    text = SyntheticText(HEADER, EMBEDDED)
    return text.steps(prompt=64, chunk=64, tokens=40, batch=batch)


def replayed(name: str, machine: str, share: float, recorded: list[TracedStep]) -> dict[str, float]:
    """Seconds by phase."""
    costs = derived(MACHINES[machine], WEIGHTS / 2, WEIGHTS, WEIGHTS / 2, WEIGHTS // 4)
    counts = SyntheticText(HEADER, EMBEDDED).counts(400)
    capacity = round(share * SHAPE.layers * SHAPE.experts * SHAPE.tiles)
    made = make_policy(PolicyRequest(name), 0)
    outcome = Replay(HEADER, made, costs, capacity, popularity=counts).run(recorded)
    return {name: sum(map(sum, of.seconds.values())) for name, of in outcome.counters.phases.items()}


@pytest.mark.parametrize("batch", [1, 8])
def test_no_exact_preset_is_faster_on_a_machine_where_both_sides_matter(batch: int) -> None:
    recorded = steps(batch)
    for machine in MACHINES:
        for share in (0.0, 0.3, 0.8, 1.0):
            tandem = replayed("tandem", machine, share, recorded)
            for name in ("all-host", "on-demand", "layerwise", "fiddler", "bandwidth-split", "hybrimoe"):
                other = replayed(name, machine, share, recorded)
                for phase, seconds in tandem.items():
                    assert seconds <= 1.03 * other[phase], (machine, share, name, phase)
