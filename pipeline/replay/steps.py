"""Reads a trace for replays: a summary of the whole, with the check that it can be replayed; and of each step
what its layers need, made for all of them at once, which is quicker than one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import FloatArray, Phase
from pipeline.errors import TraceError
from pipeline.policies.view import Router, Routing
from pipeline.traces.synthetic import DrawnTrace
from pipeline.traces.trace import Trace, TracedStep

KEPT_ROWS = 128  # of a step up to which they are kept with it, for the next replay


@dataclass(frozen=True)
class Overview:
    """The summary of a trace's steps."""

    steps: dict[Phase, int]
    rows: dict[Phase, int]
    counts: NDArray[np.int64]  # [L, E] rows routed to each expert
    first: bool  # each step has logits of the gate for the next token's first layer
    cut_short: bool  # the file ends within a step
    last_steps: dict[int, int]  # the number of each sequence's last step
    rest: float | None  # measured seconds of a decode step that are not simulated; None: not measured


def summarize(trace: Trace | DrawnTrace) -> Overview:
    """Read the whole trace once; the counts of a drawn one are those of other texts. Raises TraceError for a
    damaged one, for one without any step, and for one with a layer that was predicted without running its own
    router: another policy would need its logits."""
    shape = trace.header.shape
    steps: dict[Phase, int] = {"prefill": 0, "decode": 0}
    rows: dict[Phase, int] = {"prefill": 0, "decode": 0}
    counts = np.zeros((shape.layers, shape.experts), np.int64)
    first = True
    last_steps: dict[int, int] = {}
    rest = []
    for step in trace.steps():
        steps[step.phase] += 1
        rows[step.phase] += len(step.sequences)
        last_steps.update(dict.fromkeys(step.sequences, step.number))
        if step.rest and step.phase == "decode":
            rest.append(step.rest)
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
    typical = median(rest) if rest else None
    counts = trace.counts if isinstance(trace, DrawnTrace) else counts
    return Overview(steps, rows, counts, first, trace.cut_short, last_steps, typical)


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
