"""The summary of a trace, and the figures of a replay's phases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from trace_files import drawn_steps, make_header, write_trace

from pipeline.policies.view import ModelShape
from pipeline.replay.outcome import Outcome, PhaseOutcome
from pipeline.replay.overview import summarize
from pipeline.traces.reader import Trace
from pipeline.traces.steps import TracedStep

HEADER = make_header(ModelShape(layers=2, experts=4, tiles=2, top_k=2))


def test_summary_of_a_trace(tmp_path: Path) -> None:
    """A prompt of five rows in a step of 4 s; decode steps of 1, 2 and 9 s, and one without a measurement."""
    rests = (4.0, 1.0, 0.0, 9.0, 2.0)
    steps = [replace(step, rest=rest) for step, rest in zip(drawn_steps(HEADER, 5, 4), rests, strict=True)]
    found = summarize(Trace(write_trace(tmp_path / "f", HEADER, steps)))
    assert found.steps == {"prefill": 1, "decode": 4}
    assert found.rows == {"prefill": 5, "decode": 4}
    assert found.rest == {"prefill": 4.0, "decode": 2.0}
    assert not found.first
    assert not found.cut_short
    counts = np.zeros((2, 4), np.int64)
    for step in steps:
        for layer, traced in enumerate(step.layers):
            np.add.at(counts[layer], traced.router_routing.experts.ravel(), 1)
    assert found.counts.tolist() == counts.tolist()


def with_first(step: TracedStep) -> TracedStep:
    logits = np.zeros((len(step.sequences), 4), np.float16)
    return replace(step, layers=(*step.layers[:-1], replace(step.layers[-1], first=logits)))


@pytest.mark.parametrize("without", [None, 0, 2])
def test_gate_for_the_first_layer_is_known_where_each_step_has_it(
    tmp_path: Path, without: int | None
) -> None:
    steps = [step if n == without else with_first(step) for n, step in enumerate(drawn_steps(HEADER, 2, 2))]
    found = summarize(Trace(write_trace(tmp_path / "f", HEADER, steps)))
    assert found.first == (without is None)
    assert found.rest == {"prefill": None, "decode": None}


def test_figures_of_a_phase() -> None:
    """Each from its own sum; what it would be divided by may be 0."""
    phase = PhaseOutcome(2, steps=3, rows=4, seconds=8.0, host_busy=2.0, device_busy=4.0, link_busy=9.0)
    phase.wait_link, phase.wait_host = 1.0, 3.0
    phase.demanded_tiles, phase.predicted_tiles, phase.useful_tiles = 1, 2, 3
    phase.late_tiles, phase.wasted_tiles, phase.placed_tiles = 4, 5, 6
    phase.wanted_experts, phase.issued_experts, phase.paused_steps = 8, 6, 2
    phase.host_tiles, phase.device_tiles = 1, 3
    phase.active[:], phase.hits[:] = (4, 0), (1, 0)
    phase.active_tiles[:], phase.hit_tiles[:] = (8, 0), (6, 0)
    fidelity = phase.fidelity
    fidelity.weight, fidelity.skipped, fidelity.substituted = 10.0, 1.0, 2.0
    fidelity.stale, fidelity.predicted, fidelity.left = 3.0, 4.0, 5.0
    shares = {"skipped": 0.1, "substituted": 0.2, "stale": 0.3, "predicted": 0.4, "left": 0.5}
    per_token = {"demanded": 25, "predicted": 50, "useful": 75, "late": 100, "wasted": 125, "placed": 150}
    assert phase.to_json(100) == {
        "steps": 3,
        "tokens": 4,
        "seconds": 8.0,
        "tok_s": 0.5,
        "hit_rate": 0.25,
        "hit_rate_by_layer": [0.25, 0.0],
        "tile_hit_rate": 0.75,
        "tile_hit_rate_by_layer": [0.75, 0.0],
        "bytes_per_token": per_token | {"moved": 225},
        "prefetches": {"wanted": 8, "issued": 6, "share": 0.75, "paused_steps": 2},
        "host_share": 0.25,
        "busy": {"host": 0.25, "device": 0.5, "link": 1.0},
        "waits": {"link": 0.125, "host": 0.375},
        "fidelity": shares,
    }
    nothing = PhaseOutcome(1).to_json(100)
    assert (nothing["tok_s"], nothing["hit_rate"], nothing["host_share"]) == (0.0, 0.0, 0.0)
    assert set(nothing["busy"].values()) | set(nothing["bytes_per_token"].values()) == {0.0}
    assert Outcome(phase, PhaseOutcome(2), True, []).phases["prefill"] is phase
