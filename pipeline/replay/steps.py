"""Reads a trace for replays: a summary of the whole, with the check that it can be replayed and where it is
divided; and of each step what its layers need, made for all of them at once, which is quicker than one by
one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import PHASES, FloatArray, Phase
from pipeline.errors import TraceError
from pipeline.policies.view import Router, Routing
from pipeline.traces.synthetic import DrawnTrace
from pipeline.traces.trace import Trace, TracedStep

HISTORY = 32  # steps of decode that come before those that are measured, where there are eight times as many
KEPT_ROWS = 128  # of a step up to which they are kept with it, for the next replay


@dataclass(frozen=True)
class Overview:
    """The summary of a trace's steps."""

    steps: dict[Phase, int]
    rows: dict[Phase, int]
    begin: int  # steps before those that are measured: they warm every policy alike
    measured: dict[Phase, int]  # rows of the steps from there on
    counts: NDArray[np.int64]  # [L, E] rows routed to each expert before them
    first: bool  # each step has logits of the gate for the next token's first layer
    cut_short: bool  # the file ends within a step
    last_steps: dict[int, int]  # the number of each sequence's last step
    rest: float | None  # measured seconds of a decode step that are not simulated; None: not measured


def summarize(trace: Trace | DrawnTrace, most: int | None = None) -> Overview:
    """Read the whole trace, and again what comes before the measured steps, of which `most` are of decode;
    the counts of a drawn one are those of other texts. Raises TraceError for a damaged one, for one without
    any step, and for one with a layer that was predicted without running its own router: another policy would
    need its logits."""
    shape = trace.header.shape
    order: list[Kind] = []
    first = True
    last_steps: dict[int, int] = {}
    rest = []
    for step in trace.steps():
        order.append((step.phase, step.sequences))
        last_steps.update(dict.fromkeys(step.sequences, step.number))
        if step.rest and step.phase == "decode":
            rest.append(step.rest)
        for index, layer in enumerate(step.layers):
            if layer.logits is None:
                raise TraceError(
                    f"{trace.path}: in step {step.number} layer {index} was predicted, and its own router was"
                    " not run; record under a policy that runs all of them, such as all-host"
                )
        first = first and step.layers[-1].first is not None
    if not order:
        raise TraceError(f"{trace.path} has no complete step")
    # the median: a step in which the machine did something else is not the policy's
    typical = median(rest) if rest else None
    begin = division(order, most)
    if isinstance(trace, DrawnTrace):
        counts = trace.counts
    else:
        counts = counts_of(islice(trace.steps(), begin), shape.layers, shape.experts)
    phases = [phase for phase, _ in order]
    return Overview(
        {phase: phases.count(phase) for phase in PHASES},
        *(_rows(order), begin, _rows(order[begin:]), counts, first, trace.cut_short, last_steps, typical),
    )


Kind = tuple[Phase, tuple[int, ...]]  # of a step: the sequence of each of its rows


def _rows(steps: Sequence[Kind]) -> dict[Phase, int]:
    return {phase: sum(len(rows) for of, rows in steps if of == phase) for phase in PHASES}


def division(steps: Sequence[Kind], most: int | None = None) -> int:
    """Returns the first step that is measured: the first one behind a text's end with HISTORY steps before
    it; where no text ends there, half of the steps of decode, with the prompt directly before them. `most`:
    of decode that are measured."""
    kind = "decode" if any(phase == "decode" for phase, _ in steps) else "prefill"
    counted = [index for index, (phase, _) in enumerate(steps) if phase == kind]
    least = min(HISTORY, -(-len(counted) // 8))
    ends = (at for at in _ends(steps) if least <= bisect_left(counted, at) < len(counted))
    begin = next(ends, counted[len(counted) // 2])
    begin = max(begin, counted[-min(most or len(counted), len(counted))])
    while kind == "decode" and begin and steps[begin - 1][0] == "prefill":
        begin -= 1
    return begin


def _ends(steps: Sequence[Kind]) -> Iterator[int]:
    """The steps before which every sequence that has begun has ended, but the first."""
    last = {sequence: index for index, (_, rows) in enumerate(steps) for sequence in rows}
    latest = 0
    for index, (_, rows) in enumerate(steps):
        latest = max(latest, *(last[sequence] for sequence in rows))
        if latest == index:
            yield index + 1


def counts_of(steps: Iterable[TracedStep], layers: int, experts: int) -> NDArray[np.int64]:
    """Returns the rows [L, E] of these steps that were routed to each expert."""
    counts = np.zeros((layers, experts), np.int64)
    for step in steps:
        for layer, traced in enumerate(step.layers):
            counts[layer] += traced.router_routing.workload(experts)
    return counts


def inputs_of(step: TracedStep, router: Router) -> StepInputs:
    """The inputs of a step, those of an earlier replay where they were kept."""
    kept = vars(step)
    inputs: StepInputs | None = kept.get("inputs")
    if inputs is None or inputs.router is not router:
        inputs = StepInputs(step, router)
        if len(step.sequences) <= KEPT_ROWS:
            kept["inputs"] = inputs
    return inputs


class StepInputs:
    """The routers' logits of a step as float32, and the choices of those that were asked ahead."""

    def __init__(self, step: TracedStep, router: Router) -> None:
        self.router = router
        self._layers = step.layers
        self._ahead: dict[int, list[tuple[FloatArray, Routing]]] = {}  # by distance, then by layer
        # [R, E] of each layer
        self.own = [None if of.logits is None else of.logits.astype(np.float32) for of in step.layers]

    def ahead(self, layer: int, distance: int) -> tuple[FloatArray, Routing] | None:
        """The router of a later layer, so many behind this one, on this layer's x: its logits [R, E] and its
        choice. None where the trace has none."""
        routed = self._ahead.get(distance)
        if routed is None:
            routed = self._ahead[distance] = self._routed(distance)
        return routed[layer] if layer < len(routed) else None

    def _routed(self, distance: int) -> list[tuple[FloatArray, Routing]]:
        traced = [layer.predictions for layer in self._layers if len(layer.predictions) >= distance]
        if not traced:
            return []
        logits = np.array([predictions[distance - 1] for predictions in traced], np.float32)  # [l, R, E]
        layers = np.arange(distance, distance + len(logits)).repeat(logits.shape[1])
        routed = self.router(logits.reshape(-1, logits.shape[2]), layers)
        parts = (each.reshape(*logits.shape[:2], -1) for each in (routed.experts, routed.weights))
        routings = [Routing(*part) for part in zip(*parts, strict=True)]
        return list(zip(logits, routings, strict=True))
