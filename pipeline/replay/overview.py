"""A summary of a whole trace, and the check that it can be replayed."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import Phase
from pipeline.errors import TraceError
from pipeline.traces.trace import Trace


@dataclass(frozen=True)
class Overview:
    """The summary of a trace's steps."""

    steps: dict[Phase, int]
    rows: dict[Phase, int]
    counts: NDArray[np.int64]  # [L, E] rows routed to each expert
    first: bool  # each step has logits of the gate for the next token's first layer
    cut_short: bool  # the file ends within a step
    last_steps: dict[int, int]  # the number of each sequence's last step
    rest: dict[Phase, float | None]  # measured seconds a step that are not simulated; None: not measured


def summarize(trace: Trace) -> Overview:
    """Read the whole trace once. Raises TraceError for a damaged one, for one without any step, and for one
    with a layer that was predicted without running its own router: another policy would need its logits."""
    shape = trace.header.shape
    steps: dict[Phase, int] = {"prefill": 0, "decode": 0}
    rows: dict[Phase, int] = {"prefill": 0, "decode": 0}
    counts = np.zeros((shape.layers, shape.experts), np.int64)
    first = True
    last_steps: dict[int, int] = {}
    rest: dict[Phase, list[float]] = {"prefill": [], "decode": []}
    for step in trace.steps():
        steps[step.phase] += 1
        rows[step.phase] += len(step.sequences)
        last_steps.update(dict.fromkeys(step.sequences, step.number))
        if step.rest:
            rest[step.phase].append(step.rest)
        for index, layer in enumerate(step.layers):
            if layer.logits is None:
                raise TraceError(
                    f"{trace.path}: in step {step.number} layer {index} was predicted, and its own router was"
                    " not run; record under a policy that runs all of them, such as all-host"
                )
            counts[index] += layer.router_routing.workload(shape.experts)
        first = first and step.layers[-1].first is not None
    if not any(steps.values()):
        raise TraceError(f"{trace.path} has no complete step")
    # the median: a step in which the machine did something else is not the policy's
    typical = {phase: median(found) if found else None for phase, found in rest.items()}
    return Overview(steps, rows, counts, first, trace.cut_short, last_steps, typical)
