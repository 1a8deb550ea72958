"""Composed presets and daop decide as they did when their decisions were recorded.

`PYTHONPATH=.:tests/policies python tests/policies/test_recorded_decisions.py` records them anew, after a
change that means to change decisions.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from policy_machine import Machine, make_calibration, make_view

from pipeline.engine.driver import LayerDecision
from pipeline.policies.presets import PRESETS, make_policy
from pipeline.policies.view import ModelShape, PolicyRequest, Target

RECORDED = Path(__file__).with_name("data") / "decisions.json"
SHAPES = {  # with a cache's tiles: many whole experts, few, and a remainder
    "large": (ModelShape(layers=6, experts=16, tiles=2, top_k=2), 81),
    "small": (ModelShape(layers=5, experts=12, tiles=3, top_k=4), 41),
}
REQUESTS = [
    *(PolicyRequest(name) for name, preset in PRESETS.items() if preset.parts),
    PolicyRequest("daop"),
    PolicyRequest("on-demand", {"prediction": "lookahead"}),
    PolicyRequest("layerwise", {"prediction": "next-gate", "replacement": "lru"}),
    PolicyRequest("fiddler", {"gate": "adaptive", "replacement": "score"}),
    PolicyRequest("dali", {"gate": "pre-gated", "window": "1"}),
    PolicyRequest("bandwidth-split", {"replacement": "lru", "prediction": "next-gate"}),
    PolicyRequest("on-demand", {"placement": "known", "prediction": "whole-layer"}),
]
STEPS = [1, 9, 1, 1, 3, *[1] * 25, 40, 1, 1]  # rows


@dataclass
class Summed(Machine):
    """Sums up the cuts of active experts and all targets, in their order."""

    checksum: int = 0

    def add(self, kind: str, numbers: object) -> None:
        self.checksum = zlib.crc32(f"{kind} {numbers}".encode(), self.checksum)

    def note(self, kind: str, targets: Iterable[Target]) -> None:
        self.add(kind, [tuple(map(int, target)) for target in targets])

    def begin(self, decision: LayerDecision[str]) -> None:
        self.add("cut", decision.cut[decision.gated.routing.active.experts].tolist())
        self.note("plan", decision.targets)
        super().begin(decision)

    def prefetch(self, targets: Sequence[Target], no_room: int) -> None:
        self.note(f"wanted {no_room + sum(target.tiles > 0 for target in targets)}", targets)
        super().prefetch(targets, no_room)

    def end(self, targets: Sequence[Target]) -> None:
        self.note("after", targets)
        super().end(targets)


def decided(request: PolicyRequest, name: str) -> int:
    """A checksum of a policy's decisions."""
    shape, capacity = SHAPES[name]
    rng = np.random.default_rng(11)
    popularity = rng.integers(0, 99, (shape.layers, shape.experts)).astype(np.int32)
    view = make_view(shape, capacity, popularity=popularity)
    view = replace(view, calibration=make_calibration(shape, rng))
    machine = Summed(make_policy(request, 3), view, rng, landing=0.8)
    machine.start()
    machine.add("placed", machine.target.tolist())
    for rows in STEPS:
        machine.step(rows, "prefill" if rows > 1 else "decode", tuple(row % 3 for row in range(rows)))
    return machine.checksum


def every() -> dict[str, int]:
    return {f"{request.label}, {name}": decided(request, name) for request in REQUESTS for name in SHAPES}


@pytest.mark.parametrize("name", SHAPES)
def test_decisions_are_the_recorded_ones(name: str) -> None:
    recorded = json.loads(RECORDED.read_text())
    wanted = {label: checksum for label, checksum in recorded.items() if label.endswith(f", {name}")}
    assert {f"{request.label}, {name}": decided(request, name) for request in REQUESTS} == wanted


if __name__ == "__main__":
    sys.exit(RECORDED.write_text(json.dumps(every(), indent=1) + "\n") < 0)
