"""Observers of the engine, which make traces and calibrations, and probes: routers applied to another layer's
input. An observer does not change the computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.arrays import FloatArray, Phase
from pipeline.backbone.backbone import Backbone
from pipeline.engine.driver import LayerDecision
from pipeline.errors import PlanError
from pipeline.policies.calibration import Calibration


class Observer(Protocol):
    """Called by the engine's thread."""

    def probes(self, layer: int) -> tuple[int, ...]:
        """As `Policy.probes`."""

    def begin(self, phase: Phase, sequences: tuple[int, ...]) -> None:
        """A step begins; the sequence of each of its rows [R]."""

    def layer(self, decision: LayerDecision[object], x: FloatArray) -> None:
        """A layer has been decided and is about to be computed. x [R, H]: the input of its router and
        experts. All arrays are valid during the call alone."""

    def end(self) -> None:
        """The step has been computed. Not called for a step that failed."""


class Probing:
    """A model's routers, and its calibration's gate for the next token's first layer, if it has one."""

    def __init__(self, backbone: Backbone, device: torch.device, calibration: Calibration | None) -> None:
        self._backbone = backbone
        gate = None if calibration is None else calibration.first_gate
        self._first_gate = None if gate is None else torch.tensor(gate, device=device)

    @property
    def has_first_gate(self) -> bool:
        """Whether the last layer can probe the next token's first layer."""
        return self._first_gate is not None

    def logits(self, target: int, x: Tensor) -> Tensor:
        """Float32 [R, E] of a later layer, or (0) of the next token's first. Raises PlanError."""
        if target > 0:
            return self._backbone.router(target, x)
        if self._first_gate is None:
            raise PlanError("a probe of the next token's first layer needs a calibration")
        return functional.linear(x, self._first_gate)


def with_observers(layer: int, probes: Sequence[int], observers: Sequence[Observer]) -> list[int]:
    """The policy's probes of a layer, followed by those of the observers that are not among them."""
    wanted = list(probes)
    for observer in observers:
        wanted += [target for target in observer.probes(layer) if target not in wanted]
    return wanted
