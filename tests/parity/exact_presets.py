"""Every preset in its exact form and without a calibration, which tiny models do not have; and costs."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.policies.presets import PRESETS, RandomPlan

OTHERWISE: dict[str, dict[str, str]] = {
    "dali": {"prediction": "next-gate"},
    "adapmoe": {"placement": "empty", "gate": "own", "sizes": "even"},
    "pre-gated": {"gate": "own"},
    "daop": {"placement": "popular", "predict": "0"},
    "floe": {"placement": "empty", "sparsity": "0"},
    "floe-host": {"sparsity": "0"},
}
# Measuring them would take longer than everything else. With these a fetch pays from a few rows on.
COSTS = {"rows": [1, 16], "host": [3e-5, 2e-4], "device": [1e-5, 2e-5], "link": 6e-5, "round_trip": 1e-5}
# These divide experts between resident and other tiles, so that every engine with several tiles has them.
DIVIDING: dict[str, dict[str, str]] = {"moepic": {"theta": "0.5"}, "tandem": {}}
EXACT_PRESETS = [
    (name, OTHERWISE.get(name, {})) for name in PRESETS if name != RandomPlan.name and name not in DIVIDING
]


def sample(number: int, of: int) -> list[tuple[str, dict[str, str]]]:
    """Every `of`th preset, from a position that depends on the number: `of` engines with consecutive numbers
    cover all presets."""
    return EXACT_PRESETS[number % of :: of]


def costs(folder: Path) -> Path:
    """A file of COSTS in this folder."""
    path = folder / "costs"
    path.write_text(json.dumps(COSTS))
    return path
