"""The summary of a trace, and the figures of a replay's phases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from trace_files import drawn_steps, make_header, write_trace

from pipeline.policies.view import ModelShape
from pipeline.replay.steps import summarize
from pipeline.traces.trace import Trace, TracedStep

HEADER = make_header(ModelShape(layers=2, experts=4, tiles=2, top_k=2))


def test_summary_of_a_trace(tmp_path: Path) -> None:
    """A prompt of five rows in a step of 4 s; decode steps of 1, 2 and 9 s, and one without a measurement."""
    rests = (4.0, 1.0, 0.0, 9.0, 2.0)
    steps = [replace(step, rest=rest) for step, rest in zip(drawn_steps(HEADER, 5, 4), rests, strict=True)]
    found = summarize(Trace(write_trace(tmp_path / "f", HEADER, steps)))
    assert found.steps == {"prefill": 1, "decode": 4}
    assert found.rows == {"prefill": 5, "decode": 4}
    assert found.rest == 2.0
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
    assert found.rest is None
