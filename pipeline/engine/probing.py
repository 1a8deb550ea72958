"""Routers applied to another layer's hidden state: what predictions and traces are made from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.backbone.backbone import Backbone
from pipeline.engine.observer import Observer
from pipeline.errors import PlanError
from pipeline.policies.calibration import Calibration
from pipeline.policies.view import Policy, View


class Probing:
    """A model's routers, and its calibration's gate for the next token's first layer where there is one."""

    def __init__(self, backbone: Backbone, device: torch.device, calibration: Calibration | None) -> None:
        self._backbone = backbone
        gate = None if calibration is None else calibration.first_gate
        self._first_gate = None if gate is None else torch.tensor(gate, device=device)

    @property
    def has_first_gate(self) -> bool:
        """Whether the next token's first layer can be probed at the last."""
        return self._first_gate is not None

    def logits(self, target: int, x: Tensor) -> Tensor:
        """Router logits float32 [R, E] of a later layer, or (0) of the next token's first. Raises
        PlanError."""
        if target > 0:
            return self._backbone.router(target, x)
        if self._first_gate is None:
            raise PlanError("a probe of the next token's first layer needs a calibration")
        return functional.linear(x, self._first_gate)


def wanted_probes(layer: int, policy: Policy, observers: Sequence[Observer], view: View) -> tuple[int, ...]:
    """The layers whose routers somebody wants applied to this layer's x, beside its own."""
    targets = policy.probes(layer, view)
    for observer in observers:
        targets += tuple(target for target in observer.probes(layer) if target not in targets)
    return targets
