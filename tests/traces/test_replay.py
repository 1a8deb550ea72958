"""Replays against hand-worked timelines.

The costs of a tile: host 3, device 1, link 5, a round trip 0.5, a layer's other work 2.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from replay_cases import COSTS, Scripted, booked, moved, preset, profile, resident, run, took, unused
from trace_files import make_header, scripted_steps

from pipeline.errors import PlanError, TraceError
from pipeline.policies.costs import Costs
from pipeline.policies.view import Gated, ModelShape, Routing, Signals, Target, View
from pipeline.replay.machine import Replay

# Two layers of two experts, of which a token uses one; an expert has so many tiles.
ONE_TILE, TWO_TILES = (make_header(ModelShape(layers=2, experts=2, tiles=n, top_k=1)) for n in (1, 2))


def test_host_computes_all_experts() -> None:
    """A layer: other work until 2, the Work arrives at 2.5, two experts of one tile take until 8.5."""
    header = make_header(ModelShape(layers=2, experts=4, tiles=1, top_k=2))
    _, outcome = run(header, preset("all-host"), [[[0, 1], [2, 3]]])
    decode = outcome.decode
    assert took(decode) == pytest.approx(17)
    assert profile(outcome).tok_s == pytest.approx(1 / 17)
    assert (decode.host_busy, took(decode, "attention", "device"), decode.link_busy) == pytest.approx(
        (12, 4, 0)
    )
    assert (took(decode, "wait"), took(decode, "link")) == pytest.approx((13, 0))
    assert (profile(outcome).hit_rate, moved(decode), profile(outcome).host_share) == (0, 0, 1)
    assert outcome.exact
    assert outcome.prefill.steps == 0


def test_on_demand_from_cold_to_warm() -> None:
    """Cold: other until 2, tiles land at 7 and 12, the second is computed until 13. Warm: 2 + 2. Then one of
    two is resident: it is computed until 3, the other lands at 7 and is done at 8."""
    header = make_header(ModelShape(layers=1, experts=4, tiles=1, top_k=2))
    machine, outcome = run(header, preset("on-demand"), [[[0, 1]], [[0, 1]], [[0, 2]]], capacity=2)
    decode = outcome.decode
    assert took(decode) == pytest.approx(13 + 4 + 8)
    assert took(decode, "link") == pytest.approx(5 + 4 + 0 + 4)
    assert decode.link_busy == pytest.approx(15)
    assert booked(decode) == {"fetched": 3}
    assert (decode.active.tolist(), decode.hits.tolist()) == ([6], [3])
    assert machine.cache.residency[0].tolist() == [1, 0, 1, 0]


def test_tiles_are_computed_as_they_land() -> None:
    """An expert of three tiles that cost the device 5 each: they land at 7, 12 and 17, and are computed from
    7 to 22 without a gap, where waiting for the whole would have taken until 17 + 15."""
    header = make_header(ModelShape(layers=1, experts=2, tiles=3, top_k=1))
    slow = replace(COSTS, device=(5.0,))
    _, outcome = run(header, preset("on-demand"), [[[0]]], capacity=3, costs=slow)
    assert took(outcome.decode) == pytest.approx(7 + 3 * 5)
    assert took(outcome.decode, "link") == pytest.approx(5)


def test_early_work_is_hidden_behind_the_next_layer() -> None:
    """Layer 0: the host computes from 2.5 to 5.5, then at once layer 1's share, which was sent at 2, until
    8.5. The device finishes layer 1's other work at 7.5."""
    header = make_header(ModelShape(layers=2, experts=4, tiles=1, top_k=1))
    _, early = run(header, Scripted(cut=0, ahead=True), [[[0], [1]]])
    assert took(early.decode) == pytest.approx(8.5)
    assert took(early.decode, "wait") == pytest.approx(3.5 + 1)
    assert profile(early).fidelity["stale"] == pytest.approx(0.5)
    _, late = run(header, Scripted(cut=0, ahead=False), [[[0], [1]]])
    assert took(late.decode) == pytest.approx(5.5 + 5.5)
    assert profile(late).fidelity["stale"] == 0
    assert [profile(each).fidelity["predicted"] for each in (early, late)] == pytest.approx([0.5, 0.5])
    assert early.decode.host_busy == late.decode.host_busy == pytest.approx(6)


def predict_next(layer: int, view: View) -> list[Target]:
    return [Target(1, 1, view.shape.tiles)] if layer == 0 else []


def test_prediction_lands_in_time() -> None:
    """Predicted at 2, moved until 4.5. Layer 0 ends at 3, layer 1 plans at 5 and finds it resident."""
    policy = Scripted(1, placed=[(0, 0, 1)], predicts=predict_next)
    _, outcome = run(ONE_TILE, policy, [[[0], [1]]], capacity=2, costs=replace(COSTS, link=2.5))
    decode = outcome.decode
    assert took(decode) == pytest.approx(6)
    assert policy.residencies == [[1, 0], [0, 1]]
    assert booked(decode) == {"predicted": 1, "useful": 1}
    assert decode.hits.tolist() == [1, 1]


