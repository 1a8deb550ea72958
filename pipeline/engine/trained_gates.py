"""The gates that a calibration has trained, on the device: by the target of their probe."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.policies.calibration import Calibration

TrainedGate = Callable[[Tensor], Tensor]  # x [R, H] -> logits float32 [R, E]


def trained_gates(calibration: Calibration | None, device: torch.device) -> dict[int, TrainedGate]:
    """0: the next token's first layer, from the last layer's x. -t: what is added to the logits of layer t's
    router on the x of the layer before."""
    gates: dict[int, TrainedGate] = {}
    if calibration is None:
        return gates
    if calibration.first_gate is not None:
        gates[0] = partial(functional.linear, weight=torch.tensor(calibration.first_gate, device=device))
    if calibration.mlp_inner is not None and calibration.mlp_outer is not None:
        pairs = zip(calibration.mlp_inner, calibration.mlp_outer, strict=True)
        for layer, (inner, outer) in enumerate(pairs, start=1):
            gates[-layer] = partial(
                _mlp, torch.tensor(inner, device=device), torch.tensor(outer, device=device)
            )
    return gates


def _mlp(inner: Tensor, outer: Tensor, x: Tensor) -> Tensor:
    return functional.linear(functional.silu(functional.linear(x, inner)), outer)
