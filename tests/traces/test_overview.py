"""The summary of a trace, and the figures of a replay's phases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from trace_files import drawn_steps, make_header, write_trace

from pipeline.arrays import Phase
from pipeline.policies.view import ModelShape
from pipeline.replay.steps import division, summarize
from pipeline.traces.trace import Trace

HEADER = make_header(ModelShape(layers=2, experts=4, tiles=2, top_k=2))


def test_summary_of_a_trace(tmp_path: Path) -> None:
    """A prompt of five rows in a step of 4 s; decode steps of 1, 2 and 9 s, and one without a measurement."""
    rests = (4.0, 1.0, 0.0, 9.0, 2.0)
    steps = [replace(step, rest=rest) for step, rest in zip(drawn_steps(HEADER, 5, 4), rests, strict=True)]
    found = summarize(Trace(write_trace(tmp_path / "f", HEADER, steps)))
    assert found.steps == {"prefill": 1, "decode": 4}
    assert found.rows == {"prefill": 5, "decode": 4}
    assert (found.begin, found.measured) == (3, {"prefill": 0, "decode": 2})
    assert found.rest == 2.0
    assert not found.first
    assert not found.cut_short
    counts = np.zeros((2, 4), np.int64)
    for step in steps[:3]:
        for layer, traced in enumerate(step.layers):
            np.add.at(counts[layer], traced.router_routing.experts.ravel(), 1)
    assert found.counts.tolist() == counts.tolist()


def texts(*lengths: int, batch: int = 1) -> list[tuple[Phase, tuple[int, ...]]]:
    """Steps of texts one after the other: prompts, then so many steps of decode with a row of each."""
    steps: list[tuple[Phase, tuple[int, ...]]] = []
    for number, length in enumerate(lengths):
        sequences = tuple(range(number * batch, (number + 1) * batch))
        steps += [("prefill", (sequence,)) for sequence in sequences]
        steps += [("decode", sequences)] * length
    return steps


def test_measured_steps_begin_with_a_text_that_nothing_before_them_belongs_to() -> None:
    assert division(texts(64, 256)) == 65
    assert division(texts(64, 128, batch=3)) == 67
    assert division(texts(2, 30, 60)) == 34  # the first text alone is too short to warm anything
    assert division(texts(40)) == 21
    assert division(texts(1)) == 0
    assert division(texts(0, 0, 0)) == 1  # prompts alone
    assert division(texts(10, 300), most=100) == 212
    overlapping: list[tuple[Phase, tuple[int, ...]]] = [("prefill", (1,))] * 2 + [("decode", (0, 1))] * 6
    assert division([*texts(6), *overlapping]) == 7  # with its prompt, within the first text