def test_prediction_lands_late() -> None:
    """Predicted at 2, it lands at 7. Layer 1 plans at 5 without it, waits for it, and is done at 8: two less
    than had it been demanded at 5."""
    policy = Scripted(1, placed=[(0, 0, 1)], predicts=predict_next)
    _, outcome = run(ONE_TILE, policy, [[[0], [1]]], capacity=2)
    decode = outcome.decode
    assert took(decode) == pytest.approx(8)
    assert took(decode, "link") == pytest.approx(2)
    assert decode.link_busy == pytest.approx(5)
    assert booked(decode) == {"fetched": 1, "late": 1}


def test_fetched_tiles_overtake_a_prediction() -> None:
    """Two tiles of (1, 1) are predicted at 2. Layer 1 wants expert 0 instead, at 5: the tile that moves lands
    at 7, expert 0's at 12 and 17, and only then the other predicted one, at 22."""
    policy = Scripted(2, placed=[(0, 0, 2)], predicts=predict_next)
    machine, outcome = run(TWO_TILES, policy, [[[0], [0]]], capacity=4)
    # layer 0: 2 and two tiles until 4; layer 1: until 6, tiles at 12 and 17, done at 18
    assert took(outcome.decode) == pytest.approx(18)
    assert booked(outcome.decode) == {"fetched": 2, "predicted": 1}
    assert [resident(machine, now)[1] for now in (21.9, 22)] == [[0, 1], [0, 2]]
    assert unused(machine) == 2


def test_prediction_follows_its_own_layers_demand() -> None:
    """Layer 0 demands a tile and predicts another at 2: the demanded one lands at 7 and is computed until 8,
    the predicted one lands at 12. Layer 1 plans at 10, waits for it, and is done at 13."""
    _, outcome = run(ONE_TILE, Scripted(1, predicts=predict_next), [[[0], [1]]], capacity=2)
    decode = outcome.decode
    assert took(decode) == pytest.approx(13)
    assert took(decode, "link") == pytest.approx(5 + 2)
    assert decode.link_busy == pytest.approx(10)
    assert booked(decode) == {"fetched": 2, "late": 1}


def test_predicted_tiles_overtake_placed_ones() -> None:
    """After layer 0 two tiles of (0, 1) are to be placed, from 4 on; at 6 one of (1, 1) is predicted and
    comes second: the placed one that moves lands at 9, the predicted one at 14, the other placed at 19."""

    def predicts(layer: int, view: View) -> list[Target]:
        return [Target(1, 1, 1)] if layer == 1 else []

    placed = [(0, 0, 2), (1, 0, 2)]
    policy = Scripted(2, placed, predicts=predicts, afterwards=[(0, Target(0, 1, 2))])
    machine, outcome = run(TWO_TILES, policy, [[[0], [0]]], capacity=8)
    assert took(outcome.decode) == pytest.approx(8)
    seen = [resident(machine, now) for now in (8.9, 9, 13.9, 14, 18.9, 19)]
    assert [(by_layer[0][1], by_layer[1][1]) for by_layer in seen] == [
        *((0, 0), (1, 0), (1, 0), (1, 1), (1, 1), (2, 1)),
    ]
    assert booked(outcome.decode) == {"placed": 2, "predicted": 1}


def test_dropped_prediction_is_wasted() -> None:
    placed = [(0, 0, 1), (1, 0, 1)]
    policy = Scripted(1, placed, predicts=predict_next, afterwards=[(1, Target(1, 1, 0))])
    machine, outcome = run(ONE_TILE, policy, [[[0], [0]]], capacity=3, costs=replace(COSTS, link=2.5))
    decode = outcome.decode
    assert booked(decode) == {"predicted": 1, "wasted": 1}
    assert unused(machine) == 0


def test_wide_batches_cost_the_grids_seconds() -> None:
    """Three rows of one step, two of them on expert 0."""
    header = make_header(ModelShape(layers=1, experts=3, tiles=1, top_k=1))
    one = scripted_steps(header, [[[0]], [[0]], [[1]]], "prefill")
    layers = [step.layers[0] for step in one]
    own = Routing(
        np.concatenate([layer.router_routing.experts for layer in layers]),
        np.concatenate([layer.router_routing.weights for layer in layers]),
    )
    logits = np.concatenate([layer.logits for layer in layers if layer.logits is not None])
    layer = replace(layers[0], router_routing=own, logits=logits)
    step = replace(one[0], sequences=(4, 4, 4), layers=(layer,))
    grid = Costs((1, 2, 3), (3.0, 4.0, 5.0), (1.0, 1.0, 1.0), 5.0, 0.5, (2.0, 2.0, 7.0))
    outcome = Replay(header, preset("all-host"), grid, 0).run([step])
    assert took(outcome.prefill) == pytest.approx(7 + 0.5 + 4 + 3)
    assert outcome.prefill.rows == 3


