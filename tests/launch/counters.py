"""An engine's counters of a phase, with known numbers."""

from __future__ import annotations

from typing import Any

from pipeline.counters import PARTS, Counters

TILE = 1_000_000  # bytes
LAYERS = 3
# Seconds of all steps by part: a second in all; the head's are no layer's.
SECONDS = dict.fromkeys(PARTS, 0.0)
SECONDS |= {"link": 0.5, "wait": 0.2, "device": 0.1, "attention": 0.15, "head": 0.05}


def decode(**changed: Any) -> dict[str, Any]:
    """The decode of 10 tokens in 10 steps; `changed`: seconds by part, and counters by name. Layer 0 takes a
    sixth of the time outside the head, layer 1 a third, layer 2 half; hits are none, half, all."""
    counters = Counters(TILE, LAYERS)
    c = counters.phases["decode"]
    c.steps = c.rows = 10
    c.host_tiles, c.resident_tiles, c.fetched_tiles = 40, 30, 50
    c.predicted_tiles, c.useful_tiles, c.wasted_tiles, c.late_tiles = 20, 12, 6, 5
    c.host_busy = 0.1
    seconds = SECONDS | {name: value for name, value in changed.items() if name in PARTS}
    for part in PARTS:
        where = (0, 0, 0, 1) if part == "head" else (1 / 6, 1 / 3, 1 / 2, 0)
        c.seconds[part] = [seconds[part] * share for share in where]
    c.active[:] = 20
    c.hits[:] = (0, 10, 20)
    c.active_tiles[:] = 80
    c.hit_tiles[:] = (0, 40, 80)
    c.fidelity.weight = 60.0
    for name, value in changed.items():
        if name in vars(c.fidelity):
            setattr(c.fidelity, name, value)
        elif name not in PARTS:
            assert hasattr(c, name)
            setattr(c, name, value)
    return counters.snapshot()["decode"]
