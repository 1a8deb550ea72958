"""Counters of the engine: where the time of its steps went, what was computed where, what was moved."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Part = Literal["attention", "read", "plan", "submit", "shared", "device", "wait", "combine", "head"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass
class PhaseCounters:
    """Sums over the steps of one phase. Tiles are counted once for each (layer, expert, step) they act in."""

    steps: int = 0
    rows: int = 0
    host_tiles: int = 0
    resident_tiles: int = 0
    fetched_tiles: int = 0
    host_busy: float = 0.0  # seconds, the longest run of each layer
    seconds: dict[Part, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))


class StepClock:
    """Divides a step's time: `mark(part)` books the time since the mark before it. On an asynchronous
    device a part counts the host's time; the device's own shows where the host waits for it ("read")."""

    def __init__(self, counters: PhaseCounters) -> None:
        self._seconds = counters.seconds
        self._last = time.perf_counter()

    def mark(self, part: Part) -> None:
        now = time.perf_counter()
        self._seconds[part] += now - self._last
        self._last = now


class Accounting:
    """All counters since the engine started."""

    def __init__(self, tile_bytes: int) -> None:
        self.tile_bytes = tile_bytes
        self.phases = {"prefill": PhaseCounters(), "decode": PhaseCounters()}

    def snapshot(self) -> dict[str, Any]:
        """The counters as a JSON-like tree; the differences of two snapshots are a request's own."""
        return {name: _tree(counters, self.tile_bytes) for name, counters in self.phases.items()}


def _tree(c: PhaseCounters, tile_bytes: int) -> dict[str, Any]:
    return {
        "steps": c.steps,
        "rows": c.rows,
        "host_tiles": c.host_tiles,
        "resident_tiles": c.resident_tiles,
        "fetched_tiles": c.fetched_tiles,
        "fetched_bytes": c.fetched_tiles * tile_bytes,
        "host_busy_s": c.host_busy,
        "seconds": {part: c.seconds[part] for part in PARTS},
    }


def difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """after - before, number by number; both from `snapshot`."""
    return {
        key: difference(value, before[key]) if isinstance(value, dict) else value - before[key]
        for key, value in after.items()
    }
