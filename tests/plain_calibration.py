"""A calibration in which everything is alike, for tests that set what they need."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.policies.calibration import Calibration


def plain_calibration(
    layers: int, experts: int, hidden: int = 4, accuracy: float = 1.0, **fields: Any
) -> Calibration:
    """Of a model with two experts a token. `fields` replace those of the Calibration."""
    names, counts = ("raw", "residual", "first"), np.ones((layers, experts), np.int64)
    even = np.linspace(0, 1, experts + 1, dtype=np.float32)
    plain = {
        "decode_counts": counts,
        "residual_logits": np.zeros((layers - 1, experts), np.float32),
        "accuracy": {name: np.full(layers, accuracy, np.float32) for name in names},
        "kept": np.full((layers, 2, 3), 1 / 3, np.float32),
        "gated_accuracy": {name: np.full((layers, 2), accuracy, np.float32) for name in names},
        "sensitivity": np.ones(layers, np.float32),
        "threshold": 0.05,
        "first_gate": None,
        "hit_rates": np.tile(even, (layers, 1)),
    }
    return Calibration(**(plain | fields))