class AtTheEnd(Scripted):
    """Asks after the last layer for the next token's first layer."""

    def __init__(self) -> None:
        super().__init__(0)
        self.seen: list[Signals] = []

    def probes(self, layer: int, view: View) -> tuple[int, ...]:
        return (0,) if layer == view.shape.layers - 1 else ()

    def predict(self, layer: int, signals: Signals, gated: Gated, view: View) -> tuple[Target, ...]:
        self.seen.append(signals)
        return ()


def test_gate_for_the_next_tokens_first_layer_is_replayed() -> None:
    (step,) = scripted_steps(ONE_TILE, [[[0], [1]]])
    gate = np.array([[0.5, -2.0]], np.float16)
    recorded = replace(step, layers=(step.layers[0], replace(step.layers[1], first=gate)))
    policy = AtTheEnd()
    Replay(ONE_TILE, policy, COSTS, 0).run([recorded])
    assert [list(signals.probes) for signals in policy.seen] == [[], [0]]
    assert policy.seen[1].probes[0].dtype == np.float32
    assert policy.seen[1].probes[0].tolist() == [[0.5, -2.0]]
    with pytest.raises(TraceError, match="scripted asks at layer 1 for a prediction of layer 0"):
        Replay(ONE_TILE, AtTheEnd(), COSTS, 0).run([step])


def test_phases_are_counted_apart_and_given_popularity_stays() -> None:
    """A prompt's step and a decoded token, each 11 seconds; the counts are the policy's own."""
    counts = np.array([[5, 1], [1, 5]])
    machine = Replay(ONE_TILE, preset("all-host"), COSTS, 9, popularity=counts)
    prompt, token = (scripted_steps(ONE_TILE, [[[0], [1]]], phase)[0] for phase in ("prefill", "decode"))
    outcome = machine.run([prompt, token, token])
    prefill, decode = outcome.prefill, outcome.decode
    assert (prefill.steps, prefill.rows, decode.steps, decode.rows) == (1, 1, 2, 2)
    assert (took(prefill), took(decode)) == pytest.approx((11, 22))
    assert (prefill.host_tiles, decode.host_tiles, prefill.resident_tiles) == (2, 4, 0)
    assert (prefill.active.tolist(), decode.active.tolist()) == ([1, 1], [2, 2])
    assert (prefill.fidelity.weight, decode.fidelity.weight) == (2.0, 4.0)
    assert counts.tolist() == [[5, 1], [1, 5]]
    assert outcome.notes == []


def test_policy_on_the_host_has_no_cache() -> None:
    machine = Replay(ONE_TILE, preset("all-host"), COSTS, 9)
    with pytest.raises(PlanError, match="the cache holds 0"):
        machine.mover.retarget([Target(0, 0, 1)])


def test_host_share_of_each_tile_below_the_cut() -> None:
    """Of two tiles the device computes one, which is resident, until 3; the host the other, until 5.5."""
    _, outcome = run(TWO_TILES, Scripted(1, placed=[(0, 0, 2), (1, 1, 2)]), [[[0], [1]]], capacity=4)
    decode = outcome.decode
    assert took(decode) == pytest.approx(11)
    assert (decode.host_tiles, decode.resident_tiles, profile(outcome).host_share) == (2, 2, 0.5)
    assert (decode.host_busy, took(decode, "attention", "device")) == pytest.approx((6, 2 * (2 + 1)))
    assert took(decode, "wait") == pytest.approx(2 * 2.5)
    assert decode.hits.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("cut", "seconds", "device", "link"),
    [
        (0, 2 + 0.5 + 6, 2, 0),
        (1, 2 + 0.25 + 5 + 1, 2 + 0.75 + 1, 5.25),
        (2, 2 + 0.25 + 2 * 5 + 1, 4.75, 10.25),
    ],
)
def test_each_sides_share_begins_with_its_fixed_cost(
    cut: int, seconds: float, device: float, link: float
) -> None:
    """A launch takes 0.75, a fetch 0.25: neither is paid where the device computes no tile."""
    header = make_header(ModelShape(layers=1, experts=2, tiles=2, top_k=1))
    costs = replace(COSTS, launch=0.75, fetch=0.25)
    _, missing = run(header, Scripted(cut), [[[0]]], capacity=2, costs=costs)
    assert took(missing.decode) == pytest.approx(seconds)
    assert (took(missing.decode, "attention", "device"), missing.decode.link_busy) == pytest.approx(
        (device, link)
    )
    _, resident = run(header, Scripted(2, placed=[(0, 0, 2)]), [[[0]]], capacity=2, costs=costs)
    assert took(resident.decode) == pytest.approx(2 + 0.75 + 2)
    assert resident.decode.link_busy == 0
