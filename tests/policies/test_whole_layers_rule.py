"""The preset tandem with whole layers resident: by the sums of steps, and in replays of machines on which a
layer with work on both sides takes long."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.models.routing import Softmax
from pipeline.policies.costs import Costs
from pipeline.policies.presets import make_policy
from pipeline.policies.view import ModelShape, PolicyRequest
from pipeline.policies.whole_layers import WINDOW, WholeLayers
from pipeline.policies.worth import Worth
from pipeline.replay.machine import Replay
from pipeline.traces.header import Header
from pipeline.traces.steps import TracedStep
from pipeline.traces.synthetic import EMBEDDED, SyntheticText

SHAPE = ModelShape(layers=6, experts=16, tiles=4, top_k=2)
HALF = 6 * 16 * 4 // 2
HEADER = Header("synthetic", "", "", SHAPE, 1, Softmax(2, rescaled=True), 3)
# Seconds of a tile; a layer of both sides takes as long as the host takes for all of a token's tiles.
COSTS = Costs((1, 64), (50e-6, 1e-3), (10e-6, 20e-6), 200e-6, 50e-6, launch=20e-6, fetch=400e-6)
APART = replace(COSTS, both=400e-6, wake=100e-6)


def steps(layers: WholeLayers, count: int, by_use: float) -> int:
    """Steps until it changes, `count` at most. A step takes 16 seconds by whole layers."""
    for step in range(count):
        layers.begin_step()
        for _ in range(SHAPE.layers):
            layers.note(by_use / SHAPE.layers, 16.0 / SHAPE.layers)
        if layers.end_step(True, moved=10, tile=1.0):
            return step + 1
    return count


def test_the_faster_arrangement_is_used_and_each_change_makes_the_next_one_later() -> None:
    layers = WholeLayers(SHAPE, HALF)
    assert layers.count == 3
    assert steps(layers, 100, by_use=17.0) == WINDOW
    assert layers.used
    assert steps(layers, 500, by_use=15.0) == 2 * WINDOW
    assert not layers.used
    assert steps(layers, 500, by_use=17.0) == 4 * WINDOW


@pytest.mark.parametrize("by_use", [15.0, 16.1])
def test_a_small_gain_changes_nothing(by_use: float) -> None:
    layers = WholeLayers(SHAPE, HALF)
    assert steps(layers, 500, by_use) == 500
    assert not layers.used


def test_a_change_that_moves_more_than_it_saves_soon_is_left_out() -> None:
    layers = WholeLayers(SHAPE, HALF)
    for _ in range(4 * WINDOW):
        layers.begin_step()
        for _ in range(SHAPE.layers):
            layers.note(17.0 / SHAPE.layers, 16.0 / SHAPE.layers)
        assert not layers.end_step(True, moved=HALF, tile=1e3)


@pytest.mark.parametrize("capacity", [0, 16 * 4 - 1, 6 * 16 * 4])
def test_without_a_whole_layer_or_with_all_there_is_nothing_to_arrange(capacity: int) -> None:
    assert steps(WholeLayers(SHAPE, capacity), 200, by_use=1e3) == 200


def test_steps_that_were_not_noted_as_a_whole_do_not_count() -> None:
    layers = WholeLayers(SHAPE, HALF)
    for _ in range(4 * WINDOW):
        layers.begin_step()
        layers.note(1e3, 1.0)
        assert not layers.end_step(True, moved=10, tile=1.0)


def test_prompts_count_by_their_seconds_and_not_as_steps() -> None:
    layers = WholeLayers(SHAPE, HALF)
    for decoded in [True] * (WINDOW - 1) + [False] * WINDOW:
        layers.begin_step()
        for _ in range(SHAPE.layers):
            layers.note(*((17.0, 16.0) if decoded else (1.0, 100.0)))
        assert not layers.end_step(decoded, moved=10, tile=1.0)
    assert steps(layers, 10, by_use=17.0) == 10, "the prompts would lose more"
    assert not layers.used


def test_prompts_are_spread_over_the_tokens_that_follow() -> None:
    """A prompt loses 100 seconds and a token gains 1: whole layers pay from 160 tokens on, as they have to
    gain 2 %, and the comparisons are 32 tokens apart. Other prompts then lose them their advantage."""
    layers = WholeLayers(SHAPE, HALF)

    def prompt() -> None:
        layers.begin_step()
        for _ in range(SHAPE.layers):
            layers.note(1.0, 1.0 + 100.0 / SHAPE.layers)
        assert not layers.end_step(False, moved=10, tile=0.1)

    prompt()
    assert steps(layers, 500, by_use=17.0) == 160
    assert layers.used
    for _ in range(4):
        prompt()
    assert steps(layers, 500, by_use=17.0) == 2 * WINDOW
    assert not layers.used


def test_status_says_where_the_host_computes_all() -> None:
    """By the costs of a device that is slower with everything there."""
    text = SyntheticText(HEADER, EMBEDDED).steps(prompt=0, chunk=1, tokens=3)
    tandem = make_policy(PolicyRequest("tandem"), 0)
    slow = replace(COSTS, device=(1e-3, 1e-3))
    Replay(HEADER, tandem, slow, HALF).run(text)
    assert tandem.status.startswith("experts: all on the host; by the costs")
    Replay(HEADER, tandem, COSTS, HALF).run(text)
    assert not tandem.status, "nothing was compared yet"


def test_status_says_which_arrangement_is_resident_and_why() -> None:
    layers = WholeLayers(SHAPE, HALF)
    assert not layers.status
    steps(layers, WINDOW, by_use=15e-3)
    assert layers.status.startswith("resident: the most used experts of every layer; ")
    assert "15 ms so, and 1.6e+04 ms with the first 3 of 6 layers whole" in layers.status
    layers = WholeLayers(SHAPE, HALF)
    steps(layers, WINDOW, by_use=17.0)
    assert layers.status.startswith("resident: the first 3 of 6 layers whole, the others on the host; ")


def test_the_cache_is_rearranged_to_its_last_tile_and_evictions_come_first() -> None:
    worth = Worth(SHAPE, HALF + 6, np.arange(6 * 16).reshape(6, 16))
    before = worth.target.copy()
    target = worth.filled(worth.value, whole=3)
    assert (target[:3] == 4).all()
    assert (target[3:].sum(), target[3:].max()) == (6, 4)
    changes = worth.place(target)
    assert worth.target.sum() == before.sum() == HALF + 6
    for layer, expert, tiles in changes:
        assert before[layer, expert] != tiles
        before[layer, expert] = tiles
        assert before.sum() <= HALF + 6
    assert (before == target).all()
    assert worth.grow(5, 0, 4, least=np.inf, near=5), "others leave for it as before"
    assert worth.target.sum() == HALF + 6


def seconds(name: str, costs: Costs, recorded: list[TracedStep]) -> float:
    counts = SyntheticText(HEADER, EMBEDDED).counts(400)
    replay = Replay(HEADER, make_policy(PolicyRequest(name), 0), costs, HALF, popularity=counts)
    warm = replay.run(recorded[: 2 * WINDOW]).decode.seconds
    return replay.run(recorded[2 * WINDOW :]).decode.seconds - warm


def test_tandem_is_as_fast_as_whole_layers_where_both_sides_hinder_each_other() -> None:
    recorded = SyntheticText(HEADER, EMBEDDED).steps(prompt=16, chunk=16, tokens=130, batch=1)
    by_layer, tandem = (seconds(name, APART, recorded) for name in ("layerwise", "tandem"))
    assert tandem <= 1.01 * by_layer
    assert seconds("tandem", COSTS, recorded) < 0.9 * seconds("layerwise", COSTS, recorded)
