"""DAOP on hand-worked cases: swaps in a prompt, predictions and replaced experts in decoding."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_machine import LikelyExperts, Machine, make_calibration, make_view, policy

from pipeline.arrays import FloatArray
from pipeline.models.routing import Scored
from pipeline.policies.daop import degrade, swaps
from pipeline.policies.view import ModelShape, Policy, Routing, Signals, Target, View

SHAPE = ModelShape(layers=6, experts=8, tiles=2, top_k=2)


def view_of(
    phase: Literal["prefill", "decode"],
    resident: list[int],
    sequences: tuple[int, ...],
    step: int = 0,
    live: tuple[int, ...] = (),
) -> View:
    """These experts are on the device in every layer. `live`: live sequences without a row in this step."""
    here = np.zeros((6, 8), np.int32)
    here[:, resident] = 2
    view = replace(make_view(SHAPE, 2 * 6 * len(resident)), residency=here, target=here, step=step)
    live_now = frozenset((*sequences, *live))
    calibration = make_calibration(SHAPE, RNG)
    return replace(view, phase=phase, sequences=sequences, live=live_now, calibration=calibration)


RNG = np.random.default_rng(0)
daop = partial(policy, "daop")


def placed(view: View) -> Policy:
    """A policy that has placed its experts in this view."""
    made = daop()
    made.placement(view)
    return made


def rows(*pairs: tuple[int, int], times: int = 1) -> Routing:
    """Rows of two experts each."""
    experts = np.array(pairs * times, np.int32)
    return Routing(experts, np.full(experts.shape, 0.5, np.float32))


def test_placement_is_even_and_by_the_calibrations_decoding() -> None:
    view = replace(make_view(ModelShape(layers=2, experts=4, tiles=2, top_k=2), 2 * 5 + 1))
    calibration = make_calibration(view.shape, RNG)
    decode = np.array([[5, 9, 8, 0], [1, 0, 7, 6]])
    view = replace(view, calibration=replace(calibration, decode_counts=decode))
    # two in each layer, and the fifth goes to expert 0 of layer 0, used five times
    assert daop().placement(view).tolist() == [[2, 2, 2, 0], [0, 0, 2, 2]]


@pytest.mark.parametrize(
    ("counts", "device", "pairs"),
    [
        # E = 4: two pairs. Host 2, 3 have 9 and 4, device 0, 1 have 5 and 1: 9 against 1, 4 against 5
        ([5, 1, 9, 4], [0, 1], [(1, 2)]),
        ([1, 2, 9, 4], [0, 1], [(0, 2), (1, 3)]),
        # 1.05 of 20 is 21: equal is enough
        ([20, 0, 21, 0], [0], [(0, 2)]),
        ([20, 0, 20, 0], [0], []),
        # unused experts: no swap, although 0 >= 1.05 * 0
        ([0, 0, 0, 0], [0, 1], []),
        # at most E / 2 = 2 pairs, though three would be worth it
        ([0, 0, 0, 7], [0, 1, 2], [(0, 3)]),
        ([1, 9, 8, 7], [0], [(0, 1)]),
        # E = 8: four pairs at most, the hottest of the host against the coldest of the device
        ([0, 1, 2, 3, 10, 11, 12, 13], [0, 1, 2, 3], [(0, 7), (1, 6), (2, 5), (3, 4)]),
        ([6, 1, 2, 9, 5, 2, 0, 0], [0, 1, 2, 3], [(1, 4)]),
        # E = 5: two pairs
        ([0, 0, 0, 5, 5], [0, 1, 2], [(0, 3), (1, 4)]),
        ([3, 3], [], []),
    ],
)
def test_swaps_equal_algorithm_1(counts: list[int], device: list[int], pairs: list[tuple[int, int]]) -> None:
    target = [2 if expert in device else 0 for expert in range(len(counts))]
    assert swaps(counts, target, 1.05) == pairs


def test_prompt_swaps_before_its_experts_are_computed() -> None:
    policy = placed(view := view_of("prefill", [0, 1], (7,) * 6))
    # four times 5, twice 1, three times 6, three times 7; the device has 0 (unused) and 1
    routing = rows((5, 6), (5, 7), (5, 6), (5, 7), (1, 6), (1, 7))
    plan = policy.plan(0, routing, view)
    assert plan.targets == (Target(0, 0, 0), Target(0, 5, 2), Target(0, 1, 0), Target(0, 6, 2))
    assert plan.cut.tolist() == [0, 0, 0, 0, 0, 2, 2, 0]
    assert policy.probes(3, view) == ()
    assert policy.ahead(3, Signals(None, {}), view) is None
    assert policy.after(0, routing, view) == ()


def test_counts_accumulate_over_the_chunks_of_a_prompt() -> None:
    policy = placed(view_of("prefill", [0, 1], (7,)))
    first = policy.plan(0, rows((0, 1), times=6), view_of("prefill", [0, 1], (7,) * 6))
    assert first.targets == ()
    # 5 is used four times now, and 0 and 1 were six times before
    second = policy.plan(0, rows((5, 6), times=4), view_of("prefill", [0, 1], (7,) * 4, step=1))
    assert second.targets == ()
    third = policy.plan(0, rows((5, 6), times=3), view_of("prefill", [0, 1], (7,) * 3, step=2))
    assert third.targets == (Target(0, 0, 0), Target(0, 5, 2), Target(0, 1, 0), Target(0, 6, 2))


@pytest.mark.parametrize(("live", "forgotten"), [((7,), False), ((), True)])
def test_counts_last_as_long_as_their_sequence_is_live(live: tuple[int, ...], forgotten: bool) -> None:
    """Also without rows for many steps: it waits between two chunks, or was preempted."""
    policy = placed(view_of("prefill", [0, 1], (7,)))
    policy.plan(0, rows((0, 1), times=5), view_of("prefill", [0, 1], (7,) * 5))
    for step in range(1, 40):
        policy.plan(0, rows((5, 6)), view_of("decode", [0, 1], (8,), step, live))
    later = view_of("prefill", [0, 1], (9,) * 2, 40, live)
    targets = policy.plan(0, rows((5, 6), times=2), later).targets
    assert (len(targets) == 4) == forgotten


def test_two_prompts_in_turn_cause_the_swaps_that_each_causes_alone() -> None:
    """The second prompt begins in the step after the first has ended; the driver says which are live."""

    def swapped(*prompts: tuple[int, Routing]) -> list[int]:
        """Swaps of layer 0 in each prompt, a step each."""
        view = replace(make_view(SHAPE, 2 * 6 * 2), calibration=make_calibration(SHAPE, RNG))
        machine = Machine(daop(placement="popular"), view, np.random.default_rng(0))
        machine.start()
        found = []
        for sequence, routing in prompts:
            machine.driver.begin_step("prefill", (sequence,) * len(routing.experts))
            found.append(len(machine.layer(0, routing).targets) // 2)
            machine.driver.end_step(0, 0)
        return found

    first, second = rows((4, 5), times=20), rows((6, 7), times=3)
    assert swapped((1, first)) == swapped((2, second)) == [2]
    assert swapped((1, first), (2, second)) == [2, 2]


def test_decoding_changes_no_residency() -> None:
    policy = placed(view := view_of("decode", [0, 1], (7,)))
    plan = policy.plan(0, rows((5, 6)), view)
    assert plan.targets == ()
    assert plan.cut.tolist() == [2, 2, 0, 0, 0, 0, 0, 0]


def logits(**favoured: float) -> FloatArray:
    row = np.full(8, -9, np.float32)
    for name, value in favoured.items():
        row[int(name[1:])] = value
    return row[None]


def test_prediction_begins_at_first_layer() -> None:
    view = view_of("decode", [0, 1], (7,))
    for first, layers in (("1", [0, 1, 2, 3, 4]), ("4", [3, 4]), ("5", [4]), ("6", [])):
        policy = daop(first_layer=first)
        assert [layer for layer in range(6) if policy.probes(layer, view)] == layers
        for layer in range(6):
            signals = Signals(None, {layer + 1: logits(e0=1, e1=2)})
            assert (policy.ahead(layer, signals, view) is not None) == (layer in layers)
    assert "first_layer=1" in daop(first_layer="6").notes(view)[0]
    assert daop(first_layer="5").notes(view) == ()
    assert [daop(predict="0").probes(layer, view) for layer in range(6)] == [()] * 6


@pytest.mark.parametrize("early", ["1", "0"])
def test_layer_is_decided_from_the_previous_layers_input(early: str) -> None:
    policy, view = daop(early=early), view_of("decode", [0, 1, 2], (7,))
    ahead = policy.ahead(3, Signals(None, {4: logits(e1=1.5, e6=2)}), view)
    assert ahead is not None
    assert ahead.early == (early == "1")
    assert ahead.gated.predicted
    assert ahead.gated.routing is ahead.gated.router_routing
    assert ahead.gated.router_routing.experts.tolist() == [[6, 1]]
    assert ahead.cut.tolist() == [2, 2, 2, 0, 0, 0, 0, 0]


@settings(max_examples=150)
@given(data=st.data())
def test_degradation_of_any_size(data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 24))
    k = data.draw(st.integers(1, experts))
    rng = np.random.default_rng(data.draw(st.integers(0, 9999)))
    scores = (2 * rng.normal(size=(data.draw(st.integers(1, 4)), experts))).astype(np.float32)
    cut = np.where(rng.random(experts) < data.draw(st.sampled_from([0, 0.3, 0.7, 1])), 3, 1).astype(np.int32)
    router = LikelyExperts(k)
    original = router(scores, 0)
    routing = degrade(original, router, 0, scores, cut, 3)
    assert np.allclose(routing.weights.sum(axis=1), original.weights.sum(axis=1), rtol=1e-5)
    for row in range(len(scores)):
        old, new = original.experts[row].tolist(), routing.experts[row].tolist()
        used = [e for e, w in zip(old, original.weights[row], strict=True) if w]
        away = sorted((e for e in used if cut[e] < 3), key=lambda e: -scores[row, e])
        spare = [e for e in range(experts) if cut[e] == 3 and e not in old]
        spare.sort(key=lambda e: -scores[row, e])
        leave = min(max(0, len(away) - max(1, k // 2)), len(spare))
        gone = away[len(away) - leave :] if leave else []
        assert set(new) == (set(old) - set(gone)) | set(spare[:leave])
        stayed = [(a, b) for a, b in zip(old, new, strict=True) if a not in gone]
        assert all(a == b for a, b in stayed)
        # weights go by probability among those that are used, as they did before
        kept = [(e, w) for e, w in zip(new, routing.weights[row].tolist(), strict=True) if w]
        for (a, one), (b, other) in pairwise(kept):
            assert np.isclose(np.log(one / other), scores[row, a] - scores[row, b], atol=1e-3)


def test_degradation_goes_by_the_routers_scores_and_weights() -> None:
    """A sigmoid router in the second layer: its bias chooses expert 2 before expert 3, and weighs neither."""
    chances = np.array([[0.9, 0.8, 0.3, 0.4]])
    logits = np.log(chances / (1 - chances)).astype(np.float32)
    bias = np.array([[0, 0, 0, 9], [0, 0, 0.2, 0]], np.float32)
    router = Scored("sigmoid", 2, rescaled=True, scale=2.5, bias=bias)
    predicted = router(logits, 1)
    assert predicted.experts.tolist() == [[0, 1]]
    routing = degrade(predicted, router, 1, logits, np.array([0, 1, 2, 2], np.int32), 2)
    assert routing.experts.tolist() == [[0, 2]]  # neither was on the device: the better one stays
    np.testing.assert_allclose(routing.weights, [[2.5 * 0.9 / 1.2, 2.5 * 0.3 / 1.2]], rtol=1e-5)


def test_predicted_layer_is_divided_by_landed_tiles_within_their_targets() -> None:
    """Expert 1 is landing, and expert 2 is about to be evicted."""
    view = view_of("decode", [0, 1, 2], (7,))
    residency, target = view.residency.copy(), view.target.copy()
    residency[4, 1], target[4, 2] = 1, 0
    view = replace(view, residency=residency, target=target)
    ahead = daop().ahead(3, Signals(None, {4: logits(e1=1.5, e2=2, e0=1)}), view)
    assert ahead is not None
    assert ahead.cut.tolist() == [2, 1, 0, 0, 0, 0, 0, 0]
    # neither is wholly on the device: the better one stays, expert 0 replaces the other
    assert ahead.gated.router_routing.experts.tolist() == [[2, 1]]
    assert ahead.gated.routing.experts.tolist() == [[2, 0]]
