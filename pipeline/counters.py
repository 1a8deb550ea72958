"""Counters of the engine: where the time of its steps went, what was computed where, what was moved, and what
an approximation left out."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pipeline.arrays import IntArray
from pipeline.policies.view import Gated

Part = Literal["attention", "read", "plan", "submit", "shared", "device", "link", "wait", "combine", "head"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass
class Fidelity:
    """Sums of routed weight: all that the routers said, and how much of it was not computed as they said."""

    weight: float = 0.0
    skipped: float = 0.0  # of experts that were left out
    substituted: float = 0.0  # of experts that another took the place of
    stale: float = 0.0  # computed by the host from the layer before's hidden state
    predicted: float = 0.0  # said by a prediction; the layer's own router was not run

    def book(self, gated: Gated, cut: IntArray, tiles: int, stale: bool) -> None:
        """One layer's rows."""
        said, done = gated.said, gated.routing
        total = float(said.weights.sum())
        self.weight += total
        if gated.predicted:
            self.predicted += total
        if done is not said:
            dropped = done.weights == 0
            self.skipped += float(said.weights[dropped].sum())
            self.substituted += float(said.weights[~dropped & (done.experts != said.experts)].sum())
        if stale:
            on_host = 1 - cut[done.experts] / tiles
            self.stale += float((done.weights * on_host).sum())


def fidelity(exact: bool, counted: dict[str, Any]) -> dict[str, Any]:
    """What a person is told of an answer: `exact`, and of an approximate one each kind's share of all routed
    weight, over both phases of a snapshot or a difference of two."""
    if exact:
        return {"exact": True}
    sums = [phase["fidelity"] for phase in counted.values()]
    whole = sum(phase["weight"] for phase in sums)
    kinds = [kind for kind in sums[0] if kind != "weight"]
    shares = {kind: sum(phase[kind] for phase in sums) / whole if whole else 0.0 for kind in kinds}
    return {"exact": False} | shares


@dataclass
class PhaseCounters:
    """Sums over the steps of one phase. Tiles are counted once for each (layer, expert, step) they act in."""

    layers: int
    steps: int = 0
    rows: int = 0
    host_tiles: int = 0
    resident_tiles: int = 0
    fetched_tiles: int = 0
    predicted_tiles: int = 0  # landed because this phase predicted them
    useful_tiles: int = 0  # of those, computed with before they were dropped
    wasted_tiles: int = 0  # of those, dropped before
    late_tiles: int = 0  # demanded while their prediction was under way
    host_busy: float = 0.0  # seconds, the longest run of each layer
    fidelity: Fidelity = field(default_factory=Fidelity)

    def __post_init__(self) -> None:
        self.seconds: NDArray[np.float64] = np.zeros((len(PARTS), self.layers + 1))  # the last: no layer's
        self.active: NDArray[np.int64] = np.zeros(self.layers, np.int64)  # experts that were used
        self.hits: NDArray[np.int64] = np.zeros(self.layers, np.int64)  # of them resident as a whole


class StepClock:
    """Divides a step's time: `mark(part)` books the time since the mark before it. On an asynchronous
    device a part counts the host's time; the device's own shows where the host waits for it ("read")."""

    def __init__(self, counters: PhaseCounters) -> None:
        self._seconds = counters.seconds
        self._last = time.perf_counter()
        self.layer = 0  # whose time it is

    def mark(self, part: Part) -> None:
        now = time.perf_counter()
        self._seconds[_INDEX[part], self.layer] += now - self._last
        self._last = now


_INDEX = {part: index for index, part in enumerate(PARTS)}


class Accounting:
    """All counters since the engine started."""

    def __init__(self, tile_bytes: int, layers: int) -> None:
        self.tile_bytes = tile_bytes
        self.phases = {"prefill": PhaseCounters(layers), "decode": PhaseCounters(layers)}

    def snapshot(self) -> dict[str, Any]:
        """The counters as a JSON-like tree; the differences of two snapshots are a request's own."""
        return {name: _tree(counters, self.tile_bytes) for name, counters in self.phases.items()}


def _tree(c: PhaseCounters, tile_bytes: int) -> dict[str, Any]:
    seconds = c.seconds.sum(axis=1).tolist()
    return {
        "steps": c.steps,
        "rows": c.rows,
        "host_tiles": c.host_tiles,
        "resident_tiles": c.resident_tiles,
        "fetched_tiles": c.fetched_tiles,
        "fetched_bytes": c.fetched_tiles * tile_bytes,
        "predicted_tiles": c.predicted_tiles,
        "useful_tiles": c.useful_tiles,
        "wasted_tiles": c.wasted_tiles,
        "late_tiles": c.late_tiles,
        "host_busy_s": c.host_busy,
        "seconds": dict(zip(PARTS, seconds, strict=True)),
        "layers": {
            "seconds": {part: c.seconds[index, :-1].tolist() for part, index in _INDEX.items()},
            "active": c.active.tolist(),
            "hits": c.hits.tolist(),
        },
        "fidelity": dict(vars(c.fidelity)),
    }


def difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """after - before, number by number; both from `snapshot`."""
    return {key: _minus(value, before[key]) for key, value in after.items()}


def _minus(after: Any, before: Any) -> Any:
    if isinstance(after, dict):
        return difference(after, before)
    if isinstance(after, list):
        return [a - b for a, b in zip(after, before, strict=True)]
    return after - before
