"""The routing that presets are replayed on: recorded, or drawn for a model that was not run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from launch.errors import WrongUsage
from launch.forecast import RecordedText
from pipeline.models.shapes import is_shape
from pipeline.replay.overview import summarize
from pipeline.traces.header import Header
from pipeline.traces.reader import Trace
from pipeline.traces.steps import TracedStep
from pipeline.traces.synthetic import EMBEDDED, SyntheticText

MOST = 256  # steps of decode of a trace that count, at most
WARM = 40  # tokens of decode before those that count: caches fill, and policies learn
COUNTED = 32  # tokens of decode that count; with 48 no estimate of 52 was more than 1 % away
HISTORY = 1000  # tokens from which the popularity of experts is known
# Share of the next layer's experts that its router finds one layer ahead, as papers report it: DAOP for
# Mixtral-8x7B, DALI for the others (for Qwen3 with its correction).
ACCURACY = {"mixtral-8x7b": 0.841, "deepseek-v2-lite": 0.795, "qwen3-30b-a3b": 0.933}


def drawn(header: Header, prompt: int, chunk: int, batch: int, seed: int) -> RecordedText:
    """The routing of a model that was not run."""
    name = header.model.removeprefix("shape:").partition("/")[0] if is_shape(header.model) else ""
    accuracy = ACCURACY.get(name)
    text = SyntheticText(header, EMBEDDED if accuracy is None else replace(EMBEDDED, accuracy=accuracy), seed)
    counts = text.counts(HISTORY)
    warm = text.steps(0, 1, WARM, batch)
    steps = [*warm, *text.steps(prompt, chunk, COUNTED, batch)]
    predicted = f", predictions right in {accuracy:.0%} as a paper reports" if accuracy else ""
    words = f"synthetic routing, as uneven as the embedded model's{predicted}"
    unknown = (
        "the model's own routing: a cache hits more where few experts are popular; record it with --record"
        " and give it with --trace",
    )
    return RecordedText(steps, len(warm), counts, _last_steps(steps), words, unknown=unknown)


def recorded(path: Path, header: Header) -> RecordedText:
    """A trace's. `header`: of the model that is advised on. Raises TraceError, WrongUsage."""
    trace = Trace(path)
    of, its = header.shape, trace.header.shape
    if (of.layers, of.experts, of.top_k) != (its.layers, its.experts, its.top_k):
        raise WrongUsage(
            f"--trace {path}: it has {its.layers} layers of {its.experts} experts, {its.top_k} a token, and"
            f" the model {of.layers} of {of.experts}, {of.top_k} a token; give the model that was recorded"
        )
    seen = summarize(trace)
    if not seen.rows["decode"]:
        raise WrongUsage(f"--trace {path}: it has no step of decode")
    steps = list(trace.steps())
    decoded = [index for index, step in enumerate(steps) if step.phase == "decode"]
    begin = decoded[-min(MOST, len(decoded) + 1 >> 1)]
    while begin and steps[begin - 1].phase == "prefill":  # with the prompt before them
        begin -= 1
    before = [index for index in decoded if index < begin]
    history, first = steps[:begin], before[-WARM] if len(before) > WARM else 0
    rows = sum(len(step.sequences) for step in steps[begin:] if step.phase == "decode")
    words = f"recorded routing: of {path.name} the last {rows} tokens count, what is before is the history"
    counts = counts_of(history, of.layers, of.experts)
    return RecordedText(steps[first:], begin - first, counts, seen.last_steps, words, seen.rest["decode"])


def counts_of(steps: Sequence[TracedStep], layers: int, experts: int) -> NDArray[np.int64]:
    """The rows [L, E] of these steps that were routed to each expert."""
    counts = np.zeros((layers, experts), np.int64)
    for step in steps:
        for layer, traced in enumerate(step.layers):
            counts[layer] += traced.router_routing.workload(experts)
    return counts


def _last_steps(steps: Sequence[TracedStep]) -> dict[int, int]:
    last: dict[int, int] = {}
    for step in steps:
        last.update(dict.fromkeys(step.sequences, step.number))
    return last
