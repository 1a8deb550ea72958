"""Prompts under `tandem`: from so many rows on, which follow from the costs, whole layers go over the link,
and the next one's tiles while this one is computed."""

from __future__ import annotations

import numpy as np
import pytest
from replay_cases import moved, preset
from trace_files import drawn_step, make_header

from pipeline.policies.costs import Costs
from pipeline.policies.view import ModelShape
from pipeline.replay.machine import Outcome, Replay

SHAPE = ModelShape(layers=4, experts=3, tiles=4, top_k=3)  # each row uses every expert
LAYER = SHAPE.experts * SHAPE.tiles  # tiles
ROWS = range(2, 41)
COSTS = Costs(
    rows=(1, 65), host=(1.0, 65.0), device=(0.1, 0.74), link=2.0, round_trip=0.5, other=(2.0, 8.4), launch=0.3
)


def prompt(rows: int, capacity: int, costs: Costs = COSTS) -> tuple[Replay, Outcome]:
    """A prompt's step of so many rows."""
    header = make_header(SHAPE)
    machine = Replay(header, preset("tandem"), costs, capacity)
    return machine, machine.run([drawn_step(header, np.random.default_rng(1), 0, rows, "prefill")])


def best(rows: int) -> int:
    """The tiles of a layer, of which none is there, that the device has to compute for it to end first: by
    trying every number. Of equal ones the most."""

    def seconds(taken: int) -> float:
        host = COSTS.round_trip + (LAYER - taken) * COSTS.host_at[rows] if taken < LAYER else 0.0
        landed, device = 0.0, COSTS.launch if taken else 0.0
        for _ in range(taken):
            landed += COSTS.link
            device = max(device, landed) + COSTS.device_at[rows]
        return max(host, device)

    return min(range(LAYER + 1), key=lambda taken: (round(seconds(taken), 6), -taken))


def test_whole_layers_are_streamed_from_the_number_of_rows_on_that_the_costs_give() -> None:
    streams = []
    for rows in ROWS:
        _, outcome = prompt(rows, capacity=0)
        streamed = outcome.prefill.fetched_tiles == SHAPE.layers * LAYER
        assert streamed == (best(rows) == LAYER), rows
        streams.append(streamed)
    assert streams == sorted(streams)  # below the threshold none, and from there on all
    assert 0 < sum(streams) < len(streams)


@pytest.mark.parametrize("rows", [33, 40])
def test_the_next_layers_tiles_are_copied_while_this_one_is_computed(rows: int) -> None:
    """With room for two layers, of which the link fills one while the device reads the other: the step is
    shorter by more than what the tiles take that need not be moved."""
    machine, outcome = prompt(rows, capacity=2 * LAYER)
    alone, without = prompt(rows, capacity=0)
    every = SHAPE.layers * LAYER
    assert moved(without.prefill) == every
    assert outcome.prefill.predicted_tiles > 0
    assert moved(outcome.prefill) >= every - 2 * LAYER  # the others are there from the beginning
    assert alone.now - machine.now > (every - moved(outcome.prefill)) * COSTS.link
