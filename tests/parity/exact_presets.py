"""Every preset in its exact form and without a calibration, which tiny models do not have."""

from __future__ import annotations

from pipeline.policies.presets import PRESETS
from pipeline.policies.random_plan import RandomPlan

OTHERWISE: dict[str, dict[str, str]] = {
    "dali": {"prediction": "next-gate"},
    "adapmoe": {"placement": "empty", "gate": "own", "sizes": "even"},
    "daop": {"placement": "popular", "predict": "0"},
}
EXACT_PRESETS = [(name, OTHERWISE.get(name, {})) for name in PRESETS if name != RandomPlan.name]


def sample(number: int, of: int) -> list[tuple[str, dict[str, str]]]:
    """Every `of`th preset, from a position that depends on the number: `of` engines with consecutive numbers
    cover all presets."""
    return EXACT_PRESETS[number % of :: of]
