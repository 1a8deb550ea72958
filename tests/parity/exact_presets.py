"""Every preset as it computes exactly, and without a calibration, which tiny models have not got."""

from __future__ import annotations

from pipeline.policies.presets import PRESETS
from pipeline.policies.random_plan import RandomPlan

OTHERWISE: dict[str, dict[str, str]] = {
    "dali": {"prediction": "next-gate"},
    "adapmoe": {"placement": "empty", "gate": "own", "sizes": "even"},
    "daop": {"placement": "popular", "predict": "0"},
}
EXACT_PRESETS = [(name, OTHERWISE.get(name, {})) for name in PRESETS if name != RandomPlan.name]


def half(number: int) -> list[tuple[str, dict[str, str]]]:
    """Every other preset: of an even and an odd engine together all."""
    return EXACT_PRESETS[number % 2 :: 2]
