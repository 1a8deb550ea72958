"""Layers whose masks leave channels out, replayed: sums by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from replay_cases import COSTS, moved, preset, run, took
from trace_files import drawn_steps, make_header

from pipeline.policies.view import ModelShape
from pipeline.replay.machine import CHANNELS, RIGHTS, Replay, right_at

SHAPE = ModelShape(layers=2, experts=4, tiles=4, top_k=1)
PLAIN = make_header(SHAPE)
HEADER = replace(PLAIN, up="int2-g64", up_bytes=PLAIN.tile_bytes // 4)  # a fifth of a tile's bytes
NOTED = "channels that a prediction names"
MASKED = {"sparsity": "0.75", "prediction": "none"}


def test_a_layer_takes_its_up_matrices_and_then_each_kept_quarter_as_it_lands() -> None:
    """Other 2, up 4 x 0.2, then a quarter of 4 tiles on the link, and of the last one on the device."""
    _, outcome = run(HEADER, preset("floe", **MASKED), [[[0], [1]]])
    each = 2 + 0.8 + 4 * 5 / 4 + 0.8 / 4
    assert took(outcome.decode) == pytest.approx(2 * each)
    assert outcome.decode.link_busy == pytest.approx(10)
    assert moved(outcome.decode) == pytest.approx(2)
    assert not any(NOTED in note for note in outcome.notes)


def test_resident_tiles_are_not_moved() -> None:
    """Both experts fit; of them the device reads up and a quarter of the rest."""
    counts = [[1, 0, 0, 0], [0, 1, 0, 0]]
    policy = preset("floe", **MASKED)
    _, outcome = run(HEADER, policy, [[[0], [1]]], capacity=8, popularity=counts)
    assert took(outcome.decode) == pytest.approx(2 * (2 + 4 * (0.2 + 0.8 / 4)))
    assert moved(outcome.decode) == 0


def test_tiles_that_stay_are_fetched_whole() -> None:
    policy = preset("on-demand", sparsity="0.75")
    _, outcome = run(HEADER, policy, [[[0], [1]]], capacity=8)
    assert (outcome.decode.fetched_tiles, moved(outcome.decode)) == (8, 8)


def test_the_host_reads_the_same_share() -> None:
    _, outcome = run(HEADER, preset("floe-host", sparsity="0.75"), [[[0], [1]]])
    assert outcome.decode.host_busy == pytest.approx(2 * 3 * 4 * (0.2 + 0.8 / 4))


def test_predicted_channels_are_used_where_they_are_needed() -> None:
    """Layer 1's channels move behind those of layer 0, until it begins: of the 64 of each tile 48 are right,
    and the other 16 come on demand."""
    costs = replace(COSTS, other=(20.0,))
    _, outcome = run(HEADER, preset("floe", sparsity="0.75"), [[[0], [0]]], costs=costs)
    first = 20 + 0.8 + 4 * 5 / 4 + 0.8 / 4
    second = 20 + 0.8 + 4 * 5 * 16 / 256 + 0.8 / 4
    assert took(outcome.decode) == pytest.approx(first + second)
    assert moved(outcome.decode) == pytest.approx(1 + 1 + 4 * 16 / 256)


def test_prediction_helps_while_the_link_would_be_idle() -> None:
    header = replace(make_header(ModelShape(6, 4, 4, 1)), up="int2-g64", up_bytes=100)
    seconds = {}
    for name in ("none", "next-channels"):
        policy = preset("floe", sparsity="0.75", prediction=name)
        machine = Replay(header, policy, replace(COSTS, other=(20.0,)), 0)
        for step in drawn_steps(header, 3, 20):
            machine.step(step)
        outcome = machine.outcome
        seconds[name] = took(outcome.decode)
        assert any(NOTED in note for note in outcome.notes) == (name == "next-channels")
        assert machine.now == pytest.approx(sum(took(phase) for phase in outcome.counters.phases.values()))
        assert np.isclose(
            sum(p.link_busy for p in outcome.counters.phases.values()) / COSTS.link,
            sum(moved(p) for p in outcome.counters.phases.values()),
        )
    assert seconds["next-channels"] < seconds["none"]


def test_the_more_channels_are_left_out_the_fewer_predictions_are_right() -> None:
    assert [right_at(sparsity) for sparsity, _ in RIGHTS] == [right for _, right in RIGHTS]
    shares = [right_at(sparsity) for sparsity in np.linspace(0, 0.9, 10)]
    assert shares == sorted(shares, reverse=True)
    assert right_at(0.95) <= right_at(0.9)


@pytest.mark.parametrize("name", ["fiddler", "dali", "tandem"])
def test_plans_go_by_kept_channels(name: str) -> None:
    """A whole tile crosses the link in 5, a quarter of its channels in 1.25: less than the host takes."""
    costs, moves = replace(COSTS, host=(4.0,), device=(0.5,)), {}
    for sparsity in ("0", "0.75"):
        policy = preset(name, sparsity=sparsity, **({"prediction": "none"} if name == "dali" else {}))
        _, outcome = run(HEADER, policy, [[[0], [1]], [[2], [0]]], costs=costs, capacity=0)
        moves[sparsity] = outcome.decode.channels.moved / CHANNELS
        assert outcome.decode.fetched_tiles == 0 or sparsity == "0"
    assert moves["0"] == 0
    assert moves["0.75"] > 0
